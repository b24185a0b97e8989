"""The comparison of runs as tables for the terminal, and as JSON."""

from __future__ import annotations

import math

from pydantic import TypeAdapter

from glm_grpo.output import counted
from glm_grpo.run.figures import NO_VALUE, Table, interval, interval_note, show_change
from glm_grpo.run.summaries import Interval
from glm_grpo.studio.compare.comparison import Comparison

IN_SPREADS = "scores minus the base model's mean, in units of its std"
"""Unit of totals under `normalize_then_sum`."""


def comparison_tables(comparison: Comparison) -> list[Table]:
    """Tabulate settings, totals and terms of the runs."""
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
    scores = [(comparison.base_label, comparison.base)]
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
            f"{counted(comparison.prompts, 'held-out prompt')}, "
            f"{counted(comparison.samples_per_prompt, 'image')} each; "
            + (
                interval_note(run.gain.low for run in comparison.runs)
                or "95 % intervals, paired bootstrap over prompts"
            )
            + _note_on_starts(comparison),
        ),
        Table(
            "each term, at the last evaluation",
            ("run", *comparison.base),
            tuple(
                (label, *(f"{terms[name]:z.3f}" for name in comparison.base))
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


def comparison_json(comparison: Comparison) -> str:
    """Format the same figures as one JSON object, for `glm-grpo compare --json`."""
    return TypeAdapter(Comparison).dump_json(comparison, indent=1).decode()


def _describe_weights(comparison: Comparison) -> str:
    # A term that applies to no prompt has no mean.
    listed = ", ".join(
        f"{name} {weight:g}{'' if name in comparison.base else ' (applies to no prompt)'}"
        for name, weight in comparison.weights.items()
    )
    return listed if comparison.combine == "weighted_sum" else f"{listed}; {IN_SPREADS}"


def _gain_cells(before: float, after: float, gain: Interval) -> tuple[str, str]:
    return show_change(before, after), interval(gain.low, gain.high)
