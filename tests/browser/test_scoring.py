"""The scoring of the pages against that of training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from glm_grpo.grpo.advantages import group_advantages
from glm_grpo.studio.rescore.rescore import kendall_taus, winner_changes
from rewards.types import RewardTable
from rewards.weighting import Mode, advantage_shares, combine, contributions, is_zero_std
from tests.browser.conftest import OpenGallery

NAMES = ("lpips", "ssim", "ocr", "aesthetic")
WEIGHTS = (0.4, 0.2, 0.3, 0.1)
OTHER_WEIGHTS = (0.05, 0.0, -0.7, 0.9)
PROMPTS, IMAGES, STEPS = 5, 6, 4


def make_table() -> RewardTable:
    """Groups of all steps, with masks, ties, refused images, zero-std groups and one nearly so."""
    generator = torch.Generator().manual_seed(4)
    raw = torch.rand(STEPS * PROMPTS, IMAGES, len(NAMES), generator=generator)
    raw[::PROMPTS] = raw[::PROMPTS, :1]
    raw[1::PROMPTS, :2] = raw[1::PROMPTS, 2:3]
    # The first is a zero-std group up to rounding, the second is not: float32 leaves enough digits
    # of its differences for a share to 1e-6.
    raw[2, :, :] = 0.5 + 2.0**-24 * torch.arange(IMAGES)[:, None]
    raw[3, :, :] = 0.5 + 2.0**-14 * torch.arange(IMAGES)[:, None]
    is_applicable = torch.rand(STEPS * PROMPTS, len(NAMES), generator=generator) < 0.7
    is_applicable[:, 3] = True
    raw = raw * is_applicable[:, None, :]
    # By a term with weights: one image, all but one, and all; by one without a weight in the end.
    raw[4, 1, 3] = raw[12, 1:, 3] = raw[8, :, 3] = torch.nan
    is_applicable[9, 1] = True
    raw[9, 2, 1] = torch.nan
    return RewardTable(
        names=NAMES,
        raw=raw,
        is_applicable=is_applicable,
        weights=torch.tensor(WEIGHTS),
        std_floors=torch.tensor([1e-4, 1e-4, 0.2, 1e-4]),
    )


def to_reward(table: RewardTable, mode: Mode, weights: tuple[float, ...]) -> dict[str, Any]:
    """`run.reward` of the pages; the weights as the config has them, not yet in float32."""
    terms = [
        {"name": name, "weight": weight, "std_floor": floor}
        for name, weight, floor in zip(table.names, weights, table.std_floors.tolist(), strict=True)
    ]
    return {"combine": mode, "terms": terms}


def with_null(scores: torch.Tensor) -> list[float | None]:
    """As the pages get them."""
    return [None if score != score else score for score in scores.tolist()]


def close_to(values: torch.Tensor) -> Any:
    return pytest.approx(values.tolist(), abs=1e-6, nan_ok=True)


def to_steps(table: RewardTable, penalty: torch.Tensor) -> list[dict[str, Any]]:
    totals = combine(table, mode="weighted_sum")
    groups = [
        {
            "prompt_id": f"p{row}",
            "images": [f"p{row}-{image}.png" for image in range(IMAGES)],
            "raw": {
                name: with_null(table.raw[row, :, column])
                if table.is_applicable[row, column]
                else None
                for column, name in enumerate(table.names)
            },
            "penalty": penalty[row].tolist(),
            "total": with_null(totals[row]),
        }
        for row in range(len(table.raw))
    ]
    return [
        {"step": step + 1, "groups": groups[step * PROMPTS : (step + 1) * PROMPTS]}
        for step in range(STEPS)
    ]


@pytest.mark.parametrize(
    ("mode", "normalization", "std_floor", "clip"),
    [
        ("weighted_sum", "group_std", 0.02, 1.2),
        ("normalize_then_sum", "batch_std", 0.02, None),
        ("weighted_sum", "mean_only", 0.02, 0.1),
    ],
)
def test_pages_score_as_training_does(
    open_gallery: OpenGallery, mode: Mode, normalization: Any, std_floor: float, clip: float | None
) -> None:
    table = make_table()
    penalty = 0.1 * torch.randn(table.raw.shape[:2], generator=torch.Generator().manual_seed(4))
    # The first group is a zero-std group only where nothing was taken off.
    penalty[0] = 0.0
    steps = to_steps(table, penalty)
    # One stored total does not follow from the scores.
    steps[1]["groups"][1]["total"][2] += 1e-4
    found = open_gallery().evaluate(
        """([steps, own, other, settings]) => {
          const { compare, score } = glmGallery.scoring;
          return compare(score(steps, own, settings), score(steps, other, settings));
        }""",
        [
            steps,
            to_reward(table, "weighted_sum", WEIGHTS),
            to_reward(table, mode, OTHER_WEIGHTS),
            {"normalization": normalization, "std_floor": std_floor, "clip": clip},
        ],
    )
    other = replace(table, weights=torch.tensor(OTHER_WEIGHTS))
    before, after = combine(table, mode="weighted_sum"), combine(other, mode=mode)
    advantages = torch.cat(
        [
            group_advantages(rewards, normalization=normalization, std_floor=std_floor, clip=clip)
            for rewards in (after - penalty).split(PROMPTS)
        ]
    )
    groups = found["perGroup"]
    for row, (group, parts) in enumerate(zip(groups, contributions(other, mode=mode), strict=True)):
        expected = [
            close_to(part) if table.is_applicable[row, column] else None
            for column, part in enumerate(parts.T)
        ]
        assert list(group["after"]["parts"].values()) == expected
        assert group["before"]["totals"] == close_to(before[row])
        assert group["after"]["totals"] == close_to(after[row])
        assert group["after"]["advantages"] == close_to(advantages[row])
    assert not advantages[0].any()
    assert [group["before"]["isZeroStd"] for group in groups] == is_zero_std(before).tolist()
    assert [group["after"]["isZeroStd"] for group in groups] == is_zero_std(after).tolist()
    assert [group["isWinnerChanged"] for group in groups] == winner_changes(before, after).tolist()
    taus = kendall_taus(before, after)
    assert [group["tau"] for group in groups] == [
        None if tau != tau else pytest.approx(tau, abs=1e-6) for tau in taus.tolist()
    ]
    assert found["rankCorrelation"] == pytest.approx(taus[~taus.isnan()].mean().item(), abs=1e-6)
    shares = advantage_shares(other, mode=mode).tolist()
    assert [term["shareAfter"] for term in found["terms"]] == pytest.approx(shares, abs=1e-6)
    assert found["differingGroups"] == 1
