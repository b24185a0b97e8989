"""A moving average of weights, worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from glm_grpo.training.moving_average import MovingAverage
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


def test_average_takes_in_the_rest_of_its_decay_at_every_update() -> None:
    policy = OneWeight(0.0)
    average = MovingAverage(policy, decay=0.75)
    policy.train_to(4.0)
    # 0.75 * 0 + 0.25 * 4, then 0.75 * 1 + 0.25 * 4, then 0.75 * 1.75 + 0.25 * -4.
    for weight, expected in ((4.0, 1.0), (4.0, 1.75), (-4.0, 0.3125)):
        policy.train_to(weight)
        average.update()
        assert average.tensors()["weight"].tolist() == [expected]


def test_average_is_kept_in_fp32_where_the_policy_has_fewer_bits() -> None:
    policy = OneWeight(1.0, torch.bfloat16)
    average = MovingAverage(policy, decay=0.5)
    policy.train_to(1.0078125)
    average.update()
    # Half of the smallest step that bfloat16 has at 1.
    assert average.tensors()["weight"].tolist() == [1.00390625]


def test_policy_has_the_average_inside_and_its_own_weights_afterwards() -> None:
    policy = OneWeight(2.0)
    average = MovingAverage(policy, decay=0.5)
    policy.train_to(4.0)
    average.update()
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
    average.update()
    assert average.tensors()["weight"].tolist() == [2.0]
    assert stored["weight"].tolist() == [0.0]
