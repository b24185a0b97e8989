from __future__ import annotations

import math

import pytest
import torch

from glm_grpo.run.summaries import paired_bootstrap


def test_paired_bootstrap_of_a_constant_gain_has_no_width() -> None:
    # Prompts differ widely, every one gains a half: pairing leaves no doubt.
    before = torch.tensor([0.0, 10.0, -3.0, 7.0])
    interval = paired_bootstrap(before, before + 0.5, seed=0)
    assert (interval.mean_difference, interval.low, interval.high) == (0.5, 0.5, 0.5)


def test_paired_bootstrap_of_two_prompts_reaches_from_one_difference_to_the_other() -> None:
    # Resampled means of differences 0 and 1 are 0, 1/2, 1 with chances 1/4, 1/2, 1/4: the ends of
    # a 95 % interval are 0 and 1, those of a 40 % interval (quantiles 0.3 and 0.7) are both 1/2.
    before, after = torch.zeros(2), torch.tensor([0.0, 1.0])
    wide = paired_bootstrap(before, after, seed=0)
    assert (wide.mean_difference, wide.low, wide.high) == (0.5, 0.0, 1.0)
    narrow = paired_bootstrap(before, after, confidence=0.4, seed=0)
    assert (narrow.low, narrow.high) == (0.5, 0.5)


def test_paired_bootstrap_agrees_with_the_normal_approximation_on_many_prompts() -> None:
    differences = torch.randn(2000, generator=torch.Generator().manual_seed(3)) + 0.1
    interval = paired_bootstrap(torch.zeros(2000), differences, seed=0)
    mean = differences.double().mean().item()
    half = 1.959964 * differences.double().std(correction=0).item() / math.sqrt(2000)
    assert interval.mean_difference == pytest.approx(mean)
    # 10,000 resamples place an end to within 1.4 % of the half width (one standard deviation).
    assert interval.low == pytest.approx(mean - half, abs=0.06 * half)
    assert interval.high == pytest.approx(mean + half, abs=0.06 * half)


def test_paired_bootstrap_depends_on_its_seed_alone() -> None:
    before, after = torch.zeros(9), torch.arange(9.0)
    assert paired_bootstrap(before, after, seed=1) == paired_bootstrap(before, after, seed=1)
    few = [paired_bootstrap(before, after, resamples=50, seed=seed) for seed in range(5)]
    assert len(set(few)) > 1
