"""Describe a run's training and its results for the page of an export."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from glm_grpo.config import Config
from glm_grpo.errors import StorageError
from glm_grpo.models.export_page import describe_decoding, describe_sampling
from glm_grpo.output import counted, without_folders
from glm_grpo.run.figures import change_row, interval_note
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.provenance import Provenance, read_provenance
from glm_grpo.run.summaries import base_means, summarise_until
from glm_grpo.run.tables import (
    MetricsRow,
    read_metrics,
    read_table,
    stored_steps,
)
from glm_grpo.studio.gallery.before_after import caution_of, describe_term
from glm_grpo.studio.gallery.contact_sheet import draw_contact_sheet, prompts_by_change
from glm_grpo.studio.held_out.conditions import describe_judges
from glm_grpo.studio.held_out.tables import report_held_out, score_tables
from rewards.base import TermConfig
from rewards.exact import EXACT
from rewards.terms.composition import CompositionConfig

_SHEET = "before_after.png"
_SHEET_COLUMNS = 4
_SHEET_SIDE = 256
"""Pixels of an image on the sheet, at most."""
_EXAMPLES = 3
_LONGEST_PROMPT = 200
"""Characters of a prompt that are shown."""

_NOT_APPLIED = " It applied to no held-out prompt."
_PACKAGES = ("glm-grpo", "torch", "torchvision", "transformers", "diffusers", "peft", "accelerate")

_SECONDS = ("time/step", "time/records", "time/evaluation", "time/recheck")
"""Metrics that add up to the time of a run; checkpoints are not timed."""


@dataclass(frozen=True)
class Description:
    """What a page says about a run.

    Attributes:
        summary: Sentences in Markdown on the run.
        results: Sections on what training changed.
        training: Likewise on how the weights were trained.
        groups: Tables of mean@1 and best@k, which may have many rows; empty if there are none.
        png_files: PNG files by the names under which the sections show them.
        example: The held-out prompt that changed most; None if it is not known.
        name: Name of the run, in Markdown; None if it has none.
    """

    summary: str
    results: str
    training: str
    groups: str
    png_files: Mapping[str, bytes]
    example: str | None
    name: str | None


def describe_training(folder: RunFolder, config: Config, *, step: int) -> Description:
    """Describe the weights of a step: results, settings, prompts, cost.

    What cannot be read, as after a crash or when images were removed, is left out: the weights are
    intact all the same.
    """
    rows: list[MetricsRow] = []
    with suppress(StorageError):
        rows = [row for row in read_metrics(folder) if (row["step"] or 0) <= step]
    provenance = None
    with suppress(StorageError):
        provenance = read_provenance(folder)
    png_files: dict[str, bytes] = {}
    prompts: list[str] = []
    with suppress(StorageError):
        prompts = prompts_by_change(folder, last_step=step)
    with suppress(StorageError):
        sheet = draw_contact_sheet(folder, columns=_SHEET_COLUMNS, last_step=step, side=_SHEET_SIDE)
        if prompts:
            png_files[_SHEET] = sheet
    results = [
        "## Held-out prompts, before and after\n",
        *(_describe_sheet(prompts) if _SHEET in png_files else []),
        *_describe_figures(folder, config, provenance, rows, step=step),
    ]
    training = [
        _describe_settings(config, provenance, rows, step=step),
        *([_describe_prompts(folder, provenance)] if provenance is not None else []),
        *([_describe_versions(provenance)] if provenance is not None else []),
    ]
    example = prompts[0] if prompts else None
    name = None if config.run.name is None else _text(config.run.name)
    return Description(
        summary=_describe_run(config, provenance, step=step),
        results="\n".join(results),
        training="\n".join(training),
        groups="\n".join(_describe_groups(folder, config, step=step)),
        png_files=png_files,
        example=example,
        name=name,
    )


def _describe_run(config: Config, provenance: Provenance | None, *, step: int) -> str:
    method = "GRPO" if config.train.method == "grpo" else "supervised fine-tuning"
    start = "" if config.model.start_from is None else ", from the weights of another run"
    prompts = counted(config.rollout.prompts_per_step, "prompt")
    if provenance is not None:
        prompts += f" from a set of {len(provenance.training):,}"
    return (
        f"glm-grpo trained the autoregressive language model, which chooses the tokens of an "
        f"image, with {method} for {counted(step, 'step')} of {prompts}{start}. The decoder, which "
        "turns tokens into pixels, is unchanged.\n"
    )


def _describe_sheet(prompts: Sequence[str]) -> list[str]:
    shown = prompts[:_SHEET_COLUMNS]
    lines = "".join(f"{number}. {_text(prompt)}\n" for number, prompt in enumerate(shown, 1))
    return [
        f"![Held-out prompts before and after training]({_SHEET})\n",
        "The held-out prompts whose first image changed most in its total, for better or worse, "
        f"with the same seeds each time:\n\n{lines}",
    ]


def _describe_figures(
    folder: RunFolder,
    config: Config,
    provenance: Provenance | None,
    rows: Sequence[MetricsRow],
    *,
    step: int,
) -> list[str]:
    try:
        summary = summarise_until(folder, step)
    except StorageError:
        return ["The evaluations of the run cannot be read.\n"]
    if summary is None:
        return [f"The run has no evaluation between its start and step {step}.\n"]
    base = base_means(folder)
    columns = ["", *(["base"] if base else []), "before", "after", "change"]
    cells = [change_row(row) for row in summary.rows]
    if base:
        cells = [(name, f"{base[name]:z.3f}", *others) for name, *others in cells]
    note = interval_note(row.low for row in summary.rows)
    below = f"\n{note}\n" if note else ""
    start = "the start of the run"
    if base:
        start = "the start of the run (which began with the weights of another one)"
    at = f"step {summary.step}"
    if summary.step != step:
        at += f" (the weights of this page are those of step {step})"
    intervals = ""
    if not all(math.isnan(row.low) for row in summary.rows):
        intervals = " The intervals are 95 % bootstrap intervals of the change, over prompts."
    changed = ""
    if provenance is not None and provenance.changed:
        keys = ", ".join(f"`{key}`" for key in provenance.changed)
        changed = f" What {keys} names changed during the run: scores may not be comparable."
    return [
        f"Mean scores on {_held_out(summary.prompts, provenance)}, at {start} and at {at}; "
        f"higher is better.{intervals}{changed}\n\n"
        f"{_table([*columns, '95 % interval'], cells)}{below}",
        *_describe_scores(config, {row.name for row in summary.rows}),
        *_describe_canaries(rows),
    ]


def _describe_groups(folder: RunFolder, config: Config, *, step: int) -> list[str]:
    """Mean@1 and best@k, by group of prompts if they have groups."""
    report = None
    with suppress(StorageError):
        report = report_held_out(folder, config, step)
    if report is None or not report.grouped.is_telling:
        return []
    return ["## Mean@1 and best@k\n", *(table.markdown() for table in score_tables(report))]


def _held_out(number: int, provenance: Provenance | None) -> str:
    """Say how many held-out prompts there are, and how many of them are training prompts."""
    prompts = counted(number, "held-out prompt")
    if provenance is None or provenance.shared is None:
        return prompts
    if not provenance.shared:
        return (
            f"{prompts}, {'which is no' if number == 1 else 'none of which is a'} training prompt"
        )
    return f"{prompts}, among them {counted(len(provenance.shared), 'training prompt')}"


def _describe_scores(config: Config, scored: Collection[str]) -> list[str]:
    """Say what each score measures, and how the total is made of them."""
    terms = [
        (name, f"{term.weight:g}", _measured(term, is_applied=name in scored))
        for name, term in config.reward.terms.items()
    ]
    terms += [(each.name, "-", each.meaning) for each in EXACT.values() if each.name in scored]
    total = (
        "`total` is their weighted sum. Where a term does not apply, the others share its weight."
    )
    if len(config.reward.terms) == 1:
        total = "`total` is the score times its weight."
    if config.reward.combine != "weighted_sum":
        total = (
            "`total` is their weighted sum after each is standardised, in standard deviations of "
            "its scores at the start of the run."
        )
    if config.train.method != "grpo":
        total += " Scores were not trained on."
    table = _table(["score", "weight", "what it measures; higher is better"], terms)
    return [f"What the scores are:\n\n{table}\n{total}\n"]


def _describe_canaries(rows: Sequence[MetricsRow]) -> list[str]:
    """Warn if canaries were outside their bands when they were last measured."""
    found = [row["canary/departures"] for row in rows if row.get("canary/departures") is not None]
    if not found or not found[-1]:
        return []
    return [
        "At the end, measures outside the reward (canaries) were outside the range that they had "
        "at the start of the run: look at images before you trust the scores.\n"
    ]


def _describe_settings(
    config: Config, provenance: Provenance | None, rows: Sequence[MetricsRow], *, step: int
) -> str:
    rollout = config.rollout
    values = {
        "base model": _public(config.model.path),
        "method": f"{_describe_method(config)}; the decoder stays frozen",
        "trained": _describe_trained(config),
        "steps": _describe_steps(config, step),
        "optimizer": _describe_optimizer(config),
        "prompts": f"{_public(config.data.path)}, held out: {_public(config.data.eval_path)}",
        "sampling": describe_sampling(rollout),
        "decoding": _describe_decoding(config),
        "size": f"{rollout.height} x {rollout.width} pixels (height x width)",
        "seeds": f"training {config.train.seed}, evaluations {config.eval.seed}",
        **{name: _text(value) for name, value in describe_judges(config, provenance).items()},
        "cost": _describe_cost(config, provenance, rows),
    }
    if config.model.start_from is not None:
        values["started from"] = _public(config.model.start_from)
    if config.run.notes is not None:
        values["notes"] = _text(config.run.notes.replace("\n", "; "))
    return f"## How it was trained\n\n{_table(['setting', 'value'], values.items())}"


def _describe_method(config: Config) -> str:
    if config.train.method == "sft":
        return "supervised fine-tuning on target images"
    parts = [
        f"GRPO, loss `{config.loss.kind}`",
        f"KL weight {config.loss.kl_coef:g}",
        f"credit by {config.advantage.credit}",
    ]
    if config.sft.is_used:
        parts.append("with a term of supervised fine-tuning on target images")
    if config.train.mode == "async":
        parts.append("asynchronous")
    return ", ".join(parts)


def _describe_trained(config: Config) -> str:
    adapter, bits = config.model.adapter, config.model.quantization
    trained = "all weights of the language model"
    if adapter is not None:
        trained = f"adapters of rank {adapter.rank} (alpha {adapter.alpha:g}) on the language model"
        if adapter.target_modules is not None:
            trained += f" ({', '.join(adapter.target_modules)})"
    if bits is not None:
        trained += f", whose weights were loaded in 4 bits ({bits})"
    if config.eval.ema_decay is not None:
        trained += f"; these are a moving average (decay {config.eval.ema_decay:g})"
    return trained


def _describe_steps(config: Config, step: int) -> str:
    planned = config.train.steps
    steps = f"{step}" if step == planned else f"{step} of {planned} planned"
    prompts = counted(config.rollout.prompts_per_step, "prompt")
    if config.train.method == "sft":
        return f"{steps}, each on the target images of {prompts}"
    return f"{steps}, each on {prompts} with {config.rollout.group_size} images per prompt"


def _describe_optimizer(config: Config) -> str:
    optim, updates = config.optim, counted(config.train.updates_per_step, "update")
    warmup = f", {counted(optim.warmup_steps, 'step')} of warm-up" if optim.warmup_steps else ""
    rate = f"learning rate at most {optim.learning_rate:g} ({optim.schedule}{warmup})"
    return f"AdamW, {updates} per step, {rate}"


def _describe_decoding(config: Config) -> str:
    decode = config.decode
    described = describe_decoding(decode)
    steps = decode.training_steps
    if config.train.method == "grpo" and steps is not None and steps != decode.steps:
        described += f"; in training {counted(steps, 'step')}"
    if decode.quantization is not None:
        described += f"; weights in 8 bits ({decode.quantization})"
    return described


def _describe_cost(
    config: Config, provenance: Provenance | None, rows: Sequence[MetricsRow]
) -> str:
    parts = []
    trained = [row for row in rows if row["step"]]
    if config.train.method == "grpo" and trained:
        # Groups that were replaced are sampled, too.
        groups = len(trained) * config.rollout.prompts_per_step
        groups += int(sum(row.get("advantage/discarded_groups") or 0 for row in trained))
        images = groups * config.rollout.group_size
        parts.append(f"{counted(images, 'image')} sampled for training")
    seconds = sum(row.get(name) or 0.0 for row in rows for name in _SECONDS)
    if seconds:
        parts.append(f"{timedelta(seconds=round(seconds))} (h:mm:ss)")
    devices = provenance.devices if provenance is not None else ""
    return ", ".join(parts) + (f" on {devices}" if devices else "")


def _describe_prompts(folder: RunFolder, provenance: Provenance) -> str:
    """Number of prompts, and examples of those that were sampled."""
    examples: list[str] = []
    with suppress(StorageError):
        steps = stored_steps(folder.rollouts_dir)
        rows = read_table(folder.rollout_path(steps[0]), ("prompt",)).to_pylist() if steps else []
        examples = [*dict.fromkeys(row["prompt"] for row in rows)][:_EXAMPLES]
    numbers = f"{len(provenance.training):,} for training, {len(provenance.held_out):,} held out."
    if not examples:
        return f"## Prompts\n\n{numbers}\n"
    shown = "".join(f"- {_text(prompt)}\n" for prompt in examples)
    return f"## Prompts\n\n{numbers} Some of those used in training:\n\n{shown}"


def _describe_versions(provenance: Provenance) -> str:
    shown = ", ".join(
        f"{name} {provenance.versions[name]}" for name in _PACKAGES if name in provenance.versions
    )
    return f"## Versions\n\n{shown}\n"


def _measured(term: TermConfig, *, is_applied: bool) -> str:
    """What a term measures, with its detector or the user's function, and what it does not."""
    function = term.users_function()
    if isinstance(term, CompositionConfig):
        named = f" {_public(term.detector)}"
    else:
        named = f" `{function.name}`" if function else ""
    measured = _text(describe_term(term)) + named + ("" if is_applied else _NOT_APPLIED)
    return f"{measured} {caution_of(term)}".rstrip()


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _text(text: str) -> str:
    """A text of the user in one line of Markdown, without markup of its own."""
    line = " ".join(text.split())
    if len(line) > _LONGEST_PROMPT:
        line = f"{line[:_LONGEST_PROMPT]} ..."
    return re.sub(r"([\\`*_\[\]<>#|~$]|^[-+]|(?<=^\d)[.)])", r"\\\1", line)


def _public(path: str) -> str:
    # For a cell of a Markdown table.
    name = re.sub(r"[|`\s]", "_", without_folders(path))
    return f"`{name}`"
