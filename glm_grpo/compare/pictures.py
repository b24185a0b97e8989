"""The pictures that runs made of the same held-out prompts with the same seeds, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Float32
from torch import Tensor

from glm_grpo.compare.comparison import ComparedPicture, ComparedPrompt
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.stored import EvaluatedRun, StoredEvaluation
from rewards.reweigh import Mode, combine


@dataclass(frozen=True)
class Yardstick:
    """What all runs are judged by.

    Attributes:
        weights: By term, none of them 0; at least one term applies to each prompt.
        std_floors: For the same terms, see `RewardTable`; `weighted_sum` reads none.
        combine: How the weighed terms are combined.
        untrained: The evaluation whose spread is the unit under `normalize_then_sum`.
    """

    weights: Mapping[str, float]
    std_floors: Mapping[str, float]
    combine: Mode
    untrained: StoredEvaluation

    def totals(self, evaluation: StoredEvaluation) -> Float32[Tensor, "P G"]:
        """The total of each picture."""
        table, untrained = (
            each.groups.weigh(self.weights, self.std_floors)
            for each in (evaluation, self.untrained)
        )
        return combine(table, mode=self.combine, untrained=untrained)


def place_side_by_side(
    runs: Sequence[EvaluatedRun], yardstick: Yardstick, terms: Sequence[str]
) -> tuple[ComparedPrompt, ...]:
    """Each held-out prompt with the pictures of the untrained model and of every run.

    Args:
        runs: Of the same prompts in the same order, sampled with the same seeds; the untrained
            model's pictures are those of the first.
        yardstick: Of the totals.
        terms: Whose scores are given.

    Returns:
        In stored order.
    """
    first = runs[0].evaluations[0]
    ends = [run.evaluations[-1] for run in runs]
    folders = [runs[0].folder, *(run.folder for run in runs)]
    columns = [
        _pictures(evaluation, folder, yardstick, terms)
        for evaluation, folder in zip((first, *ends), folders, strict=True)
    ]
    groups, (rows, samples) = first.groups, first.groups.raw.shape[:2]
    return tuple(
        ComparedPrompt(
            prompt_id=groups.prompt_ids[row],
            prompt=groups.prompts[row],
            texts=first.texts[row],
            target=None
            if (target := first.targets[row]) is None
            else runs[0].folder.picture(target),
            samples=tuple(
                tuple(column[row * samples + sample] for column in columns)
                for sample in range(samples)
            ),
        )
        for row in range(rows)
    )


def _pictures(
    evaluation: StoredEvaluation,
    folder: RunFolder,
    yardstick: Yardstick,
    terms: Sequence[str],
) -> list[ComparedPicture]:
    """All pictures of an evaluation, in stored order."""
    groups = evaluation.groups
    totals = yardstick.totals(evaluation).flatten().tolist()
    samples = groups.raw.shape[1]
    scores = {name: groups.raw[:, :, groups.names.index(name)].flatten().tolist() for name in terms}
    applies = {name: evaluation.applies(name).tolist() for name in terms}
    return [
        ComparedPicture(
            path=folder.picture(image),
            total=total,
            scores={
                name: scores[name][index] if applies[name][index // samples] else None
                for name in terms
            },
        )
        for index, (image, total) in enumerate(zip(groups.images, totals, strict=True))
    ]
