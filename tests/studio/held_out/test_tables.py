"""What the tables of an evaluation say."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.provenance import Provenance, write_provenance
from glm_grpo.studio.held_out.conditions import describe_conditions
from glm_grpo.studio.held_out.tables import (
    HeldOutReport,
    report_held_out,
    report_json,
    report_markdown,
    score_tables,
)
from tests.factories import tiny_config
from tests.studio.held_out.evaluations import AFTER, BEFORE, ROWS, store

ORIGIN = Provenance(
    began="2026-01-01T00:00:00+00:00",
    held_out={"p0": "1", "p1": "2", "p2": "3"},
    training={},
    files={"reward.terms.composition.detector": "f" * 64},
    code={"reward.terms.mine.function": "c" * 64, "reward.terms.mine2.function": "d" * 64},
    versions={"transformers": "5.9", "rapidocr": "3.8", "torch": "2.11", "open-clip-torch": "3"},
)


def report_of(folder: RunFolder, *overrides: str) -> HeldOutReport:
    report = report_held_out(folder, tiny_config(*overrides))
    assert report is not None
    return report


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A base model's evaluation by tag, and one after nine steps."""
    folder = RunFolder(tmp_path)
    store(folder, 0, BEFORE, ROWS)
    store(folder, 9, AFTER, ROWS)
    write_provenance(folder, ORIGIN)
    return folder


def test_a_group_has_a_row_for_each_model_and_for_what_choosing_gives(folder: RunFolder) -> None:
    tables = score_tables(report_of(folder))
    assert [table.title for table in tables] == ["ocr by tag", "ocr_exact by tag", "total by tag"]
    ocr, exact, _ = tables
    assert ocr.columns[:4] == ("group", "prompts", "model", "mean@1")
    assert ocr.columns[5] == "best@2"
    assert [row[:4] + row[5:6] for row in ocr.rows[:4]] == [
        ("b", "2", "base", "0.375", "0.750"),
        ("", "", "step 9", "0.750", "0.750"),
        ("", "", "change", "+0.375", "+0.000"),
        ("", "", "over best@2", "+0.000", ""),
    ]
    assert "at least one right image" in exact.note
    assert "right image" not in ocr.note
    # Three prompts.
    assert "too few" in ocr.note


def test_without_groups_there_is_one_table_of_all_scores(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    store(folder, 0, BEFORE, [{}] * 3)
    (table,) = score_tables(report_of(folder))
    assert table.title == "all held-out prompts, base"
    assert [row[0] for row in table.rows] == ["ocr", "ocr_exact", "total"]
    assert len(table.columns) == len(table.rows[0]) == 6


def test_of_one_image_per_prompt_there_is_no_best(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (0, 9):
        store(folder, step, [[0.5], [1.0], [0.5]], [{}] * 3)
    report = report_of(folder)
    assert not report.grouped.is_telling
    (table,) = score_tables(report)
    assert "best" not in " ".join([*table.columns, table.note, *map(str, table.rows)])


def test_the_start_of_a_run_that_went_on_is_not_called_base(folder: RunFolder) -> None:
    assert report_of(folder).models == ("base", "step 9")
    assert report_of(folder, "model.start_from=other").models == ("start", "step 9")


def test_totals_in_standard_deviations_are_said_to_be_so(folder: RunFolder) -> None:
    notes = [
        score_tables(report_of(folder, *words))[-1].note
        for words in ((), ("reward.combine=normalize_then_sum",))
    ]
    assert ["in units of its std" in note for note in notes] == [False, True]


@pytest.mark.parametrize(
    ("width", "left_out"),
    [(120, []), (80, ["interval of best@2"]), (75, ["prompts", "interval of best@2"])],
)
def test_a_terminal_leaves_out_columns_for_which_it_has_no_room(
    tmp_path: Path, width: int, left_out: list[str]
) -> None:
    folder = RunFolder(tmp_path)
    # A mean of two groups of ten, with intervals and signs in every column.
    rows = [{"tag": "two_object"}, {"tag": "color_attr"}] * 10
    store(folder, 0, [[0.0, 1.0], [0.5, 1.0]] * 10, rows)
    store(folder, 9, [[1.0, 1.0], [0.5, 0.5]] * 10, rows)
    table = score_tables(report_of(folder))[0]
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    lines = console.file.getvalue().splitlines()
    (head,) = [line for line in lines if line.startswith("┃")]
    for name in ("prompts", "interval of best@2"):
        assert (name in head) == (name not in left_out)
    said = " ".join(" ".join(lines).split())
    assert ("not shown" in said) == bool(left_out)
    assert f"terminal: {', '.join(left_out)}" in said or not left_out
    # No cell is folded: one line for each of the four rows of four groups.
    assert len([line for line in lines if line.startswith("│")]) == len(table.rows) == 16


def test_markdown_and_json_have_the_same_figures(folder: RunFolder) -> None:
    report = report_of(folder)
    markdown = report_markdown(report)
    assert "| b | 2 | base | 0.375 | - | 0.750 | - |\n" in markdown
    assert "| seed | 1234 |\n" in markdown
    # Below each table, as a sentence.
    assert re.search(r"^Mean@1: .*\.$", markdown, re.MULTILINE)
    found = json.loads(report_json(report))
    first = found["grouped"]["scores"][0]
    assert (first["group"], first["before"]["best"]["mean"]) == ("b", 0.75)
    # JSON has no NaN.
    assert first["before"]["best"]["low"] is None
    assert found["conditions"]["seed"] == "1234"


def test_a_name_of_a_group_ends_no_cell_of_markdown(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    store(folder, 0, BEFORE, [{"tag": "a | b\nc"}, {"tag": "d"}, {"tag": "d"}])
    assert "| a \\| b c | 1 |" in report_markdown(report_of(folder))


def test_conditions_name_sampler_sizes_and_what_judged_with_versions() -> None:
    terms = (
        "+reward.terms.mine={kind: custom, weight: 1, function: 'mine.py:score'}",
        "+reward.terms.composition={weight: 1, detector: /secret/detector, threshold: 0.15,"
        " clip_weights: /secret/clip.pt}",
    )
    sampler = ("rollout.top_k=50", "rollout.temperature=0.9", "decode.steps=7")
    config = tiny_config(
        *terms, *sampler, "model.path=/secret/model", "data.eval_path=/secret/a.txt"
    )
    found = describe_conditions(config, ORIGIN)
    assert found["prompts"] == "a.txt, 3 prompts"
    assert found["sampling"] == "temperature 0.9, top_k 50"
    assert found["decoding"].startswith("7 steps, guidance ")
    assert found["images"] == "2 images per prompt, 128 x 128 pixels (height x width)"
    assert found["term ocr"] == "RapidOCR (rapidocr 3.8)"
    # Not the code of another term whose name begins so.
    assert found["term mine"] == f"mine.py:score, code of function {'c' * 12}"
    assert found["term composition"] == (
        "detector (transformers 5.9), GenEval's rule above 0.15, 0.9 for counting, "
        f"colours by CLIP ViT-L-14-quickgelu clip.pt (open-clip-torch 3), files of detector "
        f"{'f' * 12}"
    )
    assert found["versions"] == "torch 2.11, transformers 5.9"
    assert "/secret" not in str(found)


def test_conditions_without_an_origin_leave_versions_out() -> None:
    found = describe_conditions(tiny_config(), None)
    assert found["term ocr"] == "RapidOCR"
    assert "versions" not in found
