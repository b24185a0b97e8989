"""Mean@1 and best@k by group, worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from glm_grpo.run.folder import RunFolder
from glm_grpo.studio.held_out.by_group import GroupScore, group_scores
from tests.studio.held_out.evaluations import AFTER, BEFORE, ROWS, store

NAN = math.nan


def find(scores: Sequence[GroupScore], group: str, score: str) -> GroupScore:
    (found,) = [each for each in scores if (each.group, each.score) == (group, score)]
    return found


def test_each_group_has_the_mean_and_the_best_of_its_prompts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    store(folder, 0, BEFORE, ROWS)
    store(folder, 9, AFTER, ROWS)

    found = group_scores(folder, None)

    assert found is not None
    assert (found.column, found.samples, found.steps) == ("tag", 2, (0, 9))
    names = dict.fromkeys(each.score for each in found.scores)
    assert [*names] == ["ocr", "ocr_exact", "total"]
    groups = [each.group for each in found.scores if each.score == "ocr"]
    # In the order of the prompts.
    assert groups == ["b", "a", "mean of groups", "all"]

    b = find(found.scores, "b", "ocr")
    assert b.after is not None
    assert b.change is not None
    assert b.over_best is not None
    assert b.prompts == 2
    # (0.5 + 0.25) / 2 and (1 + 0.5) / 2; then (1 + 0.5) / 2 for both.
    assert (b.before.mean.mean, b.before.best.mean) == (0.375, 0.75)
    assert (b.after.mean.mean, b.after.best.mean) == (0.75, 0.75)
    assert (b.change.mean.mean, b.change.best.mean) == (0.375, 0.0)
    assert b.over_best.mean == 0.0
    exact = find(found.scores, "b", "ocr_exact")
    # One of four images is right, for one of two prompts.
    assert (exact.before.mean.mean, exact.before.best.mean) == (0.25, 0.5)


def test_the_mean_of_groups_weighs_groups_and_not_prompts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    store(folder, 0, BEFORE, ROWS)
    found = group_scores(folder, None)
    assert found is not None
    mean, every = (find(found.scores, group, "ocr") for group in ("mean of groups", "all"))
    # b has 0.375, a has 0.5; all prompts 0.5, 0.5 and 0.25.
    assert mean.before.mean.mean == pytest.approx((0.375 + 0.5) / 2)
    assert every.before.mean.mean == pytest.approx(1.25 / 3)
    assert mean.prompts == every.prompts == 3
    assert mean.after is mean.change is mean.over_best is None


@pytest.mark.parametrize(
    ("group_by", "rows", "groups"),
    [
        ("kind", [{"kind": 1}, {"kind": [2]}, {"tag": "b"}], ["1", "[2]", "no kind"]),
        (None, [{}] * 3, []),
        (None, [{"tag": "b"}] * 3, []),
        (None, [{"kind": 1}, {"kind": 2}, {}], []),
    ],
)
def test_prompts_are_grouped_by_a_column(
    tmp_path: Path, group_by: str | None, rows: list[dict[str, Any]], groups: list[str]
) -> None:
    folder = RunFolder(tmp_path)
    store(folder, 0, BEFORE, rows)
    found = group_scores(folder, group_by)
    assert found is not None
    named = [each.group for each in found.scores if each.score == "ocr"]
    assert named == ([*groups, "mean of groups", "all"] if groups else ["all"])
    assert found.column == (group_by if groups else None)


def test_prompts_without_a_score_on_both_sides_are_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    rows = [{"tag": "a"}, {"tag": "a"}, {"tag": "b"}, {"tag": "b"}]
    applies = [True, True, True, False]
    store(folder, 0, [[NAN, 0.5], [0.0, 1.0], [0.0, 0.5], [0.0, 0.0]], rows, applies=applies)
    store(folder, 9, [[1.0, 1.0], [NAN, NAN], [1.0, 1.0], [0.0, 0.0]], rows, applies=applies)
    found = group_scores(folder, None)
    assert found is not None
    a, b = (find(found.scores, group, "ocr") for group in "ab")
    assert (a.prompts, a.before.mean.mean, a.before.best.mean) == (1, 0.5, 0.5)
    assert (b.prompts, b.before.mean.mean, b.before.best.mean) == (1, 0.25, 0.5)


def test_the_total_of_a_single_term_is_not_repeated(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    store(folder, 0, BEFORE, ROWS, weight=1.0)
    found = group_scores(folder, None)
    assert found is not None
    assert {each.score for each in found.scores} == {"ocr", "ocr_exact"}


def test_intervals_need_ten_prompts_in_each_group(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    rows = [{"tag": "few"}] * 9 + [{"tag": "many"}] * 10
    store(folder, 0, [[n % 3 / 2, 0.5] for n in range(19)], rows)
    found = group_scores(folder, None)
    assert found is not None
    has_interval = {
        each.group: not math.isnan(each.before.mean.low)
        for each in found.scores
        if each.score == "ocr"
    }
    assert has_interval == {"few": False, "many": True, "mean of groups": False, "all": True}


def test_what_all_prompts_of_a_group_share_has_no_width(tmp_path: Path) -> None:
    # Each group is sampled by itself: only differences within groups count.
    folder = RunFolder(tmp_path)
    store(folder, 0, [[0.0, 0.0]] * 10 + [[1.0, 1.0]] * 10, [{"tag": n // 10} for n in range(20)])
    found = group_scores(folder, None)
    assert found is not None
    mean = find(found.scores, "mean of groups", "ocr").before.mean
    every = find(found.scores, "all", "ocr").before.mean
    assert (mean.low, mean.mean, mean.high) == (0.5, 0.5, 0.5)
    assert every.low < every.mean == 0.5 < every.high


def test_the_last_evaluation_up_to_a_step_is_compared(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert group_scores(folder, None) is None
    for step in (0, 5, 9):
        store(folder, step, AFTER if step == 5 else BEFORE, ROWS)
    found = group_scores(folder, None, last_step=8)
    assert found is not None
    assert found.steps == (0, 5)
