"""The comparison of runs: its tables for the terminal, and its page with charts and pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from glm_grpo.gallery.report import (
    NO_VALUE,
    Cell,
    Pictures,
    Plot,
    Report,
    Series,
    Table,
    change_cell,
    copy_tile,
    interval,
    interval_note,
    show_score,
    write_report,
)
from glm_grpo.report.compare.comparison import (
    ComparedPicture,
    ComparedPrompt,
    Comparison,
    TradeOff,
)
from glm_grpo.run.folder import safe_name
from glm_grpo.run.summaries import Interval

IN_SPREADS = "scores minus the untrained model's mean, in units of its std"
"""What totals of `normalize_then_sum` are made of, in evaluations."""


def comparison_tables(comparison: Comparison) -> list[Table]:
    """What there is to say of runs: settings, totals and terms."""
    runs = list(enumerate(comparison.runs, start=1))
    settings = tuple(
        (
            str(number),
            run.shown,
            "\n".join(f"{key} = {value}" for key, value in run.settings.items()) or "nothing",
        )
        for number, run in runs
    )
    totals = tuple(
        (
            *(str(number), str(run.steps[-1])),
            *(f"{run.totals[0]:z.3f}", f"{run.totals[-1]:z.3f}"),
            *_gain_cells(run.totals[0], run.totals[-1], run.gain),
            *(
                (NO_VALUE, NO_VALUE)
                if run.over_first is None
                else _gain_cells(comparison.runs[0].totals[-1], run.totals[-1], run.over_first)
            ),
        )
        for number, run in runs
    )
    scores = [(comparison.untrained_label, comparison.untrained)]
    scores += [(str(number), run.terms) for number, run in runs]
    left_out = ", ".join(comparison.left_out)
    return [
        Table(
            "what differs between the runs", ("run", "folder", "settings"), settings, is_text=True
        ),
        Table(
            f"weights: {_describe_weights(comparison)}",
            ("run", "step", "before", "after", "gain", "interval", "over run 1", "interval"),
            totals,
            f"{comparison.prompts} held-out prompts, {comparison.samples_per_prompt} images each; "
            + (
                interval_note(run.gain.low for run in comparison.runs)
                or "95 % intervals, paired bootstrap over prompts"
            )
            + _note_on_starts(comparison),
        ),
        Table(
            "each term, at the last evaluation",
            ("run", *comparison.untrained),
            tuple(
                (label, *(f"{terms[name]:z.3f}" for name in comparison.untrained))
                for label, terms in scores
            ),
            f"left out, because not every run scored them alike: {left_out}" if left_out else "",
        ),
    ]


def _note_on_starts(comparison: Comparison) -> str:
    first, *others = (run.totals[0] for run in comparison.runs)
    if all(math.isclose(first, other, abs_tol=1e-6) for other in others):
        return ""
    return (
        "; the runs differ before training already, so compare them by `over run 1`, not by gains"
    )


def write_comparison(comparison: Comparison, directory: Path, *, has_samples: bool) -> Path:
    """Write `index.html`, which needs nothing outside its folder.

    Files of the same names are replaced, others stay.

    Args:
        comparison: The runs.
        directory: Made where it does not exist.
        has_samples: Whether small copies of the pictures of all runs are shown side by side.

    Returns:
        The path of the page.

    Raises:
        StorageError: A file cannot be written.
    """
    prompts = sorted(comparison.side_by_side, key=spread, reverse=True) if has_samples else ()
    labels = (comparison.untrained_label, *comparison.labels())
    report = Report(
        title=f"Comparison of {len(comparison.runs)} runs",
        summary=(
            "All runs are judged by the same weighted sum of "
            f"{'raw' if comparison.combine == 'weighted_sum' else 'standardised'} scores, whatever "
            "they were trained on, on the same held-out prompts with the same seeds. A gain is "
            "coloured when its interval excludes 0. In a chart of two terms, after training, a run "
            "is Pareto-optimal when neither another run nor the untrained model is at least as "
            "good in both and better in one.",
        ),
        tables=comparison_tables(comparison),
        charts=[
            _draw_curves(comparison),
            *(_draw_trade_off(comparison, trade_off) for trade_off in comparison.trade_offs),
        ],
        pictures=[_place(prompt, labels, directory) for prompt in prompts],
        about_pictures="Each row shows one prompt, drawn with the same seeds by every run at its "
        "last evaluation. Prompts on which the mean totals of the runs differ most come first. To "
        "the right of a score: its difference from run 1.",
    )
    return write_report(report, directory)


def spread(prompt: ComparedPrompt) -> float:
    """How far runs differ: the largest mean total over the samples less the smallest."""
    _, *runs = zip(*prompt.samples, strict=True)
    means = [fmean(picture.total for picture in pictures) for pictures in runs]
    return max(means) - min(means)


def _draw_curves(comparison: Comparison) -> Plot:
    named = list(zip(comparison.labels(), comparison.runs, strict=True))
    return Plot(
        "Total against step",
        "; ".join(
            f"{label} from {run.totals[0]:z.3f} to {run.totals[-1]:z.3f}" for label, run in named
        ),
        "step",
        "total",
        tuple(
            Series(label, tuple(zip(map(float, run.steps), run.totals, strict=True)))
            for label, run in named
        ),
    )


def _draw_trade_off(comparison: Comparison, trade_off: TradeOff) -> Plot:
    x, y = trade_off.x, trade_off.y
    untrained = (comparison.untrained[x], comparison.untrained[y])
    points = [(run.terms[x], run.terms[y]) for run in comparison.runs]
    named = list(zip(comparison.labels(), points, trade_off.is_optimal, strict=True))
    return Plot(
        f"{y} against {x}",
        "; ".join(
            f"{label} at {point[0]:z.3f}, {point[1]:z.3f}{', Pareto-optimal' if is_optimal else ''}"
            for label, point, is_optimal in (
                (comparison.untrained_label, untrained, False),
                *named,
            )
        ),
        _axis_label(comparison, x),
        _axis_label(comparison, y),
        tuple(Series(label, (point,)) for label, point, _ in named),
        untrained,
        tuple(sorted(point for _, point, is_optimal in named if is_optimal)),
    )


def _axis_label(comparison: Comparison, term: str) -> str:
    return f"{term} (lower is better)" if comparison.weights.get(term, 0.0) < 0 else term


def _describe_weights(comparison: Comparison) -> str:
    # A term that applies to no prompt has no mean.
    listed = ", ".join(
        f"{name} {weight:g}{'' if name in comparison.untrained else ' (applies to no prompt)'}"
        for name, weight in comparison.weights.items()
    )
    return listed if comparison.combine == "weighted_sum" else f"{listed}; {IN_SPREADS}"


def _gain_cells(before: float, after: float, gain: Interval) -> tuple[Cell, str]:
    return change_cell(before, after, gain.low, gain.high), interval(gain.low, gain.high)


def _place(prompt: ComparedPrompt, labels: Sequence[str], directory: Path) -> Pictures:
    """A row for each sample: sources, target, the untrained model, then every run."""
    stem = safe_name(prompt.prompt_id)
    given = [
        copy_tile(path, directory, f"{stem}-source-{number}", "source")
        for number, path in enumerate(prompt.sources)
    ]
    if prompt.target is not None:
        given.append(copy_tile(prompt.target, directory, f"{stem}-target", "target"))
    rows = tuple(
        (
            *given,
            *(
                copy_tile(
                    picture.path,
                    directory,
                    f"{stem}-{sample}-{column}",
                    label,
                    _score_rows(picture, pictures[1] if column > 1 else None),
                )
                for column, (label, picture) in enumerate(zip(labels, pictures, strict=True))
            ),
        )
        for sample, pictures in enumerate(prompt.samples)
    )
    return Pictures(prompt.prompt, rows, prompt.texts)


def _score_rows(
    picture: ComparedPicture, first: ComparedPicture | None
) -> tuple[tuple[str | Cell, ...], ...]:
    """The total and each term, with what they are above those of the first run."""
    scores = {"total": picture.total, **picture.scores}
    others = {} if first is None else {"total": first.total, **first.scores}
    rows: list[tuple[str | Cell, ...]] = []
    for name, score in scores.items():
        other = others.get(name)
        if score is None or other is None:
            rows.append((name, show_score(score)))
            continue
        shown = round(score - other, 3) if name == "total" else 0.0
        rows.append((name, f"{score:.3f}", change_cell(other, score, shown, shown)))
    return tuple(rows)
