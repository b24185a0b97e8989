"""The table of a paper for terminal, page, Markdown and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from glm_grpo.config import Config
from glm_grpo.output import counted
from glm_grpo.run.figures import NO_VALUE, Table, interval, interval_note
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.provenance import read_provenance
from glm_grpo.studio.compare.tables import IN_SPREADS
from glm_grpo.studio.held_out.by_group import (
    Estimate,
    GroupedScores,
    GroupScore,
    MeanAndBest,
    group_scores,
)
from glm_grpo.studio.held_out.conditions import describe_conditions
from rewards.exact import EXACT

_SHARES = {exact.name for exact in EXACT.values()}


@dataclass(frozen=True)
class HeldOutReport:
    """Scores by group, and what they depend on.

    Attributes:
        models: Name of the model at each of the steps, such as `base` and `step 60`.
        conditions: See `describe_conditions`.
        in_spreads: Whether totals are in standard deviations of the first evaluation.
    """

    grouped: GroupedScores
    models: tuple[str, ...]
    conditions: Mapping[str, str]
    in_spreads: bool


def report_held_out(
    folder: RunFolder, config: Config, last_step: int | None = None
) -> HeldOutReport | None:
    """Report on the stored evaluations of a run, or of `glm-grpo eval`; None if there are none.

    Arguments as in `group_scores`.
    """
    scores = group_scores(folder, config.eval.group_by, last_step)
    if scores is None:
        return None
    return HeldOutReport(
        scores,
        name_models(config, scores.steps),
        describe_conditions(config, read_provenance(folder)),
        in_spreads=config.reward.combine != "weighted_sum",
    )


def name_models(config: Config, steps: Sequence[int]) -> tuple[str, ...]:
    """Name the models that were evaluated, such as `base` and `step 60`."""
    start = "base" if config.model.start_from is None else "start"
    return tuple(f"step {step}" if step else start for step in steps)


def score_tables(report: HeldOutReport) -> list[Table]:
    """One table per score with a block of rows per group; without groups, one of all scores."""
    scores, column = report.grouped.scores, report.grouped.column
    if column is None:
        rows = [(each.score, each) for each in scores]
        return [_table(report, "all held-out prompts", "score", rows)] if rows else []
    tables = []
    for name in dict.fromkeys(each.score for each in scores):
        rows = [(each.group, each) for each in scores if each.score == name]
        tables.append(_table(report, f"{name} by {column}", "group", rows))
    return tables


def _table(
    report: HeldOutReport, title: str, named: str, rows: Sequence[tuple[str, GroupScore]]
) -> Table:
    """A table of blocks, each with a name in the column `named`."""
    samples, models = report.grouped.samples, report.models
    compared = ("model",) if len(models) > 1 else ()
    figures: tuple[str, ...] = ("mean@1", "95 % interval")
    if samples > 1:
        figures = (*figures, f"best@{samples}", f"interval of best@{samples}")
    cells = tuple(
        (*head, *found[: len(figures)])
        for name, score in rows
        for head, found in _rows(name, score, models, samples)
    )
    title = title if compared else f"{title}, {models[0]}"
    columns = (named, "prompts", *compared, *figures)
    spare = (len(columns) - 1, 1) if samples > 1 else (1,)
    note = _note(report, [score for _, score in rows])
    return Table(title, columns, cells, note, spare=spare)


def _rows(
    name: str, score: GroupScore, models: Sequence[str], samples: int
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Rows of a block: what names them, and their figures."""
    group = (name, str(score.prompts))
    if score.after is None or score.change is None or score.over_best is None:
        yield group, _levels(score.before)
        return
    before, after = models
    change = (*_difference(score.change.mean), *_difference(score.change.best))
    yield (*group, before), _levels(score.before)
    yield ("", "", after), _levels(score.after)
    yield ("", "", "change"), change
    if samples > 1:
        yield ("", "", f"over best@{samples}"), (*_difference(score.over_best), "", "")


def _levels(found: MeanAndBest) -> tuple[str, ...]:
    return tuple(cell for each in (found.mean, found.best) for cell in _level(each))


def _level(found: Estimate) -> tuple[str, str]:
    has_interval = not math.isnan(found.low)
    ends = f"[{found.low:z.3f}, {found.high:z.3f}]" if has_interval else NO_VALUE
    return f"{found.mean:z.3f}", ends


def _difference(found: Estimate) -> tuple[str, str]:
    return f"{found.mean:+z.3f}", interval(found.low, found.high)


def _note(report: HeldOutReport, scores: Sequence[GroupScore]) -> str:
    samples, names = report.grouped.samples, {each.score for each in scores}
    notes = [f"mean@1: mean over {counted(samples, 'image')} of each prompt"]
    if samples > 1:
        notes.append(f"best@{samples}: the best of them by this score")
        if names & _SHARES:
            shares = " and ".join(sorted(names & _SHARES))
            notes[-1] += f"; of {shares}, the share of prompts with at least one right image"
    if samples > 1 and len(report.models) > 1:
        before, after = report.models
        notes.append(
            f"over best@{samples}: mean@1 of {after} less best@{samples} of {before}; above 0, "
            "training beats choosing"
        )
    if "total" in names and report.in_spreads:
        notes.append(f"total: {IN_SPREADS}")
    if missing := interval_note(each.before.mean.low for each in scores):
        notes.append(missing)
    return "; ".join(notes)


def conditions_table(report: HeldOutReport) -> Table:
    """What the figures depend on."""
    rows = tuple(report.conditions.items())
    return Table("how these figures were made", ("condition", "value"), rows, is_text=True)


def report_markdown(report: HeldOutReport) -> str:
    """The tables in Markdown."""
    tables = [*score_tables(report), conditions_table(report)]
    return "\n".join(each.markdown() for each in tables)


def report_json(report: HeldOutReport) -> str:
    """The same figures as one JSON object; null where there is no interval."""
    return TypeAdapter(HeldOutReport).dump_json(report, indent=1).decode() + "\n"
