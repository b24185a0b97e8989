from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from glm_grpo.probe.probe import FullDecode, join_decodes, report_decode
from rewards.types import RewardTable


def make_table(*groups: list[float]) -> RewardTable:
    """Groups of three images, scored by `ssim` and, the other way round, by `lpips`."""
    scores = torch.tensor(groups)
    return RewardTable(
        names=("ssim", "lpips"),
        raw=torch.stack([scores, -scores], dim=-1),
        is_applicable=torch.ones(len(groups), 2, dtype=torch.bool),
        weights=torch.tensor([3.0, 1.0]),
        std_floors=torch.tensor([1e-4, 1e-4]),
    )


FULL = FullDecode(
    rewards=make_table([1.0, 2.0, 3.0]),
    steps=4,
    cheap_steps=1,
    timed_images=3,
    seconds=0.5,
    cheap_seconds=0.25,
)


def test_report_decode_correlates_each_term_and_divides_images_by_seconds() -> None:
    cheap = make_table([1.0, 3.0, 2.0])
    # One pair of neighbours swapped: 1 - 6 * 2 / (3 * 8).
    decode = report_decode(FULL, cheap, mode="weighted_sum", min_rank_correlation=0.75)
    assert decode.rank_correlations == pytest.approx((0.5, 0.5))
    assert decode.total_rank_correlation == pytest.approx(0.5)
    assert (decode.steps, decode.full_steps, decode.min_rank_correlation) == (1, 4, 0.75)
    assert (decode.images_per_second, decode.full_images_per_second) == (12.0, 6.0)


def test_join_decodes_puts_prompts_after_prompts_and_adds_up_what_was_timed() -> None:
    other = replace(
        FULL, rewards=make_table([7.0, 8.0, 9.0], [4.0, 5.0, 6.0]), seconds=1.0, cheap_seconds=0.5
    )
    joined = join_decodes([FULL, other])
    assert joined.rewards.raw[..., 0].tolist() == [[1, 2, 3], [7, 8, 9], [4, 5, 6]]
    assert (joined.timed_images, joined.seconds, joined.cheap_seconds) == (6, 1.5, 0.75)
    assert (joined.steps, joined.cheap_steps) == (4, 1)
