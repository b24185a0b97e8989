from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.summaries import gain_over_prompts, paired_bootstrap, summarise
from glm_grpo.run.writing import write_evaluation
from glm_grpo.types import Evaluation, ImageBatch
from rewards.types import Prompt, RewardTable

PROMPTS = (Prompt("with", "a sign", texts=("A",)), Prompt("without", "a field"))


def evaluation(step, ssim, ocr, totals):
    """Two samples of each prompt; the text term applies to the first alone."""
    raw = torch.stack([torch.tensor(ssim), torch.tensor([ocr, [0.0, 0.0]])], dim=-1)
    return Evaluation(
        step,
        PROMPTS,
        ImageBatch(torch.zeros(2, 2, 3, 8, 8, dtype=torch.uint8), (0, 0)),
        RewardTable(
            ("ssim", "ocr"),
            raw,
            torch.tensor([[True, True], [True, False]]),
            torch.tensor([0.5, 0.5]),
            torch.full((2,), 1e-4),
        ),
        torch.tensor(totals),
        entropy=torch.ones(2),
    )


BEFORE = evaluation(0, [[0.25, 0.75], [0.5, 0.5]], [0.5, 1.0], [[0.25, 0.75], [0.25, 0.25]])
AFTER = evaluation(8, [[0.75, 0.75], [0.5, 0.75]], [1.0, 1.0], [[1.0, 1.0], [0.5, 0.25]])


def figures(rows):
    return {row.name: (row.before, row.after, row.difference) for row in rows}


EXPECTED = {
    # Means over samples, then over prompts: (0.5 + 0.5) / 2, (0.75 + 0.625) / 2.
    "ssim": (0.5, 0.6875, 0.1875),
    # Of the prompt that has a text alone.
    "ocr": (0.75, 1.0, 0.25),
    "ocr_exact": (0.5, 1.0, 0.5),
    "total": (0.375, 0.6875, 0.3125),
}


def test_paired_bootstrap_of_a_constant_gain_has_no_width():
    # Prompts differ widely, every one gains a half: pairing leaves no doubt.
    before = torch.tensor([0.0, 10.0, -3.0, 7.0])
    interval = paired_bootstrap(before, before + 0.5, seed=0)
    assert (interval.mean_difference, interval.low, interval.high) == (0.5, 0.5, 0.5)


def test_paired_bootstrap_of_two_prompts_reaches_from_one_difference_to_the_other():
    # Resampled means of differences 0 and 1 are 0, 1/2, 1 with chances 1/4, 1/2, 1/4: the ends of
    # a 95 % interval are 0 and 1, those of a 40 % interval (quantiles 0.3 and 0.7) are both 1/2.
    before, after = torch.zeros(2), torch.tensor([0.0, 1.0])
    wide = paired_bootstrap(before, after, seed=0)
    assert (wide.mean_difference, wide.low, wide.high) == (0.5, 0.0, 1.0)
    narrow = paired_bootstrap(before, after, confidence=0.4, seed=0)
    assert (narrow.low, narrow.high) == (0.5, 0.5)


def test_paired_bootstrap_depends_on_its_seed_alone():
    before, after = torch.zeros(9), torch.arange(9.0)
    assert paired_bootstrap(before, after, seed=1) == paired_bootstrap(before, after, seed=1)
    few = [paired_bootstrap(before, after, resamples=50, seed=seed) for seed in range(5)]
    assert len(set(few)) > 1


def test_gain_has_an_interval_from_ten_prompts_on():
    zeros, gains = torch.zeros(10), torch.arange(10.0)
    nine = gain_over_prompts(zeros[:9], gains[:9])
    assert nine.mean_difference == 4.0
    assert math.isnan(nine.low)
    ten = gain_over_prompts(zeros, gains)
    assert 0 < ten.low < ten.mean_difference == 4.5 < ten.high


def test_summarise_reads_the_first_and_the_last_stored_evaluation(tmp_path):
    folder = RunFolder(tmp_path)
    write_evaluation(folder, BEFORE, combine="weighted_sum")
    assert summarise(folder) == []
    write_evaluation(
        folder,
        evaluation(4, [[0.0, 0.0]] * 2, [0.0, 0.0], [[0.0, 0.0]] * 2),
        combine="weighted_sum",
    )
    write_evaluation(folder, AFTER, combine="weighted_sum")

    rows = summarise(folder)

    # Prompts are paired, and those that a term does not apply to are left out.
    assert figures(rows) == {name: pytest.approx(values) for name, values in EXPECTED.items()}
    # Two prompts are too few for an interval.
    assert all(math.isnan(row.low) and math.isnan(row.high) for row in rows)


def test_summarise_counts_images_with_nothing_wrong(tmp_path):
    folder = RunFolder(tmp_path)
    for each, notes in ((BEFORE, ("", "asked dog, found none")), (AFTER, ("", ""))):
        table = replace(
            each.scores, names=("ssim", "composition"), notes={"composition": (notes, ())}
        )
        write_evaluation(folder, replace(each, scores=table), combine="weighted_sum")
    found = {row.name: (row.before, row.after) for row in summarise(folder)}
    assert [*found] == ["ssim", "composition", "composition_exact", "total"]
    assert found["composition_exact"] == (0.5, 1.0)


def test_summary_pairs_prompts_of_which_an_image_has_a_score(tmp_path):
    nan = math.nan
    folder = RunFolder(tmp_path)
    write_evaluation(folder, BEFORE, combine="weighted_sum")
    ssim, totals = [[nan, 0.75], [nan, nan]], [[nan, 1.0], [nan, nan]]
    write_evaluation(folder, evaluation(8, ssim, [1.0, 1.0], totals), combine="weighted_sum")
    expected = {"ssim": (0.5, 0.75, 0.25), "total": (0.5, 1.0, 0.5)}
    rows = {name: each for name, each in figures(summarise(folder)).items() if name in expected}
    assert rows == {name: pytest.approx(values) for name, values in expected.items()}
    gain = gain_over_prompts(torch.tensor([0.0, nan, 1.0]), torch.tensor([0.5, 1.0, nan]))
    assert gain.mean_difference == 0.5
