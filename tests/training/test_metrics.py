from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from glm_grpo.grpo.update import UpdateReport
from glm_grpo.training.metrics import (
    StepWork,
    evaluation_metrics,
    sampled_utilisation,
    step_metrics,
    supervised_utilisation,
)
from glm_grpo.types import (
    Evaluation,
    Experience,
    ImageBatch,
    PromptBatch,
    Rollout,
)
from rewards.types import Prompt, RewardTable

PROMPTS = (Prompt("0", 'a sign "CAT"', texts=("CAT",)), Prompt("1", "a field"))
TIMES = {"rollout": 2.0, "decode": 1.0, "reward": 0.5, "update": 4.0, "step": 8.0}


def make_table() -> RewardTable:
    """Two prompts of two images; OCR applies to the first prompt alone."""
    return RewardTable(
        names=("lpips", "ocr"),
        raw=torch.tensor([[[0.2, 1.0], [0.4, 0.5]], [[0.6, 0.0], [0.8, 0.0]]]),
        is_applicable=torch.tensor([[True, True], [True, False]]),
        weights=torch.tensor([0.5, 0.5]),
        std_floors=torch.tensor([1e-4, 1e-4]),
    )


def make_images() -> ImageBatch:
    return ImageBatch(torch.zeros(2, 2, 3, 4, 4, dtype=torch.uint8), decode_seeds=(1, 2))


def make_experience() -> Experience:
    return Experience(
        prompts=PromptBatch(PROMPTS, 2, 32, 32, seed=0, decode_seeds=(1, 2)),
        rollout=Rollout(
            token_ids=torch.zeros(2, 2, 5, dtype=torch.int64),
            log_probs=torch.zeros(2, 2, 5),
            sampling_mask=None,
        ),
        images=make_images(),
        scores=make_table(),
        totals=torch.tensor([[1.0, 0.0], [0.5, 0.5]]),
        penalties=torch.zeros(2, 2),
        advantages=torch.tensor([[[1.0], [-1.0]], [[0.0], [0.0]]]),
    )


FIGURES = (
    "loss/total",
    "loss/policy",
    "loss/kl",
    "kl/reference",
    "kl/behaviour",
    "ratio/mean",
    "ratio/clip_fraction",
    "ratio/effective_sample_size",
    "policy/entropy",
    "policy/log_prob",
    "policy/outside_codebook",
    "policy/replay_gap",
    "optim/grad_norm",
    "optim/learning_rate",
)


def make_report(value: float) -> UpdateReport:
    """Figures told apart by their tens: value + 0, value + 10, ..."""
    metrics = {name: value + 10 * index for index, name in enumerate(FIGURES)}
    return UpdateReport(value, value, metrics, is_skipped=False)


def metrics_of(*reports: UpdateReport) -> dict[str, float]:
    return step_metrics(make_experience(), reports, TIMES, 4096, combine="weighted_sum")


def test_step_metrics_of_rewards_are_those_worked_out_by_hand() -> None:
    metrics = metrics_of(make_report(1.0))
    expected = {
        # Totals 1, 0, 0.5, 0.5: variance (0.25 + 0.25) / 4 = 1/8.
        "reward/mean": 0.5,
        "reward/std": math.sqrt(1 / 8),
        # 0.2, 0.4, 0.6, 0.8: variance (0.09 + 0.01 + 0.01 + 0.09) / 4 = 0.05.
        "reward/lpips/mean": 0.5,
        "reward/lpips/std": math.sqrt(0.05),
        # 1.0 and 0.5 of the first prompt; the zeros of the second do not count.
        "reward/ocr/mean": 0.75,
        "reward/ocr/std": 0.25,
        # Inside both groups lpips varies by 0.1 about its mean.
        "reward/lpips/std_within": 0.1,
        "reward/ocr/std_within": 0.25,
        "reward/lpips/zero_std_fraction": 0.0,
        "reward/ocr/zero_std_fraction": 0.0,
        # Only the first group counts, where one rises as the other falls.
        "correlation/lpips/ocr": -1.0,
        # First prompt: half of lpips moves by +0.1, half of ocr by -0.25, the sum by -0.15, so the
        # shares are -2/3 and 5/3. Second prompt: 1 and 0. On average 1/6 and 5/6.
        "reward/lpips/advantage_share": 1 / 6,
        "reward/ocr/advantage_share": 5 / 6,
        "advantage/zero_std_fraction": 0.5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_step_metrics_leave_out_and_count_what_a_term_refused() -> None:
    experience = make_experience()
    raw = experience.scores.raw.clone()
    raw[0, 1, 0] = math.nan
    experience = replace(
        experience,
        scores=replace(experience.scores, raw=raw),
        totals=torch.tensor([[1.0, math.nan], [0.5, 0.5]]),
    )
    metrics = step_metrics(experience, [make_report(1.0)], TIMES, 4096, combine="weighted_sum")
    expected = {
        "reward/mean": 2 / 3,
        # 1, 0.5, 0.5: variance (1/9 + 1/36 + 1/36) / 3 = 1/18.
        "reward/std": math.sqrt(1 / 18),
        # 0.2, 0.6 and 0.8.
        "reward/lpips/mean": 1.6 / 3,
        "reward/lpips/refused_fraction": 0.25,
        "reward/ocr/refused_fraction": 0.0,
        "reward/ocr/mean": 0.75,
        # In the second group lpips alone moves the total.
        "reward/lpips/advantage_share": 1.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_evaluation_metrics_leave_out_and_count_what_a_term_refused() -> None:
    table = make_table()
    table.raw[0, 0, 1] = math.nan
    totals = torch.tensor([[math.nan, 0.5], [0.25, 0.75]])
    metrics = evaluation_metrics(
        Evaluation(0, PROMPTS, make_images(), table, totals, entropy=torch.ones(2))
    )
    assert metrics == pytest.approx(
        {
            "eval/total": 0.5,
            "eval/lpips": 0.5,
            "eval/ocr": 0.5,
            "eval/ocr_exact": 0.0,
            "eval/ocr/refused_fraction": 0.5,
        }
    )


def test_step_metrics_of_time_and_throughput() -> None:
    metrics = metrics_of(make_report(1.0))
    assert {metrics[f"time/{phase}"] for phase in TIMES} == set(TIMES.values())
    # 4 images in a step of 8 s; 4 * 5 tokens in a rollout of 2 s.
    assert metrics["throughput/images_per_second"] == 0.5
    assert metrics["throughput/tokens_per_second"] == 10
    assert metrics["memory/peak_bytes"] == 4096


WORK = StepWork(
    rollout=10.0,
    decode=20.0,
    update=100.0,
    peak_flops=200.0,
    skips_zero_std=False,
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # 4 images: 40 operations in 2 s, 80 in 1 s, 400 in 4 s, of 200 a second.
        ({}, {"rollout": 0.1, "decode": 0.4, "update": 0.5}),
        # Half of the images have an advantage.
        ({"skips_zero_std": True}, {"rollout": 0.1, "decode": 0.4, "update": 0.25}),
        # An asynchronous run: collectors work elsewhere.
        ({"rollout": 0.0, "decode": 0.0}, {"update": 0.5}),
    ],
    ids=["all phases", "zero-std groups skipped", "collectors"],
)
def test_utilisation_is_the_share_of_the_peak(changes, expected) -> None:
    found = sampled_utilisation(replace(WORK, **changes), make_experience(), TIMES)
    assert found == pytest.approx({f"perf/mfu/{phase}": part for phase, part in expected.items()})


def test_utilisation_counts_discarded_groups_as_sampled_alone() -> None:
    experience = replace(make_experience(), trained=torch.tensor([1]))
    found = sampled_utilisation(WORK, experience, TIMES)
    assert found["perf/mfu/decode"] == pytest.approx(0.4)
    assert found["perf/mfu/update"] == pytest.approx(0.25)


def test_utilisation_of_supervised_steps_is_that_of_the_update() -> None:
    assert supervised_utilisation(WORK, 2, TIMES) == pytest.approx({"perf/mfu/update": 0.25})


def test_step_metrics_averages_the_updates_of_a_step() -> None:
    metrics = metrics_of(make_report(1.0), make_report(4.0))
    names = (
        "loss/total",
        "loss/policy",
        "loss/kl",
        "kl/reference",
        "kl/behaviour",
        "ratio/mean",
        "ratio/clip_fraction",
        "ratio/effective_sample_size",
        "policy/entropy",
        "policy/log_prob",
        "policy/outside_codebook",
        "policy/replay_gap",
    )
    assert [metrics[name] for name in names] == [2.5 + 10 * index for index in range(12)]
    assert metrics["optim/grad_norm"] == 122.5
    # Of the last: what the next step starts from.
    assert metrics["optim/learning_rate"] == 134


def test_step_metrics_leaves_skipped_updates_out_and_counts_them() -> None:
    report = make_report(math.nan)
    skipped = replace(
        report, metrics={**report.metrics, "optim/learning_rate": 7.0}, is_skipped=True
    )
    metrics = metrics_of(skipped, make_report(3.0), skipped)
    assert metrics["loss/total"] == 3
    assert metrics["optim/grad_norm"] == 123
    assert metrics["optim/learning_rate"] == 7
    assert metrics["optim/skipped_updates"] == 2


def test_step_metrics_has_no_loss_when_every_update_was_skipped() -> None:
    metrics = metrics_of(replace(make_report(1.0), is_skipped=True))
    assert math.isnan(metrics["loss/total"])
    assert metrics["optim/skipped_updates"] == 1


def test_step_metrics_has_no_mean_of_a_term_that_applied_nowhere() -> None:
    table = replace(make_table(), is_applicable=torch.tensor([[True, False], [True, False]]))
    experience = replace(make_experience(), scores=table)
    metrics = step_metrics(experience, [make_report(1.0)], TIMES, 0, combine="weighted_sum")
    assert math.isnan(metrics["reward/ocr/mean"])
    assert math.isnan(metrics["reward/ocr/std"])
    assert metrics["reward/ocr/advantage_share"] == 0


def test_step_metrics_shares_follow_the_way_terms_are_combined() -> None:
    # Standardised, both terms of the first prompt move by as much, against each other: its total
    # is flat. The second prompt has lpips alone.
    metrics = step_metrics(
        make_experience(), [make_report(1.0)], TIMES, 0, combine="normalize_then_sum"
    )
    assert metrics["reward/lpips/advantage_share"] == pytest.approx(1.0)
    assert metrics["reward/ocr/advantage_share"] == pytest.approx(0.0)
    # Standardised totals are 0 on average whatever is learned. Raw ones, half of each score or of
    # lpips alone all of it: 0.6, 0.45, 0.6 and 0.8.
    assert metrics["reward/mean"] == pytest.approx(0.6125)


def make_evaluation(table: RewardTable) -> Evaluation:
    totals = torch.tensor([[0.5, 0.25], [1.0, 0.25]])
    return Evaluation(3, PROMPTS, make_images(), table, totals, entropy=torch.ones(2))


def test_evaluation_metrics_are_those_worked_out_by_hand() -> None:
    expected = {
        "eval/total": 0.5,  # (0.5 + 0.25 + 1 + 0.25) / 4
        "eval/lpips": 0.5,
        "eval/ocr": 0.75,  # of the first prompt alone
        "eval/ocr_exact": 0.5,  # one of its two images
    }
    assert evaluation_metrics(make_evaluation(make_table())) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        # Two of the three images that were scored have nothing wrong.
        ({"composition": (("", "asked dog, found none"), ("", ""))}, 2 / 3),
        # Of the first prompt alone.
        ({"composition": (("", "asked dog, found none"), ())}, 0.5),
        # Not the term's own scorer, which says in its notes what is wrong.
        ({}, math.nan),
    ],
)
def test_evaluation_metrics_count_images_with_nothing_wrong(
    notes: dict[str, tuple[tuple[str, ...], ...]], expected: float
) -> None:
    table = make_table()
    table.raw[1, 1, 1] = math.nan
    table = replace(
        table,
        names=("lpips", "composition"),
        is_applicable=torch.ones(2, 2, dtype=torch.bool),
        notes=notes,
    )
    found = evaluation_metrics(make_evaluation(table))["eval/composition_exact"]
    assert found == pytest.approx(expected, nan_ok=True)


def test_evaluation_metrics_without_ocr_has_no_exact_share() -> None:
    table = make_table()
    only_lpips = RewardTable(
        names=("lpips",),
        raw=table.raw[:, :, :1],
        is_applicable=table.is_applicable[:, :1],
        weights=table.weights[:1],
        std_floors=table.std_floors[:1],
    )
    assert set(evaluation_metrics(make_evaluation(only_lpips))) == {"eval/total", "eval/lpips"}
