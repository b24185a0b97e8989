"""What a comparison prints, as tables and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

from glm_grpo.run.summaries import Interval
from glm_grpo.studio.compare.comparison import ComparedRun, Comparison
from glm_grpo.studio.compare.tables import comparison_json, comparison_tables

FIRST = ComparedRun(
    name="a",
    settings={"reward.terms.ocr.weight": "0.3"},
    steps=(0, 20),
    totals=(0.3125, 0.5625),
    gain=Interval(0.25, 0.125, 0.375),
    over_first=None,
    terms={"ocr": 0.375, "lpips": 0.75},
)
SECOND = ComparedRun(
    name="b",
    settings={"reward.terms.ocr.weight": "0.5"},
    steps=(0, 10, 20),
    totals=(0.3125, 0.25, 0.1875),
    gain=Interval(-0.125, -0.25, -0.0625),
    over_first=Interval(-0.375, -0.75, 0.0),
    terms={"ocr": 0.875, "lpips": 0.25},
)
COMPARISON = Comparison(
    weights={"ocr": 0.5, "lpips": -0.5},
    prompts=2,
    samples_per_prompt=4,
    runs=(FIRST, SECOND),
    base={"ocr": 0.25, "lpips": 0.5},
    left_out=("ssim", "hps"),
)


def test_tables_have_every_figure() -> None:
    settings, totals, terms = comparison_tables(COMPARISON)
    assert [row[2] for row in settings.rows] == [
        f"reward.terms.ocr.weight = {value}" for value in ("0.3", "0.5")
    ]
    assert totals.title == "weights: ocr 0.5, lpips -0.5"
    # Run, last step, before, after, gain with interval, and that over run 1.
    assert [tuple(map(str, row)) for row in totals.rows] == [
        ("1", "20", "0.312", "0.562", "+0.250", "[+0.125, +0.375]", "-", "-"),
        ("2", "20", "0.312", "0.188", "-0.124", "[-0.250, -0.062]", "-0.374", "[-0.750, +0.000]"),
    ]
    assert totals.note.startswith("2 held-out prompts, 4 images each")
    assert terms.rows == (
        ("base", "0.250", "0.500"),
        ("1", "0.375", "0.750"),
        ("2", "0.875", "0.250"),
    )
    assert terms.note.endswith("ssim, hps")


def test_json_has_every_figure() -> None:
    found = json.loads(comparison_json(COMPARISON))
    assert found["weights"] == {"ocr": 0.5, "lpips": -0.5}
    assert found["runs"][1]["over_first"] == {"mean_difference": -0.375, "low": -0.75, "high": 0.0}
    assert found["runs"][1]["totals"] == [0.3125, 0.25, 0.1875]
    assert found["runs"][1]["terms"] == {"ocr": 0.875, "lpips": 0.25}


def test_weights_of_terms_that_apply_to_no_prompt_are_named() -> None:
    _, totals, _ = comparison_tables(replace(COMPARISON, weights={"ocr": 0.5, "ssim": 0.2}))
    assert totals.title == "weights: ocr 0.5, ssim 0.2 (applies to no prompt)"
