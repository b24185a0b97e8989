"""The scoring of the pages against that of training: the same numbers, the same decisions."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Error, Page
from torch import Tensor

from glm_grpo.grpo.advantages import group_advantages
from glm_grpo.report.rescoring.rescore import kendall_taus, winner_changes
from rewards.reweigh import Mode, advantage_shares, combine, contributions, is_flat
from rewards.types import RewardTable

NAMES = ("lpips", "ssim", "ocr", "aesthetic")
WEIGHTS = (0.4, 0.2, 0.3, 0.1)
OTHER_WEIGHTS = (0.05, 0.0, -0.7, 0.9)
ADVANTAGE = {"normalization": "group_std", "std_floor": 0.02, "clip": 5.0}
MODES: tuple[Mode, ...] = ("weighted_sum", "normalize_then_sum")
PROMPTS, IMAGES, STEPS = 5, 6, 4
SCRIPTS = ("scoring.js", "advantages.js", "comparing.js")


@pytest.fixture(scope="module")
def page(browser: Browser) -> Page:
    """A page with nothing but the scoring on it."""
    page = browser.new_page()
    page.evaluate("window.glmGallery = {}")
    for name in SCRIPTS:
        source = resources.files("glm_grpo.gallery") / "static" / name
        page.evaluate(source.read_text(encoding="utf-8"))
    return page


def make_table(seed: int) -> RewardTable:
    """Groups of all steps, with masks, ties, groups that are flat and one that nearly is."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.rand(STEPS * PROMPTS, IMAGES, len(NAMES), generator=generator)
    raw[::PROMPTS] = raw[::PROMPTS, :1]
    raw[1::PROMPTS, :2] = raw[1::PROMPTS, 2:3]
    # Less than a unit of rounding apart, and a little more than the tolerance.
    raw[2, :, :] = 0.5 + 2.0**-24 * torch.arange(IMAGES)[:, None]
    raw[3, :, :] = 0.5 + 2.0**-20 * torch.arange(IMAGES)[:, None]
    is_applicable = torch.rand(STEPS * PROMPTS, len(NAMES), generator=generator) < 0.7
    is_applicable[:, 3] = True
    return RewardTable(
        names=NAMES,
        raw=raw * is_applicable[:, None, :],
        is_applicable=is_applicable,
        weights=torch.tensor(WEIGHTS),
        std_floors=torch.tensor([1e-4, 1e-4, 0.2, 1e-4]),
    )


def make_penalty(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.1 * torch.randn(STEPS * PROMPTS, IMAGES, generator=generator)


def to_reward(table: RewardTable, mode: Mode, weights: tuple[float, ...]) -> dict[str, Any]:
    """`run.reward` of the pages; the weights as the config has them, not yet in float32."""
    terms = [
        {"name": name, "weight": weight, "std_floor": floor}
        for name, weight, floor in zip(table.names, weights, table.std_floors.tolist(), strict=True)
    ]
    return {"combine": mode, "terms": terms}


def to_groups(table: RewardTable, penalty: Tensor) -> list[dict[str, Any]]:
    totals = combine(table, mode="weighted_sum")
    return [
        {
            "prompt_id": f"p{row}",
            "images": [f"p{row}-{image}.png" for image in range(table.raw.shape[1])],
            "raw": {
                name: table.raw[row, :, column].tolist()
                if table.is_applicable[row, column]
                else None
                for column, name in enumerate(table.names)
            },
            "penalty": penalty[row].tolist(),
            "total": totals[row].tolist(),
        }
        for row in range(len(table.raw))
    ]


def to_steps(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"step": step + 1, "groups": groups[step * PROMPTS : (step + 1) * PROMPTS]}
        for step in range(STEPS)
    ]


def call(page: Page, name: str, *arguments: Any) -> Any:
    call = f"(values) => glmGallery.scoring.{name}(...values)"
    return page.evaluate(call, list(arguments))


def compare(page: Page, *arguments: Any) -> dict[str, Any]:
    """What scoring.compare gives, with the columns of every group."""
    return page.evaluate(
        """(values) => {
          const comparison = glmGallery.scoring.compare(...values);
          const perGroup = comparison.perGroup.map((group) => ({
            ...group,
            totalsAfter: [...group.totalsAfter],
            advantagesAfter: group.advantagesAfter && [...group.advantagesAfter],
          }));
          return { ...comparison, perGroup };
        }""",
        list(arguments),
    )


@pytest.mark.parametrize("mode", MODES)
def test_scoring_weighs_a_group_as_training_does_to_the_bit(page: Page, mode: Mode) -> None:
    table = replace(make_table(seed=1), weights=torch.tensor(OTHER_WEIGHTS))
    expected, totals = contributions(table, mode=mode), combine(table, mode=mode)
    reward = to_reward(table, mode, OTHER_WEIGHTS)
    for row, group in enumerate(to_groups(table, make_penalty(1))):
        parts = call(page, "contributions", group, reward)
        for column, name in enumerate(NAMES):
            if not table.is_applicable[row, column]:
                assert parts[name] is None
            else:
                assert parts[name] == expected[row, :, column].tolist()
        assert call(page, "totals", group, reward) == totals[row].tolist()


@pytest.mark.parametrize(
    ("mode", "normalization", "clip"),
    [
        ("weighted_sum", "group_std", 1.2),
        ("normalize_then_sum", "batch_std", None),
        ("weighted_sum", "mean_only", None),
    ],
)
def test_scoring_compares_two_rewards_as_rescore_does(
    page: Page, mode: Mode, normalization: Any, clip: float | None
) -> None:
    table, penalty = make_table(seed=4), make_penalty(seed=4)
    # The first group is flat only where nothing was taken off.
    penalty[0] = 0.0
    other = replace(table, weights=torch.tensor(OTHER_WEIGHTS))
    before, after = combine(table, mode="weighted_sum"), combine(other, mode=mode)
    found = compare(
        page,
        to_steps(to_groups(table, penalty)),
        to_reward(table, "weighted_sum", WEIGHTS),
        to_reward(table, mode, OTHER_WEIGHTS),
        {"normalization": normalization, "std_floor": 0.02, "clip": clip},
    )
    taus = kendall_taus(before, after)
    assert [group["rankCorrelation"] for group in found["perGroup"]] == [
        None if tau != tau else pytest.approx(tau, abs=1e-6) for tau in taus.tolist()
    ]
    changes = winner_changes(before, after).tolist()
    assert [group["isWinnerChanged"] for group in found["perGroup"]] == changes
    assert [group["isFlatBefore"] for group in found["perGroup"]] == is_flat(before).tolist()
    assert [group["isFlatAfter"] for group in found["perGroup"]] == is_flat(after).tolist()
    assert found["rankCorrelation"] == pytest.approx(taus[~taus.isnan()].mean().item(), abs=1e-6)
    assert [term["shareAfter"] for term in found["terms"]] == pytest.approx(
        advantage_shares(other, mode=mode).tolist(), abs=1e-6
    )
    advantages = torch.cat(
        [
            group_advantages(returns, normalization=normalization, std_floor=0.02, clip=clip).values
            for returns in (after - penalty).split(PROMPTS)
        ]
    )
    columns = torch.tensor([group["advantagesAfter"] for group in found["perGroup"]])
    assert torch.allclose(columns, advantages, rtol=0, atol=1e-6)
    assert not columns[0].any()
    assert (found["images"], found["groups"]) == (STEPS * PROMPTS * IMAGES, STEPS * PROMPTS)


@pytest.mark.parametrize(
    ("second", "is_tied"),
    # The tolerance of a group whose largest total is 1 is 2^-20; 2^-24 is the next number down.
    [(1 - 2.0**-20, True), (1 - 2.0**-20 - 2.0**-24, False)],
)
def test_scoring_ties_and_flattens_at_the_tolerance_of_training(
    page: Page, second: float, is_tied: bool
) -> None:
    groups = [
        {
            "prompt_id": "p",
            "images": ["a", "b"],
            "raw": {"ocr": [1.0, second], "ssim": [0.0, 1.0]},
            "penalty": [0.0, 0.0],
            "total": [1.0, second],
        }
    ]

    def weigh(ocr: float, ssim: float) -> dict[str, Any]:
        terms = [
            {"name": "ocr", "weight": ocr, "std_floor": 1e-4},
            {"name": "ssim", "weight": ssim, "std_floor": 1e-4},
        ]
        return {"combine": "weighted_sum", "terms": terms}

    steps = [{"step": 1, "groups": groups}]
    found = compare(page, steps, weigh(1.0, 0.0), weigh(0.0, 1.0), ADVANTAGE)
    assert found["flatBefore"] == is_tied
    # Tied images both win, so that none of two others takes a win from them.
    assert found["changedWinners"] == (not is_tied)
    assert found["perGroup"][0]["rankCorrelation"] == (None if is_tied else -1)


def test_scoring_gives_equal_totals_one_rank(page: Page) -> None:
    # In order: 1 and 1 - 2^-20 are equal, 1 - 2^-20 - 2^-24 is not to the highest of them.
    totals = [1.0, 0.5, 1 - 2.0**-20 - 2.0**-24, 1 - 2.0**-20, 1 - 2.0**-19]
    ranks = call(page, "ranks", totals)
    assert ranks == [1, 5, 3, 1, 3]
    assert call(page, "orderByRank", ranks) == [0, 3, 2, 4, 1]
    assert call(page, "best", totals) == [rank == 1 for rank in ranks]
    assert call(page, "ranks", [-0.25] * 3) == [1, 1, 1]


def test_scoring_counts_groups_that_hold_other_totals(page: Page) -> None:
    table = make_table(seed=6)
    groups = to_groups(table, make_penalty(6))
    groups[7]["total"][2] += 1e-4
    reward = to_reward(table, "weighted_sum", WEIGHTS)
    assert compare(page, to_steps(groups), reward, reward, None)["differingGroups"] == 1


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((0, 0, 0, 0), "the weights of all terms .* are 0.*; set one of them"),
        # A prompt has nothing but aesthetic.
        (
            (1, 1, 1, 0),
            r"prompt p4 has no total: .*\(aesthetic\).*reward.terms.aesthetic.weight=0.1",
        ),
        ((1e39, 0, 0, 1), r"lpips.weight = 1e\+39: must be 0, or 1e-30 to 1e\+12"),
    ],
)
def test_scoring_refuses_weights_that_give_no_total(
    page: Page, weights: tuple[float, ...], message: str
) -> None:
    table = make_table(seed=8)
    table.is_applicable[:] = True
    table.is_applicable[4] = torch.tensor([False, False, False, True])
    groups = to_groups(table, make_penalty(8))
    own = to_reward(table, "weighted_sum", WEIGHTS)
    with pytest.raises(Error, match=message):
        compare(page, to_steps(groups), own, to_reward(table, "weighted_sum", weights), ADVANTAGE)
