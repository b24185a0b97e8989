"""docs/reference/metrics.md names every metric that a run writes, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from glm_grpo.training.metrics import StepWork

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
WORK = StepWork(1.0, 1.0, 1.0, peak_flops=1.0, skips_zero_std=False)
"""As of a card whose peak is known."""

TERMS = ("lpips", "ssim", "ocr", "aesthetic", "psnr")


def documented() -> list[str]:
    """Names in the first column of the tables."""
    return re.findall(r"^\| `([a-z_]+/[a-z_<>/]+)` \|", DOCUMENT.read_text(), flags=re.MULTILINE)


def as_documented(metric: str) -> str:
    """The name with its terms taken out, if the document does not have it as it stands."""
    if metric in documented():
        return metric
    kind, *parts = metric.split("/")
    replaced = [("<name>" if part in TERMS else part) for part in parts]
    if replaced == ["<name>", "<name>"]:
        replaced[1] = "<other>"
    return "/".join([kind, *replaced])


def test_the_reference_names_every_metric_of_a_run_and_no_other(make_trainer) -> None:
    trainer, _, run_dir = make_trainer(
        "train.steps=1",
        "rollout.prompts_per_step=1",
        "rollout.group_size=2",
        "train.micro_batch_size=2",
        "+reward.terms.psnr.weight=0",
        "reward.watch=[psnr]",
        "sft.weight=0.1",
        "advantage.credit=place",
        "rollout.dynamic_sampling_rounds=1",
        held_out=2,
        work=WORK,
    )
    trainer.run()
    supervised, _, supervised_dir = make_trainer(
        "train.steps=1",
        "train.method=sft",
        "rollout.prompts_per_step=1",
        folder="sft",
        held_out=2,
        work=WORK,
    )
    supervised.run()

    row = read_metrics(RunFolder(supervised_dir))[-1]
    assert row["loss/total"] == row["sft/cross_entropy"] > 0
    assert not RunFolder(supervised_dir).rollouts_dir.exists()
    written = {
        as_documented(metric)
        for folder in (run_dir, supervised_dir)
        for row in read_metrics(RunFolder(folder))
        for metric in row
        if metric != "step"
    }
    of_collectors = {name for name in documented() if name.startswith("async/")}
    of_others = of_collectors | {
        *("optim/loss_scale", "canary/source_copies", "loss/entropy"),
        *("eval/<name>/refused_fraction", "eval/composition_exact"),
    }
    assert written == set(documented()) - of_others
    assert len(documented()) == len(set(documented()))
