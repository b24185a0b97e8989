"""`glm-grpo compare`: compare runs by one reward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import RenderableType

from glm_grpo.commands.arguments import is_weight, parse_weights, path
from glm_grpo.studio.compare.comparison import compare
from glm_grpo.studio.compare.tables import comparison_json, comparison_tables


def compare_runs(
    given: Sequence[Path], weights: Sequence[str], *, as_json: bool
) -> Sequence[RenderableType]:
    """Compare runs; returns what to print.

    Args:
        given: Run folders, or folders of runs; also weights, such as `ocr=0.5`.
        weights: Words after `--weights`, which takes all that follow it, runs too.
    """
    # A path takes precedence: a run's folder may be named after its override.
    short = [str(run) for run in given if is_weight(str(run)) and not run.exists()]
    runs = [run for run in given if str(run) not in short]
    runs += [path(word) for word in weights if "=" not in word]
    words = [*(word for word in weights if "=" in word), *short]
    comparison = compare(runs, parse_weights(words, option="--weights") if words else None)
    return [comparison_json(comparison)] if as_json else comparison_tables(comparison)
