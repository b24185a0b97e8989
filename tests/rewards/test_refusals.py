from __future__ import annotations

import dataclasses

import pytest
import torch

from rewards.refusals import check_refusals, find_refusals, join_refusals
from rewards.score import Scorer, Term
from rewards.types import Prompt, RewardError, RewardTable
from tests.rewards.test_score import WITH_TEXT, WITHOUT_TEXT, FakeReward, grey

NAN = float("nan")
PROMPTS = [Prompt("a", "a"), Prompt("b", "b")]


def make_table(*columns: list[list[float]]) -> RewardTable:
    """Scores of two prompts by each term, the first of weight 1, the others only shown."""
    raw = torch.tensor(columns).movedim(0, -1)
    return RewardTable(
        names=("judge", "other")[: len(columns)],
        raw=raw,
        is_applicable=torch.ones(2, len(columns), dtype=torch.bool),
        weights=torch.tensor([1.0, 0.0])[: len(columns)],
        std_floors=torch.full((len(columns),), 1e-4),
        notes={"judge": (("fine", "fine"), ("no " * 100, "fine"))},
    )


def test_refusals_are_counted_and_the_first_is_named_with_its_note() -> None:
    table = make_table([[0.1, 0.2], [NAN, 0.3]], [[0.0, NAN], [NAN, 0.0]])
    judge, other = find_refusals(PROMPTS, table)
    assert (judge.count, judge.images, judge.fraction, judge.is_weighted) == (1, 4, 0.25, True)
    assert judge.describe().startswith("term judge refused 1 of 4 images: prompt b, image 0, 'no ")
    # As much of the note as a line can hold.
    assert len(judge.describe()) < 280
    assert other.describe() == "term other refused 2 of 4 images: prompt a, image 1"
    assert not other.is_weighted


def test_images_to_which_a_term_does_not_apply_are_not_refused() -> None:
    reward = FakeReward("ocr", lambda pixels: [0.5, None], needs_text=True)
    scorer = Scorer([Term("ocr", reward, 1.0)])
    prompts = [WITH_TEXT, WITHOUT_TEXT]
    table = scorer.score(prompts, grey([1, 2], [3, 4]))
    assert table.is_refused().flatten().tolist() == [False, True, False, False]
    (refusals,) = find_refusals(prompts, table)
    assert (refusals.count, refusals.images) == (1, 2)


def test_a_step_is_stopped_above_a_quarter_of_all_its_parts() -> None:
    pixels = torch.arange(4, dtype=torch.uint8).reshape(2, 2, 1, 1, 1).expand(-1, -1, 3, 2, 2)
    whole = make_table([[0.1, 0.2], [0.3, 0.4]])
    one = make_table([[0.1, 0.2], [NAN, 0.4]])
    three = make_table([[NAN, 0.2], [NAN, NAN]])

    def check(*tables: RewardTable) -> None:
        parts = [find_refusals(PROMPTS, table) for table in tables]
        check_refusals(join_refusals(parts), tables[-1], pixels)

    # Two of eight are a quarter. A single image may be left out of any step.
    check(one, one)
    alone = dataclasses.replace(one, raw=one.raw[1:], is_applicable=one.is_applicable[1:])
    check_refusals(find_refusals(PROMPTS[1:], alone), alone, pixels[1:])
    with pytest.raises(RewardError, match="judge refused 2 of 4 .*prompt b, image 0"):
        check(make_table([[0.1, 0.2], [NAN, NAN]]))
    with pytest.raises(RewardError, match="3 of 8 .*prompt a, image 0") as caught:
        check(whole, three)
    assert caught.value.images is not None
    assert caught.value.images[:, 0, 0, 0].tolist() == [0, 2, 3]
