"""Runs judged by one yardstick, in figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rewards.reweigh import Mode

_LONGEST_LABEL = 44
"""Characters that fit into the legend of a picture."""


@dataclass(frozen=True)
class Gain:
    """A mean difference, paired by prompt, with its 95 % interval.

    Attributes:
        difference: Mean over the prompts.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class ComparedRun:
    """One run on the held-out prompts.

    Attributes:
        name: The shortest end of its path that no other run's path has.
        settings: What of its config differs between the runs, by dotted key, as text.
        steps: Policy steps of its evaluations, in order, at least two.
        totals: Mean total by the yardstick at each of `steps`.
        gain: Of the yardstick total, from the first evaluation to the last.
        over_first: The last total less that of the first run; None for the first run itself.
        terms: Mean raw score of each term at the last evaluation.
    """

    name: str
    settings: Mapping[str, str]
    steps: tuple[int, ...]
    totals: tuple[float, ...]
    gain: Gain
    over_first: Gain | None
    terms: Mapping[str, float]


@dataclass(frozen=True)
class TradeOff:
    """Two terms against each other.

    Attributes:
        x: Name of one term.
        y: Name of the other.
        is_optimal: For each run, whether neither another run nor the untrained model is at least
            as good in both terms and better in one (Pareto).
    """

    x: str
    y: str
    is_optimal: tuple[bool, ...]


@dataclass(frozen=True)
class ComparedPicture:
    """One picture of a run, or of the untrained model.

    Attributes:
        path: Of the file, which may be gone.
        total: By the yardstick.
        scores: Raw score by term; None where the term does not apply.
    """

    path: Path
    total: float
    scores: Mapping[str, float | None]


@dataclass(frozen=True)
class ComparedPrompt:
    """One held-out prompt with the pictures that all runs made of it.

    Attributes:
        prompt_id: As in the tables.
        prompt: The caption.
        texts: The texts that should appear.
        target: File of the target picture, which may be gone; None for a prompt without one.
        samples: One for each sample, drawn with the same seeds: the picture of the untrained
            model, then that of each run at its last evaluation.
    """

    prompt_id: str
    prompt: str
    texts: tuple[str, ...]
    target: Path | None
    samples: tuple[tuple[ComparedPicture, ...], ...]


@dataclass(frozen=True)
class Comparison:
    """Runs judged by one yardstick on the same held-out prompts.

    Attributes:
        yardstick: Weight by name of the term.
        prompts: Number of held-out prompts.
        samples_per_prompt: Images of each.
        runs: In the order they were named.
        untrained: Mean raw score of each term at the first evaluation of the first run.
        trade_offs: Pairs of terms; empty with a single term.
        left_out: Terms that not every run scored in the same way.
        side_by_side: Every held-out prompt with the pictures of all runs.
        combine: Whether totals are weighted sums of raw scores, or of scores in units of the
            spread of the first evaluation of the first run.
    """

    yardstick: Mapping[str, float]
    prompts: int
    samples_per_prompt: int
    runs: tuple[ComparedRun, ...]
    untrained: Mapping[str, float]
    trade_offs: tuple[TradeOff, ...]
    left_out: tuple[str, ...]
    side_by_side: tuple[ComparedPrompt, ...]
    combine: Mode = "weighted_sum"

    def labels(self) -> tuple[str, ...]:
        """A short name for each run: what differs where that is short, else the run's own name."""
        texts = [_short_settings(run.settings) for run in self.runs]
        if not all(0 < len(text) <= _LONGEST_LABEL for text in texts):
            texts = [run.name for run in self.runs]
        return tuple(f"{number}: {text}" for number, text in enumerate(texts, start=1))


def _short_settings(settings: Mapping[str, str]) -> str:
    """`ocr.weight=0.3` for reward.terms.ocr.weight."""
    return ", ".join(f"{'.'.join(key.split('.')[-2:])}={value}" for key, value in settings.items())
