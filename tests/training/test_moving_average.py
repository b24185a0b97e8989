"""A moving average of weights, worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from glm_grpo.training.moving_average import MovingAverage, share_of_change
from tests.factories import NoPolicy


class OneWeight(NoPolicy):
    """A policy of one weight, which it copies in and gives out as it is."""

    def __init__(self, value: float, dtype: torch.dtype = torch.float32) -> None:
        self.weight = nn.Parameter(torch.tensor([value], dtype=dtype))

    def state_tensors(self):
        return {"weight": self.weight}

    def load_state_tensors(self, tensors):
        with torch.no_grad():
            self.weight.copy_(tensors["weight"])

    def train_to(self, value: float) -> None:
        self.load_state_tensors({"weight": torch.tensor([value])})


LATE = 1000
"""A step at which the decay is as given."""


def test_average_forgets_the_first_weights_at_once_and_then_ever_less() -> None:
    policy = OneWeight(100.0)
    average = MovingAverage(policy, decay=0.75)
    # Decays 0; 2 / 11; 3 / 12; and 0.75, because 30 / 39 is more.
    for step, weight, expected in ((1, 4.0, 4.0), (2, 15.0, 13.0), (3, -3.0, 1.0), (30, 5.0, 2.0)):
        policy.train_to(weight)
        average.update(step)
        assert average.tensors()["weight"].tolist() == [pytest.approx(expected)]


@pytest.mark.parametrize(
    ("steps", "decay", "share"),
    [
        # The last weights themselves.
        (1, 0.9, 1.0),
        # A tenth of the steps behind, as long as decay grows.
        (5, 0.999, 0.9),
        (200, 0.999, 0.9),
        # decay / (1 - decay) = 9 steps behind.
        (900, 0.9, 0.99),
    ],
)
def test_share_of_change_is_what_the_lag_leaves(steps: int, decay: float, share: float) -> None:
    assert share_of_change(steps, decay) == pytest.approx(share, abs=1e-3)


def test_average_is_kept_in_fp32_where_the_policy_has_fewer_bits() -> None:
    policy = OneWeight(1.0, torch.bfloat16)
    average = MovingAverage(policy, decay=0.5)
    policy.train_to(1.0078125)
    average.update(LATE)
    # Half of the smallest step that bfloat16 has at 1.
    assert average.tensors()["weight"].tolist() == [1.00390625]


def test_policy_has_the_average_inside_and_its_own_weights_afterwards() -> None:
    policy = OneWeight(2.0)
    average = MovingAverage(policy, decay=0.5)
    policy.train_to(4.0)
    average.update(LATE)
    with average.in_place():
        assert policy.weight.tolist() == [3.0]
    assert policy.weight.tolist() == [4.0]
    with pytest.raises(KeyboardInterrupt), average.in_place():
        raise KeyboardInterrupt
    assert policy.weight.tolist() == [4.0]


def test_loaded_average_goes_on_from_there_and_leaves_what_it_was_loaded_from() -> None:
    policy = OneWeight(4.0)
    average = MovingAverage(policy, decay=0.5)
    stored = {"weight": torch.tensor([0.0])}
    average.load(stored)
    average.update(LATE)
    assert average.tensors()["weight"].tolist() == [2.0]
    assert stored["weight"].tolist() == [0.0]
