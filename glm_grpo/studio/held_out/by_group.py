"""Compute mean@1 and best@k of stored evaluations, by group of prompts, with intervals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.summaries import Float64Array, image_scores, mean_of_groups
from glm_grpo.run.tables import METADATA, evaluation_steps, read_evaluation
from rewards.exact import EXACT

TAG = "tag"
"""Column of the prompts by which scores are grouped if no other one is named."""
ALL = "all"
"""Group of all prompts."""
MEAN = "mean of groups"

_SHOWN = {"total", *EXACT, *(exact.name for exact in EXACT.values())}
"""Scores that are shown: shares of right images, the terms that they come from, and the total."""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, or a difference of two.

    Attributes:
        low: Lower end of its 95 % interval; NaN where prompts are too few, as `high`.
    """

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class MeanAndBest:
    """What one image of a prompt scores, and the best of k.

    Attributes:
        mean: mean@1, estimated by the mean over the k images.
        best: best@k. Of a share of right images: the share of prompts with at least one.
    """

    mean: Estimate
    best: Estimate


@dataclass(frozen=True)
class GroupScore:
    """One score on one group of prompts.

    Attributes:
        group: Value of the column; or `ALL`, or `MEAN`, the mean over the groups.
        score: Name of the term, of its share of right images, or `total`.
        prompts: Number of prompts that have this score in both evaluations.
        before: The first evaluation, of the base model.
        after: The last one; None if there is only one, as `change` and `over_best`.
        change: `after` less `before`, paired by prompt.
        over_best: mean@1 after training less best@k before it: above 0, training beats choosing.
    """

    group: str
    score: str
    prompts: int
    before: MeanAndBest
    after: MeanAndBest | None = None
    change: MeanAndBest | None = None
    over_best: Estimate | None = None


@dataclass(frozen=True)
class GroupedScores:
    """Scores of one evaluation, or of the first and the last one, by group of prompts.

    Attributes:
        column: Column of the groups; None: there is one group, `ALL`.
        samples: k, images per prompt.
        steps: Policy steps of the evaluations.
        scores: Groups in the order of the prompts, then `MEAN` and `ALL`, for each score.
    """

    column: str | None
    samples: int
    steps: tuple[int, ...]
    scores: tuple[GroupScore, ...]

    @property
    def is_telling(self) -> bool:
        """Whether there is more to see than in means over all prompts."""
        return self.samples > 1 or self.column is not None


def group_scores(
    folder: RunFolder, group_by: str | None, last_step: int | None = None
) -> GroupedScores | None:
    """Compute scores by group from stored evaluations.

    Args:
        group_by: Column of the prompts, `eval.group_by`; None: `tag`, if rows have one.
        last_step: The last evaluation up to this step; None: the last one.

    Returns:
        The scores; None if there is no evaluation.
    """
    steps = [each for each in evaluation_steps(folder) if last_step is None or each <= last_step]
    if not steps:
        return None
    steps = [steps[0], *steps[1:][-1:]]
    ends = [image_scores(folder, step) for step in steps]
    column = group_by or TAG
    groups = _groups(folder, steps[-1], column)
    has_groups = groups.nunique() > 1
    if not has_groups:
        groups = pandas.Series(ALL, groups.index)
    names = [name for name in ends[-1].columns if name in _SHOWN]
    # The total of a single term of weight 1 would repeat it.
    if any(ends[-1]["total"].equals(ends[-1][name]) for name in names if name != "total"):
        names.remove("total")
    scores = [
        score for name in names for score in _score(name, [each[name] for each in ends], groups)
    ]
    samples = int(ends[-1].groupby("prompt_id").size().max())
    return GroupedScores(column if has_groups else None, samples, tuple(steps), tuple(scores))


def _groups(folder: RunFolder, step: int, column: str) -> pandas.Series[str]:
    """Group of each prompt, by id."""
    frame = read_evaluation(folder, step, ("prompt_id", METADATA)).to_pandas()
    rows = frame.drop_duplicates("prompt_id").set_index("prompt_id")
    metadata = rows.get(METADATA, pandas.Series("{}", rows.index))
    return metadata.map(lambda row: _group_of(json.loads(row), column))


def _group_of(metadata: Mapping[str, object], column: str) -> str:
    """Name of a prompt's group: the value in a column of its row."""
    value = metadata.get(column)
    if value is None:
        return f"no {column}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _score(
    name: str, ends: list[pandas.Series[float]], groups: pandas.Series[str]
) -> list[GroupScore]:
    """One score on all groups."""
    # A row per prompt, and for each evaluation the mean and the best of its images.
    figures = pandas.concat(
        [how for each in ends for how in (_by_prompt(each).mean(), _by_prompt(each).max())],
        axis=1,
        join="inner",
    ).dropna()
    own = groups.reindex(figures.index)
    parts = {group: [_columns(figures[own == group])] for group in own.unique()}
    if len(parts) > 1:
        parts |= {MEAN: [part for (part,) in parts.values()], ALL: [_columns(figures)]}
    return [_estimate(group, name, part) for group, part in parts.items()]


def _by_prompt(scores: pandas.Series[float]) -> pandas.api.typing.SeriesGroupBy:
    return scores.groupby("prompt_id", sort=False)


def _columns(figures: pandas.DataFrame) -> Float64Array:
    """Rows of figures and differences to be estimated, a column per prompt."""
    values: Float64Array = figures.to_numpy(np.float64).T
    if len(values) == 2:
        return values
    before, after = values[:2], values[2:]
    return np.concatenate([before, after, after - before, after[:1] - before[1:]])


def _estimate(group: str, score: str, parts: list[Float64Array]) -> GroupScore:
    found = [Estimate(*map(float, each)) for each in zip(*mean_of_groups(parts), strict=True)]
    prompts = sum(part.shape[1] for part in parts)
    before = MeanAndBest(*found[:2])
    if len(found) == 2:
        return GroupScore(group, score, prompts, before)
    after, change = MeanAndBest(*found[2:4]), MeanAndBest(*found[4:6])
    return GroupScore(group, score, prompts, before, after, change, found[6])
