"""Runs judged by one yardstick on the held-out evaluations that they stored."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxtyping import Float32
from torch import Tensor

from glm_grpo.compare.comparability import (
    check_every_prompt_has_a_total,
    check_same_evaluation,
    check_same_prompts,
    check_yardstick,
    sort_terms,
)
from glm_grpo.compare.comparison import ComparedRun, Comparison, Gain
from glm_grpo.compare.pictures import Yardstick, place_side_by_side
from glm_grpo.compare.settings import differing_settings
from glm_grpo.compare.trade_offs import find_trade_offs
from glm_grpo.errors import CheckpointError, ConfigError
from glm_grpo.run.config import read_config
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.stored import EvaluatedRun, StoredEvaluation, read_evaluated_run
from glm_grpo.training.recording.statistics import paired_bootstrap

_BOOTSTRAP_SEED = 0
_SWEEP_FILE = "multirun.yaml"
"""Hydra's, beside the runs of a sweep."""


def compare(run_dirs: Sequence[Path], yardstick: Mapping[str, float] | None) -> Comparison:
    """Judge runs by one total, at every evaluation they stored.

    Args:
        run_dirs: At least two runs; the others are held against the first. The folder of a sweep
            stands for its runs, and its multirun.yaml, which a shell's star names too, for nothing.
        yardstick: Weight by name of the term, of a weighted sum of raw scores; None for the reward
            that the first run was trained with, under `normalize_then_sum` in units of the spread
            of its first evaluation.

    Raises:
        ConfigError: The runs cannot be compared: other prompts, seeds, sizes or models, a term of
            the yardstick that was not scored, or was scored in another way.
        CheckpointError: A folder holds no run.
        StorageError: A run has fewer than two evaluations, or a table is damaged.
    """
    runs = _read_runs(run_dirs)
    reward = runs[0].config.reward
    given = reward.weights() if yardstick is None else yardstick
    weights = {name: weight for name, weight in given.items() if weight != 0}
    comparable, left_out = sort_terms(runs)
    check_yardstick(runs, weights, comparable)
    first = runs[0].evaluations[0]
    for run in runs:
        check_same_prompts(runs[0], run, comparable)
    check_every_prompt_has_a_total(first, weights)
    # Those of the yardstick first; one that applies to no held-out prompt has no mean.
    names = [name for name in (*weights, *comparable) if first.applies(name).any()]
    terms = tuple(dict.fromkeys(names))
    untrained = first.term_means(terms)
    judge = Yardstick(
        weights,
        {name: reward.terms[name].std_floor for name in weights},
        reward.combine if yardstick is None else "weighted_sum",
        first,
    )
    differing = differing_settings([run.config for run in runs])
    reference = _prompt_totals(runs[0].evaluations[-1], judge)
    compared = tuple(
        _judge(run, settings, judge, terms, None if run is runs[0] else reference)
        for run, settings in zip(runs, differing, strict=True)
    )
    return Comparison(
        yardstick=weights,
        prompts=len(first.groups.prompt_ids),
        samples_per_prompt=runs[0].config.eval.samples_per_prompt,
        runs=compared,
        untrained=untrained,
        trade_offs=find_trade_offs(compared, untrained, weights),
        left_out=left_out,
        side_by_side=place_side_by_side(runs, judge, terms),
        combine=judge.combine,
    )


def _read_runs(run_dirs: Sequence[Path]) -> list[EvaluatedRun]:
    paths = [path.resolve() for each in run_dirs for path in _runs_at(each)]
    if len(paths) < 2 or len(set(paths)) < len(paths):
        raise ConfigError(
            f"runs {', '.join(map(str, run_dirs)) or '(none)'}: a comparison needs at least two, "
            "each named once"
        )
    folders = [RunFolder(path) for path in paths]
    names = _short_names(paths)
    configs = [read_config(folder) for folder in folders]
    check_same_evaluation(names, configs)
    return [
        read_evaluated_run(folder, config, name=name)
        for folder, name, config in zip(folders, names, configs, strict=True)
    ]


def _runs_at(path: Path) -> list[Path]:
    """The runs of a sweep, the first one first; of any other path, itself."""
    if path.name == _SWEEP_FILE and path.is_file():
        return []
    if not (path / _SWEEP_FILE).is_file():
        return [path]
    runs = [config.parent for config in path.glob("*/config.yaml")]
    if not runs:
        raise CheckpointError(f"{path} is the folder of a sweep of which no run is there")
    return sorted(runs, key=_natural_order)


def _natural_order(path: Path) -> list[int | str]:
    """9 before 10."""
    parts = re.split(r"(\d+)", path.name)
    return [int(part) if part.isdecimal() else part for part in parts]


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    length = 1
    while True:
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
        length += 1


def _judge(
    run: EvaluatedRun,
    settings: Mapping[str, str],
    yardstick: Yardstick,
    terms: Sequence[str],
    reference: Float32[Tensor, " P"] | None,
) -> ComparedRun:
    totals = [_prompt_totals(evaluation, yardstick) for evaluation in run.evaluations]
    return ComparedRun(
        name=run.name,
        settings=settings,
        steps=tuple(evaluation.step for evaluation in run.evaluations),
        totals=tuple(values.mean().item() for values in totals),
        gain=_gain(totals[0], totals[-1]),
        over_first=None if reference is None else _gain(reference, totals[-1]),
        terms=run.evaluations[-1].term_means(terms),
    )


def _gain(before: Float32[Tensor, " P"], after: Float32[Tensor, " P"]) -> Gain:
    interval = paired_bootstrap(before, after, seed=_BOOTSTRAP_SEED)
    return Gain(interval.mean_difference, interval.low, interval.high)


def _prompt_totals(evaluation: StoredEvaluation, yardstick: Yardstick) -> Float32[Tensor, " P"]:
    """The yardstick total of each prompt, mean over its samples."""
    return yardstick.totals(evaluation).mean(dim=1)
