"""What is done with the weights of a run, and with a term on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from accelerate import Accelerator
from rich.table import Table

from glm_grpo.build import (
    build_evaluation_batches,
    build_policy,
    build_prompt_set,
    collect_settings,
    load_stage,
    model_path,
)
from glm_grpo.config import Config
from glm_grpo.errors import ConfigError, StorageError
from glm_grpo.glm_image.export import export_adapter, export_pipeline
from glm_grpo.glm_image.loading import DTYPES, load_pipeline
from glm_grpo.report.summary import SummaryRow
from glm_grpo.storage import storage_errors
from glm_grpo.training.evaluate import evaluate
from glm_grpo.training.resume import find_checkpoint
from glm_grpo.training.summaries import compare_evaluations
from rewards.build import build_reward
from rewards.serve import read_token, serve


def serve_term(
    config: Config, name: str, *, host: str, port: int, announce: Callable[[str], None]
) -> None:
    """Serves one term of the config over HTTP until Ctrl-C or SIGTERM.

    Raises:
        ConfigError: The config has no such term.
        RewardError: It cannot be built, or the address cannot be listened at.
    """
    terms = config.reward.terms
    if name not in terms:
        raise ConfigError(
            f"{name!r} is not a term of this config ({', '.join(terms)}); name one of them, or add "
            f"it: +reward.terms.{name}.weight=1"
        )
    # A token that is missing is told before weights are loaded.
    read_token(host)
    reward = build_reward(terms[name], Accelerator().device)
    serve(reward, name=name, needs=terms[name].needs(), host=host, port=port, announce=announce)


def evaluate_run(run: Path) -> tuple[int, list[SummaryRow]]:
    """Evaluates a run's newest checkpoint, or the one the path names, against its start.

    Nothing is written into the run.

    Returns:
        The step of the checkpoint, and before against after.

    Raises:
        CheckpointError: The path holds no run or no whole checkpoint.
    """
    found = find_checkpoint(run)
    config = found.config
    stage = load_stage(config, Accelerator().device, needs_reference=False)
    batches = build_evaluation_batches(config, build_prompt_set(config.data.eval_path, config))
    settings = collect_settings(config)
    before = evaluate(stage, batches, settings, step=0)
    stage.policy.load_state_tensors(found.checkpoint.tensors["policy"])
    after = evaluate(stage, batches, settings, step=found.checkpoint.step)
    return found.checkpoint.step, compare_evaluations(before, after)


def export_run(run: Path, directory: Path, *, kind: Literal["adapter", "pipeline"] | None) -> str:
    """Writes the weights of a run's newest checkpoint, or of the one the path names.

    Returns:
        A line that says what was written and how to load it.

    Raises:
        CheckpointError: The path holds no run or no whole checkpoint.
        StorageError: The folder is not empty, or cannot be written.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise StorageError(
            f"{directory} is not an empty folder; nothing is overwritten; name another"
        )
    found = find_checkpoint(run)
    config = found.config
    pipeline = load_pipeline(model_path(config.model.path), dtype=DTYPES[config.model.dtype])
    policy = build_policy(config, pipeline, needs_reference=False)
    policy.load_state_tensors(found.checkpoint.tensors["policy"])
    kind = kind or ("pipeline" if config.model.adapter is None else "adapter")
    with storage_errors("write", directory):
        if kind == "adapter":
            export_adapter(policy, directory)
            return f"{directory}: step {found.checkpoint.step}; PeftModel.from_pretrained loads it"
        export_pipeline(policy, pipeline, directory)
    return f"{directory}: step {found.checkpoint.step}; GlmImagePipeline.from_pretrained loads it"


def summary_table(rows: Sequence[SummaryRow], *, title: str) -> Table:
    """Before and after on the held-out prompts, for the terminal."""
    table = Table(title=title)
    for name in ("", "before", "after", "change", "95 % interval"):
        table.add_column(name, justify="left" if name == "" else "right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.before:.3f}",
            f"{row.after:.3f}",
            f"{row.difference:+.3f}",
            f"[{row.low:+.3f}, {row.high:+.3f}]",
            style="bold" if row.name == "total" else None,
        )
    return table
