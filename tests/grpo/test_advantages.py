"""Expected values are worked out by hand beside each test."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glm_grpo.grpo.advantages import group_advantages
from glm_grpo.types import Normalization

NORMALIZATIONS: tuple[Normalization, ...] = ("group_std", "mean_only", "batch_std")


def rewards_of(*groups: tuple[float, ...]) -> Tensor:
    return torch.tensor(groups, dtype=torch.float32)


def test_group_std_divides_by_the_sample_std_of_each_group() -> None:
    # 1, 2, 3: mean 2, sample std 1. 0, 0, 3: mean 1, sample variance (1 + 1 + 4) / 2 = 3.
    advantages = group_advantages(
        rewards_of((1, 2, 3), (0, 0, 3)), normalization="group_std", std_floor=0.0, clip=None
    )
    root = math.sqrt(3)
    expected = torch.tensor([[-1, 0, 1], [-1 / root, -1 / root, 2 / root]])
    torch.testing.assert_close(advantages, expected)


def test_mean_only_leaves_the_scale_of_the_rewards() -> None:
    advantages = group_advantages(
        rewards_of((0, 0, 3)), normalization="mean_only", std_floor=100.0, clip=None
    )
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, -1.0, 2.0]]))


def test_batch_std_divides_every_group_by_one_std() -> None:
    # Centred: -1, 1 and -2, 2; sample variance over four values (1 + 1 + 4 + 4) / 3 = 10 / 3.
    advantages = group_advantages(
        rewards_of((0, 2), (10, 14)), normalization="batch_std", std_floor=0.0, clip=None
    )
    std = math.sqrt(10 / 3)
    expected = torch.tensor([[-1 / std, 1 / std], [-2 / std, 2 / std]])
    torch.testing.assert_close(advantages, expected)


def test_std_floor_keeps_a_nearly_flat_group_small() -> None:
    # Sample std of 0.500, 0.502 is 0.001 * sqrt(2), below the floor of 0.1: -0.001 / 0.1.
    advantages = group_advantages(
        rewards_of((0.5, 0.502)), normalization="group_std", std_floor=0.1, clip=None
    )
    torch.testing.assert_close(advantages, torch.tensor([[-0.01, 0.01]]), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_flat_groups_are_exactly_zero_beside_a_group_that_is_not(
    normalization: Normalization,
) -> None:
    # 0.1 summed in two orders differs in the last bit only.
    last_bit = torch.nextafter(torch.tensor(0.3), torch.tensor(1.0)).item()
    advantages = group_advantages(
        rewards_of((0.3, 0.3, last_bit), (0.0, 0.0, 0.0), (-7.1, -7.1, -7.1), (0.0, 0.0, 1.0)),
        normalization=normalization,
        std_floor=0.0,
        clip=2.0,
    )
    assert torch.equal(advantages[:3], torch.zeros(3, 3))
    assert advantages[3, 2] > 0


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_a_batch_of_flat_groups_is_zero_without_a_floor(normalization: Normalization) -> None:
    advantages = group_advantages(
        torch.full((2, 4), 0.7), normalization=normalization, std_floor=0.0, clip=None
    )
    assert torch.equal(advantages, torch.zeros(2, 4))


def test_small_but_meant_differences_are_not_flat() -> None:
    advantages = group_advantages(
        rewards_of((0.5, 0.50001)), normalization="mean_only", std_floor=0.0, clip=None
    )
    assert advantages[0, 1] > 0


def test_clip_scales_the_whole_group_down_to_the_bound() -> None:
    # Centred -1, -1, 2 with a bound of 1: halved. The other group is inside the bound.
    advantages = group_advantages(
        rewards_of((0, 0, 3), (0, 0, 0.3)), normalization="mean_only", std_floor=0.0, clip=1.0
    )
    expected = torch.tensor([[-0.5, -0.5, 1.0], [-0.1, -0.1, 0.2]])
    torch.testing.assert_close(advantages, expected)


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(
        st.lists(st.floats(-100, 100, width=32), min_size=4, max_size=4), min_size=1, max_size=3
    ),
    normalization=st.sampled_from(NORMALIZATIONS),
    clip=st.sampled_from([None, 0.5]),
)
def test_group_advantages_sum_to_zero_and_keep_the_order_of_rewards(
    groups: list[list[float]], normalization: Normalization, clip: float | None
) -> None:
    rewards = torch.tensor(groups, dtype=torch.float32)
    values = group_advantages(rewards, normalization=normalization, std_floor=1e-4, clip=clip)
    tolerance = 1e-6 * max(1.0, values.abs().max().item())
    assert values.double().sum(dim=1).abs().max().item() <= 4 * tolerance
    order = rewards.argsort(dim=1, stable=True)
    assert (values.gather(1, order).diff(dim=1) >= 0).all()
    if clip is not None:
        assert values.abs().max().item() <= clip * (1 + 1e-6)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_flipping_the_rewards_flips_the_advantages(normalization: Normalization) -> None:
    rewards = rewards_of((0.1, 0.4, 0.3), (0.9, 0.2, 0.8))

    def values_of(rewards: Tensor) -> Tensor:
        return group_advantages(rewards, normalization=normalization, std_floor=1e-4, clip=None)

    torch.testing.assert_close(values_of(-rewards), -values_of(rewards))


def test_an_infinite_reward_is_refused_with_row_and_image() -> None:
    rewards = rewards_of((0, 1, 2), (0, 1, math.inf))
    with pytest.raises(ValueError, match="prompt row 1, image 2"):
        group_advantages(rewards, normalization="group_std", std_floor=0.1, clip=None)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_an_image_left_out_leaves_the_advantages_of_a_smaller_group(
    normalization: Normalization, clip: float | None
) -> None:
    def advantages_of(rewards: Tensor) -> Tensor:
        return group_advantages(rewards, normalization=normalization, std_floor=0.1, clip=clip)

    left_out = advantages_of(rewards_of((1, math.nan, 2, 4), (7, math.nan, 3, 2)))
    assert left_out[:, 1].tolist() == [0.0, 0.0]
    assert left_out[:, [0, 2, 3]].equal(advantages_of(rewards_of((1, 2, 4), (7, 3, 2))))


def test_batch_std_does_not_count_images_that_are_left_out() -> None:
    # Centred: -1, 1 and -2, 0, 2; the five have sample variance (1 + 1 + 4 + 0 + 4) / 4 = 2.5.
    advantages = group_advantages(
        rewards_of((0, 2, math.nan), (10, 12, 14)),
        normalization="batch_std",
        std_floor=0.0,
        clip=None,
    )
    std = math.sqrt(2.5)
    expected = torch.tensor([[-1 / std, 1 / std, 0.0], [-2 / std, 0.0, 2 / std]])
    torch.testing.assert_close(advantages, expected)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_a_group_with_fewer_than_two_images_left_is_flat(normalization: Normalization) -> None:
    nan = math.nan
    advantages = group_advantages(
        rewards_of((1, nan, nan), (nan, nan, nan), (1, 2, nan)),
        normalization=normalization,
        std_floor=0.1,
        clip=None,
    )
    assert advantages[:2].count_nonzero() == 0
    assert advantages.isfinite().all()


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="group size 1"):
        group_advantages(torch.zeros(2, 1), normalization="mean_only", std_floor=0.0, clip=None)
