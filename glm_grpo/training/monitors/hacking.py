"""Detect reward hacking with measures that are not trained on (canaries).

The untrained model gives each canary a band: its held-out pictures, and the pictures of the first
step, which it samples on the prompts that are trained on. Several steps in a row outside the band
are reported. Canaries are measures of the pictures (`rewards.audit.canaries`), the entropy of the
sampled tokens, and the terms named in `reward.watch`. Terms that are scored only in evaluations are
judged there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from glm_grpo.errors import StorageError
from glm_grpo.run.folder import RunFolder, write_atomically
from glm_grpo.run.tables import read_bands
from glm_grpo.types import Evaluation, Experience, ImageBatch
from rewards.audit.canaries import (
    SOURCE_COPIES,
    VARIETIES,
    Band,
    Departure,
    PictureMeasures,
    find_departures,
    make_bands,
    measure_groups,
    source_copies,
)
from rewards.types import Prompt, RewardTable

logger = logging.getLogger(__name__)

_ENTROPY = "token_entropy"
_FEWEST_VALUES = 2
"""Fewest values of a canary from which a band is made."""

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
        self._watch = tuple(watch)
        self._evaluated = tuple(evaluated)
        self._margin = margin
        self._bands: dict[str, Band] = {}
        self._outside = outside

    def learn(self, evaluation: Evaluation) -> None:
        """Make the bands from the untrained model's held-out pictures, and store them.

        Those of steps move to the prompts of the first step, see `measure`.

        Canaries that need several pictures per prompt when there is only one, and terms that apply
        to none of the prompts, get no band and are not judged.

        Raises:
            StorageError: The folder cannot be written.
        """
        values = {
            **measure_pictures(evaluation.prompts, evaluation.images),
            _ENTROPY: evaluation.entropy.double(),
            **_scores(evaluation.rewards, self._watch),
            **_scores(evaluation.rewards, self._evaluated),
        }
        measured = {
            name: column
            for name, column in values.items()
            if (~column.isnan()).sum() >= _FEWEST_VALUES
        }
        has_one_image = evaluation.images.pixels.shape[1] == 1
        reasons: dict[str, list[str]] = {}
        for name in sorted(values.keys() - measured.keys()):
            needs = (
                "it compares the images of one prompt, so eval.samples_per_prompt must be 2 or more"
                if name == "pixel_diversity" and has_one_image
                else "each needs at least two held-out prompts to which it applies"
            )
            reasons.setdefault(needs, []).append(name)
        for needs, names in reasons.items():
            logger.warning("canaries not watched in this run: %s (%s)", ", ".join(names), needs)
        self._bands = {
            name: replace(band, is_of_evaluations=name in self._evaluated)
            for name, band in make_bands(measured, varieties=VARIETIES | {_ENTROPY}).items()
        }
        self._outside.clear()
        self._store()

    def _store(self) -> None:
        content = json.dumps({name: asdict(band) for name, band in self._bands.items()}, indent=1)
        write_atomically(self._folder.canaries_path, content.encode())

    def restore(self) -> None:
        """Load the bands of a resumed run.

        Raises:
            StorageError: They cannot be read, are damaged, or belong to other measures.
        """
        path, bands = self._folder.canaries_path, read_bands(self._folder)
        if bands is None:
            raise StorageError(
                f"{path} is missing: it holds what the canaries were on the untrained model; "
                "restore it from a copy, or start a new run without train.resume"
            )
        pictures = (field.name for field in fields(PictureMeasures))
        measured = {*pictures, SOURCE_COPIES, _ENTROPY, *self._watch, *self._evaluated}
        for name in sorted(bands.keys() - measured):
            raise StorageError(
                f"{path} is damaged ({name[:80]!r} is no canary of this run); restore it from a "
                "copy, or start a new run without train.resume"
            )
        self._bands = bands

    def measure(
        self, step: int, experience: Experience, pictures: Mapping[str, Float64[Tensor, " P"]]
    ) -> CanaryReading:
        """Judge a step; warns when a canary leaves its band or returns.

        The first step is sampled from the untrained model, so the bands move to its prompts: those
        that are trained on may differ from the held-out ones, above all after a warm start on them.

        Args:
            step: Training step, from 1.
            experience: Experience of the step.
            pictures: Result of `measure_pictures` for the experience.

        Raises:
            StorageError: The bands cannot be stored.
        """
        values = {
            **pictures,
            _ENTROPY: -experience.rollout.log_probs.double().mean(dim=(1, 2)).cpu(),
            **_scores(experience.rewards, self._watch),
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
        values = _scores(evaluation.rewards, self._evaluated)
        return CanaryReading(_means(values), self._judge(values, is_evaluation=True))

    def _judge(
        self, values: Mapping[str, Float64[Tensor, " P"]], *, is_evaluation: bool
    ) -> tuple[Departure, ...]:
        bands = {
            name: band
            for name, band in self._bands.items()
            if band.is_of_evaluations == is_evaluation
        }
        found = find_departures(bands, {name: values[name] for name in bands}, self._margin)
        enough = EVALUATIONS_IN_A_ROW if is_evaluation else STEPS_IN_A_ROW
        for name in sorted(bands.keys() - {departure.name for departure in found}):
            if self._outside.pop(name, 0) >= enough:
                logger.warning("canary: %s is back in its band", name)
        for departure in found:
            self._outside[departure.name] = self._outside.get(departure.name, 0) + 1
            if self._outside[departure.name] == enough:
                logger.warning("canary: %s; look at the gallery", departure.describe())
        return tuple(each for each in found if self._outside[each.name] >= enough)


def _scores(table: RewardTable, names: Sequence[str]) -> dict[str, Float64[Tensor, " P"]]:
    """Mean over each prompt's pictures; NaN if a term does not apply."""
    columns = {}
    for name in names:
        column = table.names.index(name)
        means = table.raw[..., column].double().mean(dim=1)
        columns[name] = means.masked_fill(~table.is_applicable[:, column], torch.nan)
    return columns


def _means(values: Mapping[str, Float64[Tensor, " P"]]) -> dict[str, float]:
    return {f"canary/{name}": column.nanmean().item() for name, column in values.items()}


def measure_pictures(
    prompts: Sequence[Prompt], images: ImageBatch
) -> dict[str, Float64[Tensor, " P"]]:
    """Compute the picture measures; with source pictures, also the fraction of copies.

    Each prompt's values depend only on its own pictures.
    """
    measures = measure_groups(images.pixels)
    if any(prompt.sources for prompt in prompts):
        measures[SOURCE_COPIES] = source_copies(prompts, images.pixels)
    return measures
