"""Describe a run's training and its results for the model card of an export."""

from __future__ import annotations

import re
from importlib.metadata import version

from glm_grpo.config import Config
from glm_grpo.errors import StorageError
from glm_grpo.models.export import describe_decoding, describe_sampling
from glm_grpo.output import without_folders
from glm_grpo.run.figures import change_row, interval_note
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.summaries import summarise_until


def describe_training(folder: RunFolder, config: Config, *, step: int) -> str:
    """Write the sections of a model card, in Markdown, for the weights of a step."""
    return f"{_describe_settings(config, step=step)}\n{_describe_figures(folder, step=step)}"


def _describe_settings(config: Config, *, step: int) -> str:
    method = "supervised fine-tuning on target images"
    if config.train.method == "grpo":
        method = f"GRPO, loss `{config.loss.kind}`, KL weight {config.loss.kl_coef:g}"
    adapter = config.model.adapter
    trained = "all weights of the language model"
    if adapter is not None:
        trained = f"adapters of rank {adapter.rank} (alpha {adapter.alpha:g}) on the language model"
    rollout, weights = config.rollout, config.reward.weights()
    terms = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
    rows = {
        "base model": _public(config.model.path),
        "started from": _public(config.model.start_from or config.model.path),
        "method": f"{method}; the decoder stays frozen",
        "trained": trained,
        "steps": f"{step}, of {rollout.prompts_per_step} prompts with {rollout.group_size} images "
        f"each; learning rate {config.optim.learning_rate:g}; seed {config.train.seed}",
        "prompts": f"{_public(config.data.path)}, held out: {_public(config.data.eval_path)}",
        "reward": f"`{config.reward.combine}` of {terms}",
        "sampling": describe_sampling(rollout),
        "decoding": describe_decoding(config.decode),
        "size": f"{rollout.height} x {rollout.width} pixels (height x width)",
        "program": f"glm-grpo {version('glm-grpo')}",
    }
    if config.run.notes is not None:
        rows["notes"] = re.sub(r"\s*\n\s*", "; ", config.run.notes).replace("|", r"\|")
    lines = (f"| {name} | {value} |\n" for name, value in rows.items())
    return f"## How it was trained\n\n| | |\n|---|---|\n{''.join(lines)}"


def _describe_figures(folder: RunFolder, *, step: int) -> str:
    title = "## Held-out prompts, before and after\n\n"
    try:
        summary = summarise_until(folder, step)
    except StorageError:
        # The weights are intact, even if the evaluations are not.
        return f"{title}The evaluations of the run cannot be read.\n"
    if summary is None:
        return f"{title}The run had no evaluation after its start when this was exported.\n"
    rows = "".join(f"| {' | '.join(change_row(row))} |\n" for row in summary.rows)
    note = interval_note(row.low for row in summary.rows)
    below = f"\n{note}\n" if note else ""
    return (
        f"{title}Mean scores on {summary.prompts} prompts that were not used in training, at the "
        f"start of the run and at step {summary.step}; higher is better. The intervals are 95 % "
        "bootstrap intervals of the change, over prompts.\n\n"
        f"| | before | after | change | 95 % interval |\n|---|---|---|---|---|\n{rows}{below}"
    )


def _public(path: str) -> str:
    # For a cell of a Markdown table.
    name = re.sub(r"[|`\s]", "_", without_folders(path))
    return f"`{name}`"
