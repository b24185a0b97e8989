"""`glm-grpo eval`: compare a checkpoint with the untrained policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from glm_grpo.builders.models import begin_with, find_start, load_models
from glm_grpo.builders.prompts import build_evaluation_batches, build_held_out
from glm_grpo.config import Config, parse_override, set_key, validate_config
from glm_grpo.errors import ConfigError
from glm_grpo.gallery.report import Table, change_row
from glm_grpo.models.quiet import quiet_libraries
from glm_grpo.run.summaries import compare_evaluations
from glm_grpo.run.tables import SummaryRow
from glm_grpo.training.distributed.strategy import make_accelerator
from glm_grpo.training.evaluate import evaluate, weigh_evaluation
from glm_grpo.training.resume import find_checkpoint, pin_start
from rewards.problems import Problem, describe_problems

_CHANGEABLE = (
    *(f"rollout.{name}" for name in ("temperature", "top_p", "top_k", "min_p")),
    *(f"decode.{name}" for name in ("steps", "guidance_scale", "batch_size")),
    *("eval.samples_per_prompt", "eval.seed"),
)
"""Keys of sampling and decoding; the stored config decides which weights are evaluated."""


def evaluate_run(run: Path, overrides: Sequence[str] = ()) -> tuple[int, list[SummaryRow]]:
    """Compare a run's newest checkpoint, or the one the path names, with the run's start.

    Writes nothing into the run.

    Args:
        run: Run folder, or a checkpoint in it.
        overrides: `key=value` for sampling or decoding, applied to both sides:
            `rollout.temperature`, `.top_p`, `.top_k` and `.min_p`, `decode.steps`,
            `.guidance_scale` and `.batch_size`, `eval.samples_per_prompt` and `.seed`.

    Returns:
        The step of the checkpoint, and the comparison.

    Raises:
        CheckpointError: The path contains no run or no intact checkpoint.
        ConfigError: An override is refused.
    """
    quiet_libraries()
    found = find_checkpoint(run)
    config = _override(found.config, overrides)
    held_out = build_held_out(config)
    start = find_start(pin_start(config, found.checkpoint))
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


def _override(config: Config, overrides: Sequence[str]) -> Config:
    values = config.model_dump(mode="json")
    # Only training uses it; evaluations use all steps, which may now be fewer than this.
    values["decode"]["rollout_steps"] = None
    problems = []
    for key, value in map(parse_override, overrides):
        if key in _CHANGEABLE:
            set_key(values, key, value)
            continue
        rule = "is not a key that eval can change: data, model and reward are the run's"
        remedy = f"leave it out, or use one of {', '.join(_CHANGEABLE)}"
        problems.append(Problem(key, value, rule, remedy))
    if problems:
        raise ConfigError(describe_problems(problems))
    return validate_config(values, is_stored=True)


def summary_table(rows: Sequence[SummaryRow], *, title: str) -> Table:
    """Before and after on the held-out prompts, for the terminal."""
    columns = ("", "before", "after", "change", "95 % interval")
    return Table(title, columns, tuple(map(change_row, rows)))
