"""Detect reward hacking with measures that are not trained on (canaries).

The base model gives each canary a band: its held-out images, and those of the first
step, which it samples on the prompts that are trained on. Several steps in a row outside the band
are reported. Canaries are measures of the images (`rewards.canaries`), the entropy of the sampled
tokens, and the terms named in `reward.watch`. Terms that are scored only in evaluations are judged
there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from glm_grpo.errors import StorageError
from glm_grpo.run.folder import RunFolder, write_atomically
from glm_grpo.run.tables import read_bands
from glm_grpo.types import Evaluation, Experience
from rewards.canaries import (
    TOKEN_ENTROPY,
    Band,
    Departure,
    find_departures,
    make_bands,
    measure_images,
)
from rewards.group_statistics import group_means
from rewards.types import RewardTable

logger = logging.getLogger(__name__)

STEPS_IN_A_ROW = 3
"""Steps outside the band that make a departure; the prompts of a single step may be unusual."""
EVALUATIONS_IN_A_ROW = 2
"""Evaluations outside the band that make a departure of a term that is judged there."""


@dataclass(frozen=True)
class CanaryReading:
    """Canary values of one step or evaluation.

    Attributes:
        metrics: `canary/<name>`; for a step also `canary/departures`, the number of departures.
        departures: Canaries that have been outside their band often enough in a row.
    """

    metrics: dict[str, float]
    departures: tuple[Departure, ...]


class HackingMonitor:
    """The canaries of one run.

    Args:
        folder: Run folder, which stores the bands for resumed runs.
        watch: Names of terms that are canaries.
        evaluated: Names of terms that are scored only in evaluations.
        margin: Half width of the bands, in standard errors.
        outside: For each canary outside its band, the steps or evaluations in a row; changed in
            place, and stored in checkpoints.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        watch: Sequence[str],
        evaluated: Sequence[str],
        margin: float,
        outside: dict[str, int],
    ) -> None:
        self._folder = folder
        self._watch = watch
        self._evaluated = evaluated
        self._margin = margin
        self._bands: dict[str, Band] = {}
        self._outside = outside

    def learn(self, evaluation: Evaluation) -> None:
        """Make the bands from the base model's held-out images, and store them.

        Canaries with fewer than two values get no band and are not judged: the diversity of single
        images, and terms that apply to none of the prompts.
        """
        values = {
            **measure_images(evaluation.prompts, evaluation.images.pixels),
            TOKEN_ENTROPY: evaluation.entropy.double(),
            **_scores(evaluation.scores, [*self._watch, *self._evaluated]),
        }
        self._bands = make_bands(values, evaluated=self._evaluated)
        self._warn_of_unwatched([*values])
        self._outside.clear()
        self._store()

    def _warn_of_unwatched(self, names: Sequence[str]) -> None:
        if unwatched := sorted({*names} - self._bands.keys()):
            logger.warning(
                "canaries not watched in this run: %s (each needs at least two held-out prompts to "
                "which it applies, before the first step; pixel_diversity needs "
                "eval.samples_per_prompt of 2 or more)",
                ", ".join(unwatched),
            )

    def _store(self) -> None:
        content = json.dumps({name: asdict(band) for name, band in self._bands.items()}, indent=1)
        write_atomically(self._folder.canaries_path, content.encode())

    def restore(self) -> None:
        """Load the bands of a resumed run."""
        bands = read_bands(self._folder)
        if bands is None:
            raise StorageError(
                f"{self._folder.canaries_path} is missing: it holds what the canaries were on the "
                "base model; restore it from a copy, or start a new run without train.resume"
            )
        self._bands = bands
        self._warn_of_unwatched(self._watch)

    def measure(
        self, step: int, experience: Experience, measures: Mapping[str, Float64[Tensor, " P"]]
    ) -> CanaryReading:
        """Judge a step; warns when a canary leaves its band or returns.

        The first step is sampled from the base model, so the bands move to its prompts: those
        that are trained on may differ from the held-out ones, above all after a warm start on them.

        Args:
            step: Training step, from 1.
            measures: Result of `measure_images` for the experience.
        """
        values = {
            **measures,
            TOKEN_ENTROPY: -experience.rollout.log_probs.double().mean(dim=(1, 2)).cpu(),
            **_scores(experience.scores, self._watch),
        }
        if step == 1:
            self._bands |= {
                name: band.moved_to(values[name])
                for name, band in self._bands.items()
                if not band.is_of_evaluations
            }
            self._store()
        departures = self._judge(values, is_evaluation=False)
        metrics = {**_means(values), "canary/departures": float(len(departures))}
        return CanaryReading(metrics, departures)

    def measure_evaluation(self, evaluation: Evaluation) -> CanaryReading:
        """Judge the terms that are scored only in evaluations, as `measure` judges the others."""
        values = _scores(evaluation.scores, self._evaluated)
        return CanaryReading(_means(values), self._judge(values, is_evaluation=True))

    def _judge(
        self, values: Mapping[str, Float64[Tensor, " P"]], *, is_evaluation: bool
    ) -> tuple[Departure, ...]:
        bands = {
            name: band
            for name, band in self._bands.items()
            # A resumed run may watch other terms than those that have a band.
            if band.is_of_evaluations == is_evaluation and name in values
        }
        found = {each.name: each for each in find_departures(bands, values, self._margin)}
        enough = EVALUATIONS_IN_A_ROW if is_evaluation else STEPS_IN_A_ROW
        for name in sorted(bands.keys() - found.keys()):
            if self._outside.pop(name, 0) >= enough:
                logger.warning("canary: %s is back in its band", name)
        for name, departure in found.items():
            self._outside[name] = self._outside.get(name, 0) + 1
            if self._outside[name] == enough:
                logger.warning("canary: %s; look at the gallery", departure.describe())
        return tuple(each for name, each in found.items() if self._outside[name] >= enough)


def _scores(table: RewardTable, names: Sequence[str]) -> dict[str, Float64[Tensor, " P"]]:
    """Mean over each prompt's scored images; NaN if there is none."""
    means = group_means(table.raw.double())[:, 0].masked_fill(~table.is_applicable, torch.nan)
    return {name: means[:, table.names.index(name)] for name in names}


def _means(values: Mapping[str, Float64[Tensor, " P"]]) -> dict[str, float]:
    return {f"canary/{name}": column.nanmean().item() for name, column in values.items()}
