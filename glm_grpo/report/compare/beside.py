"""Find what a gallery can show of other runs: the same prompts, drawn with the same seeds."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glm_grpo.config import Config
from glm_grpo.errors import ConfigError, StorageError
from glm_grpo.gallery.beside import OtherRun, ShownRun
from glm_grpo.gallery.data import EVALUATION_COLUMNS, Group, list_readers, read_groups
from glm_grpo.report.compare.comparison import (
    SAME_PICTURES,
    check_same_evaluation,
    short_names,
    sort_terms,
)
from glm_grpo.run.config import read_config
from glm_grpo.run.folder import RunFolder, read_picture
from glm_grpo.run.origin import read_origin
from glm_grpo.run.tables import Weighing, evaluation_steps, read_untrained, read_weighing
from rewards.reweigh import combine
from rewards.types import RewardError, RewardTable

_SAME_PROMPT = ("prompt", "texts", "decode_seed")


@dataclass(frozen=True)
class _Newest:
    """The newest evaluation of a run."""

    folder: RunFolder
    config: Config
    step: int
    groups: tuple[Group, ...]

    @property
    def path(self) -> Path:
        return self.folder.evaluation_path(self.step)


def match_runs(run: Path, others: Sequence[Path]) -> tuple[OtherRun, ...]:
    """Match the newest evaluations of other runs with that of a run, prompt by prompt.

    Args:
        run: The folder whose gallery it is.
        others: Folders of other runs, each once.

    Returns:
        One for each of `others`, with the prompts that `run` evaluated too: of the same id, prompt,
        texts, noise seed, target and source pictures. Totals are weighted as those of `run` where
        both scored the terms in the same way, else they are as the other run stored them.

    Raises:
        ConfigError: A run is named twice, or is `run` itself; seed or size of the pictures differ;
            or no prompt is the same.
        CheckpointError: A folder holds no run.
        StorageError: A run has no evaluation, or its newest is damaged.
    """
    paths = [path.resolve() for path in (run, *others)]
    for place, path in enumerate(paths):
        if path in paths[:place]:
            what = "the run itself" if path == paths[0] else "named twice"
            raise ConfigError(
                f"--beside {others[place - 1]} is {what}: only other runs can be shown beside "
                f"{run}, each named once; leave it out"
            )
    folders = [RunFolder(path) for path in paths]
    names = short_names(paths)
    configs = [read_config(folder) for folder in folders]
    check_same_evaluation(names, configs, SAME_PICTURES)
    own, *found = (
        _read_newest(folder, config) for folder, config in zip(folders, configs, strict=True)
    )
    shown = _titles(names, configs)[1:]
    return tuple(_match(own, other, name) for other, name in zip(found, shown, strict=True))


def _titles(names: Sequence[str], configs: Sequence[Config]) -> list[str]:
    """The `run.name` of each run; where it has none, or another has the same, its folder."""
    titles = [config.run.name for config in configs]
    return [
        name if title is None or titles.count(title) > 1 else title
        for name, title in zip(names, titles, strict=True)
    ]


def _read_newest(folder: RunFolder, config: Config) -> _Newest:
    steps = evaluation_steps(folder)
    if not steps:
        raise StorageError(
            f"{folder.path} has no evaluation of held-out prompts yet; wait for its first one, or "
            "leave it out"
        )
    groups = read_groups(
        folder.evaluation_path(steps[-1]),
        EVALUATION_COLUMNS,
        list_readers(config),
    )
    return _Newest(folder, config, steps[-1], groups)


def _match(own: _Newest, other: _Newest, name: str) -> OtherRun:
    by_id = {group["prompt_id"]: group for group in other.groups}
    pairs = [
        (group, by_id[group["prompt_id"]])
        for group in own.groups
        if group["prompt_id"] in by_id
        and _is_same_prompt(group, by_id[group["prompt_id"]], own.folder, other.folder)
    ]
    if not pairs:
        raise ConfigError(
            f"{other.path} has none of the {len(own.groups)} held-out prompts of {own.path}: only "
            "prompts with the same id, prompt, texts, noise seed and images are shown side by "
            "side; leave it out, or show runs with the same data.eval_path"
        )
    matched = tuple(
        theirs | {key: ours[key] for key in ("target", "sources") if key in ours}
        for ours, theirs in pairs
    )
    origins = [read_origin(run.folder) for run in (own, other)]
    alike, _ = sort_terms([own.config, other.config], origins)
    weighing = read_weighing(own.path)
    is_weighed_alike = _is_weighed_alike(pairs, weighing, alike)
    if is_weighed_alike:
        matched = _weigh(matched, weighing, own.folder)
    return OtherRun(
        folder=other.folder,
        groups=matched,
        shown=ShownRun(
            name=name,
            step=other.step,
            alike=alike,
            is_weighed_alike=is_weighed_alike,
            problem=_describe_missing(len(pairs), len(own.groups)),
        ),
    )


def _describe_missing(matched: int, prompts: int) -> str | None:
    if matched == prompts:
        return None
    return (
        f"{matched} of {prompts} held-out prompts are the same there (id, prompt, texts, noise "
        "seed and images), so the others have no image there; to see all, show a run with the "
        "same data.eval_path."
    )


def _is_same_prompt(ours: Group, theirs: Group, own: RunFolder, other: RunFolder) -> bool:
    if any(ours[key] != theirs[key] for key in _SAME_PROMPT):
        return False
    pictures, others = _given(ours), _given(theirs)
    return len(pictures) == len(others) and all(
        _is_same_picture(picture, against, own, other)
        for picture, against in zip(pictures, others, strict=True)
    )


def _given(group: Group) -> list[str | None]:
    """The pictures that a prompt came with: target and sources."""
    return [group["target"], *group.get("sources", ())]


def _is_same_picture(
    ours: str | None, theirs: str | None, own: RunFolder, other: RunFolder
) -> bool:
    """As far as both runs still have it."""
    if ours is None or theirs is None:
        return ours is theirs
    paths = own.picture(f"images/{ours}"), other.picture(f"images/{theirs}")
    if not all(map(os.path.isfile, paths)) or filecmp.cmp(*paths, shallow=False):
        return True
    first, second = (np.asarray(read_picture(path)) for path in paths)
    return np.array_equal(first, second)


def _is_weighed_alike(
    pairs: Iterable[tuple[Group, Group]], weighing: Weighing, alike: Sequence[str]
) -> bool:
    """Whether scores of other pictures can be weighted as those of the run itself."""
    weighted = [name for name, weight in weighing.weights.items() if weight != 0]
    return all(name in alike for name in weighted) and all(
        (ours["raw"].get(name) is None) == (theirs["raw"].get(name) is None)
        for ours, theirs in pairs
        for name in weighted
    )


def _weigh(
    groups: Iterable[dict[str, Any]], weighing: Weighing, folder: RunFolder
) -> tuple[dict[str, Any], ...]:
    """Groups with the totals that the run of a folder would have given them.

    Raises:
        StorageError: The run lost the evaluation that its totals are measured by, or they are
            beyond float32.
    """
    untrained = None if weighing.combine == "weighted_sum" else read_untrained(folder)
    weighted = []
    for group in groups:
        try:
            totals = combine(_table(group, weighing), mode=weighing.combine, untrained=untrained)
        except (RewardError, ValueError) as error:
            raise StorageError(
                f"prompt {group['prompt_id']} has no total under the weights of {folder.path} "
                f"({error}); leave its run out"
            ) from error
        weighted.append(group | {"total": [float(str(total)) for total in totals[0].numpy()]})
    return tuple(weighted)


def _table(group: Group, weighing: Weighing) -> RewardTable:
    """The scores of one group by the terms of a run; one that it lacks does not apply."""
    names = tuple(weighing.weights)
    columns = [group["raw"].get(name) for name in names]
    size = len(group["images"])
    raw = [[0.0] * size if column is None else column for column in columns]
    return RewardTable(
        names=names,
        raw=torch.tensor(raw, dtype=torch.float32).T[None].contiguous(),
        is_applicable=torch.tensor([[column is not None for column in columns]]),
        weights=torch.tensor([weighing.weights[name] for name in names], dtype=torch.float32),
        std_floors=torch.tensor([weighing.std_floors[name] for name in names], dtype=torch.float32),
    )
