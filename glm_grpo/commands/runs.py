"""What is done with the weights of a run, and with a term on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from rich.table import Table

from glm_grpo.build import (
    build_evaluation_batches,
    build_policy,
    build_prompt_set,
    load_models,
    model_path,
)
from glm_grpo.config import Config
from glm_grpo.errors import ConfigError, StorageError
from glm_grpo.gallery.data import SummaryRow
from glm_grpo.models.base import DTYPES
from glm_grpo.models.glm_image.export import README, StockSettings, export_adapter, export_pipeline
from glm_grpo.models.glm_image.loading import check_model, load_pipeline
from glm_grpo.models.glm_image.token_grid import token_layout
from glm_grpo.run.folder import storage_errors
from glm_grpo.run.tables import read_metrics
from glm_grpo.training.checkpoint.resume import FoundCheckpoint, find_checkpoint, read_config_at
from glm_grpo.training.distributed.strategy import make_accelerator
from glm_grpo.training.evaluate import evaluate, weigh_evaluation
from glm_grpo.training.metrics import outside_codebook_note
from glm_grpo.training.recording.summaries import compare_evaluations
from rewards.build import build_reward
from rewards.remote.serve import serve


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
    build = partial(build_reward, terms[name], make_accelerator().device)
    serve(build, name=name, needs=terms[name].needs(), host=host, port=port, announce=announce)


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
    reserved = check_model(model_path(config.model.path))
    held_out = build_prompt_set(config.data.eval_path, config, reserved)
    models = load_models(config, make_accelerator().device, needs_reference=False)
    batches = build_evaluation_batches(config, held_out)
    mode = config.reward.combine
    part = evaluate(models, batches, step=0)
    before = weigh_evaluation([part], mode=mode, untrained=None)
    models.policy.load_state_tensors(found.checkpoint.tensors["policy"])
    part = evaluate(models, batches, step=found.checkpoint.step)
    after = weigh_evaluation([part], mode=mode, untrained=before.rewards)
    return found.checkpoint.step, compare_evaluations(before, after)


def export_run(run: Path, directory: Path, *, kind: Literal["adapter", "pipeline"] | None) -> str:
    """Writes the weights of a run's newest checkpoint, or of the one the path names.

    Returns:
        What was written, how to load it, and what to mind.

    Raises:
        ConfigError: An adapter is asked for where none was trained.
        CheckpointError: The path holds no run or no whole checkpoint.
        StorageError: The folder is not empty, or cannot be written.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise StorageError(
            f"{directory} is not an empty folder; nothing is overwritten; name another"
        )
    config = read_config_at(run)
    kind = kind or ("pipeline" if config.model.adapter is None else "adapter")
    if kind == "adapter" and config.model.adapter is None:
        raise ConfigError(
            "the run trained the language model in full (model.adapter is absent), so there is no "
            "adapter to export; use --format pipeline"
        )
    found = find_checkpoint(run)
    checkpoint = found.checkpoint
    base = model_path(config.model.path)
    pipeline = load_pipeline(base, dtype=DTYPES[config.model.dtype])
    policy = build_policy(config, pipeline, needs_reference=False)
    policy.load_state_tensors(checkpoint.tensors["policy"])
    settings = StockSettings(
        base=base,
        dtype=config.model.dtype,
        height=config.rollout.height,
        width=config.rollout.width,
        temperature=config.rollout.temperature,
        top_k=config.rollout.top_k,
        top_p=config.rollout.top_p,
        decode_steps=config.decode.steps,
        guidance_scale=config.decode.guidance_scale,
        outside_codebook=_outside_codebook_note(found),
    )
    with storage_errors("write", directory):
        if policy.adapted_model is not None and kind == "adapter":
            export_adapter(policy.adapted_model, settings, directory)
        else:
            export_pipeline(policy, pipeline, settings, directory)
    readme = directory / README
    return f"{directory}: step {checkpoint.step}; {readme} shows how to draw a picture with it"


def _outside_codebook_note(found: FoundCheckpoint) -> str:
    """Nothing where the run's metrics do not have it."""
    sizes = found.config.rollout
    tokens = token_layout(sizes.height, sizes.width).num_tokens
    try:
        rows = read_metrics(found.folder)
    except StorageError:
        # The weights are whole, whatever became of the metrics.
        return ""
    return outside_codebook_note(rows, step=found.checkpoint.step, tokens=tokens)


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
