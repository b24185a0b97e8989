"""Load stored rollouts and evaluations as tensors, grouped by step and prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from glm_grpo.config import Config
from glm_grpo.errors import StorageError
from glm_grpo.output import counted
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.provenance import Provenance, read_provenance
from glm_grpo.run.tables import (
    RAW,
    SOURCES,
    evaluation_steps,
    raw_scores,
    read_evaluation,
    read_table,
    stored_steps,
)
from rewards.types import RewardTable

_IDENTITY = ("step", "prompt_id", "prompt", "sample", "image")


@dataclass(frozen=True)
class StoredGroups:
    """Scored images in stored order: P groups of G images, each from one step and prompt.

    Attributes:
        steps: Step of each group, in ascending order.
        prompts: Caption of each group.
        images: P * G paths relative to the run folder.
        names: Names of the terms, in the order of the R axis.
        raw: Scores as the terms returned them; 0 where a term does not apply, NaN where it refused
            the image.
        is_applicable: True where a term applies to a group's prompt.
    """

    steps: Int64[Tensor, " P"]
    prompt_ids: tuple[str, ...]
    prompts: tuple[str, ...]
    images: tuple[str, ...]
    names: tuple[str, ...]
    raw: Float32[Tensor, "P G R"]
    is_applicable: Bool[Tensor, "P R"]

    def weigh(self, weights: Mapping[str, float], std_floors: Mapping[str, float]) -> RewardTable:
        """Combine the scores of some terms with weights.

        Args:
            weights: Weight by term name; the names select the terms and give the order of the R
                axis.
            std_floors: For the same names, see `RewardTable`.
        """
        columns = [self.names.index(name) for name in weights]
        floors = [std_floors[name] for name in weights]
        return RewardTable(
            names=tuple(weights),
            raw=self.raw[:, :, columns].contiguous(),
            is_applicable=self.is_applicable[:, columns].contiguous(),
            weights=torch.tensor(list(weights.values()), dtype=torch.float32),
            std_floors=torch.tensor(floors, dtype=torch.float32),
        )


@dataclass(frozen=True)
class StoredRollouts:
    """All rollouts of a run.

    Attributes:
        groups: Images and raw scores.
        penalty: KL to the reference that was subtracted from the reward, in reward units.
        totals: Weighted rewards before the penalty; NaN for images left out of their group.
        advantages: Advantages of images, which the policy was trained on with credit by image.
    """

    groups: StoredGroups
    penalty: Float32[Tensor, "P G"]
    totals: Float32[Tensor, "P G"]
    advantages: Float32[Tensor, "P G"]


@dataclass(frozen=True)
class StoredEvaluation:
    """One evaluation of the held-out prompts.

    Attributes:
        groups: Images and raw scores, one group per prompt.
        texts: The texts that each prompt asks for.
        targets: Path of each prompt's target image relative to the run folder, or None.
        sources: Paths of each prompt's source images; empty for text-to-image.
    """

    step: int
    groups: StoredGroups
    texts: tuple[tuple[str, ...], ...]
    targets: tuple[str | None, ...]
    sources: tuple[tuple[str, ...], ...]

    def applies(self, name: str) -> Bool[Tensor, " P"]:
        """Prompts to which a term applies."""
        return self.groups.is_applicable[:, self.groups.names.index(name)]

    def term_means(self, names: Sequence[str]) -> dict[str, float]:
        """Mean raw score of each term over the images that it scored."""
        raw = self.groups.raw
        return {
            name: raw[self.applies(name), :, self.groups.names.index(name)].nanmean().item()
            for name in names
        }


@dataclass(frozen=True)
class EvaluatedRun:
    """One run with all its stored evaluations.

    Attributes:
        name: Shortest end of its path that is unique among the runs.
        evaluations: Evaluations in the order of their steps, at least two.
        provenance: What it began with; None for a run that did not store it.
    """

    folder: RunFolder
    name: str
    config: Config
    evaluations: tuple[StoredEvaluation, ...]
    provenance: Provenance | None = None


def read_rollouts(folder: RunFolder, names: Sequence[str], *, group_size: int) -> StoredRollouts:
    """Read all rollouts of a run, without tokens and log-probabilities.

    Args:
        names: Terms that the run scored, in the order of the R axis.
    """
    steps = stored_steps(folder.rollouts_dir)
    if not steps:
        raise StorageError(
            f"{folder.path} contains no rollout (rollouts/step-*.parquet); wait for the first "
            "step, or give the folder of another run (train.method=sft samples nothing)"
        )
    columns = (*_IDENTITY, *_raw_columns(names), "penalty", "total", "advantage")
    table = pyarrow.concat_tables(
        [read_table(folder.rollout_path(step), columns) for step in steps]
    )
    groups = _group(table, names, group_size=group_size)
    return StoredRollouts(
        groups=groups,
        penalty=_floats(table, "penalty").reshape(-1, group_size),
        totals=_floats(table, "total").reshape(-1, group_size),
        advantages=_floats(table, "advantage").reshape(-1, group_size),
    )


def read_evaluated_run(folder: RunFolder, config: Config, *, name: str) -> EvaluatedRun:
    """Read all evaluations of a run."""
    steps = evaluation_steps(folder)
    if len(steps) < 2:
        raise StorageError(
            f"{folder.path} contains {counted(len(steps), 'evaluation')} of the held-out prompts; "
            "a comparison needs one before and one after training: let the run continue, or leave "
            "it out"
        )
    names, samples = tuple(config.reward.terms), config.eval.samples_per_prompt
    evaluations = tuple(_read_evaluation(folder, step, names, samples) for step in steps)
    return EvaluatedRun(folder, name, config, evaluations, read_provenance(folder))


def _read_evaluation(
    folder: RunFolder, step: int, names: Sequence[str], samples: int
) -> StoredEvaluation:
    columns = (*_IDENTITY, *_raw_columns(names), "texts", "target", SOURCES)
    table = read_evaluation(folder, step, columns)
    groups = _group(table, names, group_size=samples)
    firsts = table.take(list(range(0, table.num_rows, samples)))
    return StoredEvaluation(
        step=step,
        groups=groups,
        texts=tuple(tuple(texts) for texts in firsts["texts"].to_pylist()),
        targets=tuple(firsts["target"].to_pylist()),
        sources=tuple(map(tuple, firsts[SOURCES].to_pylist()))
        if SOURCES in firsts.column_names
        else ((),) * firsts.num_rows,
    )


def _raw_columns(names: Sequence[str]) -> list[str]:
    return [f"{RAW}{name}" for name in names]


def _group(table: pyarrow.Table, names: Sequence[str], *, group_size: int) -> StoredGroups:
    steps = table["step"].to_numpy().astype(np.int64)
    raw, applies = raw_scores(table, names)
    firsts = table.select(["prompt_id", "prompt"]).take(list(range(0, len(steps), group_size)))
    return StoredGroups(
        steps=torch.from_numpy(steps[::group_size].copy()),
        prompt_ids=tuple(firsts["prompt_id"].to_pylist()),
        prompts=tuple(firsts["prompt"].to_pylist()),
        images=tuple(table["image"].to_pylist()),
        names=tuple(names),
        raw=raw.reshape(-1, group_size, len(names)),
        is_applicable=applies[::group_size].clone(),
    )


def _floats(table: pyarrow.Table, name: str) -> Float32[Tensor, " rows"]:
    # Copied, because arrow's arrays are read-only and torch warns about them.
    return torch.from_numpy(table[name].to_numpy().copy())
