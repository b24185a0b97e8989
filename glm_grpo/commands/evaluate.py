"""`glm-grpo eval`: evaluate a checkpoint against the untrained policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from glm_grpo.build import (
    begin_with,
    build_evaluation_batches,
    build_held_out,
    find_start,
    load_models,
)
from glm_grpo.gallery.data import SummaryRow
from glm_grpo.models.quiet import quiet_libraries
from glm_grpo.training.checkpoint.resume import find_checkpoint
from glm_grpo.training.distributed.strategy import make_accelerator
from glm_grpo.training.evaluate import evaluate, weigh_evaluation
from glm_grpo.training.recording.summaries import compare_evaluations


def evaluate_run(run: Path) -> tuple[int, list[SummaryRow]]:
    """Evaluates a run's newest checkpoint, or the one the path names, against its start.

    Nothing is written into the run.

    Returns:
        The step of the checkpoint, and before against after.

    Raises:
        CheckpointError: The path holds no run or no whole checkpoint.
    """
    quiet_libraries()
    found = find_checkpoint(run)
    config = found.config
    held_out = build_held_out(config)
    start = find_start(config)
    models = load_models(config, make_accelerator().device, needs_reference=False)
    begin_with(models, start)
    batches = build_evaluation_batches(config, held_out)
    mode = config.reward.combine
    part = evaluate(models, batches, step=0)
    before = weigh_evaluation([part], mode=mode, untrained=None)
    models.policy.load_state_tensors(found.evaluated)
    part = evaluate(models, batches, step=found.checkpoint.step)
    after = weigh_evaluation([part], mode=mode, untrained=before.rewards)
    return found.checkpoint.step, compare_evaluations(before, after)


def summary_table(rows: Sequence[SummaryRow], *, title: str) -> Table:
    """Before and after on the held-out prompts, for the terminal."""
    table = Table(title=title)
    for name in ("", "before", "after", "change", "95 % interval"):
        table.add_column(name, justify="left" if name == "" else "right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.before:z.3f}",
            f"{row.after:z.3f}",
            f"{row.difference:+z.3f}",
            f"[{row.low:+z.3f}, {row.high:+z.3f}]",
            style="bold" if row.name == "total" else None,
        )
    return table
