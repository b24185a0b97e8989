"""Runs judged by one yardstick on the held-out evaluations that they stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxtyping import Float32
from torch import Tensor

from glm_grpo.analysis.comparability import (
    check_every_prompt_has_a_total,
    check_same_evaluation,
    check_same_prompts,
    check_yardstick,
    sort_terms,
)
from glm_grpo.analysis.settings import differing_settings
from glm_grpo.analysis.side_by_side import picture_totals, place_side_by_side
from glm_grpo.analysis.stored import EvaluatedRun, StoredEvaluation, read_evaluated_run
from glm_grpo.analysis.trade_offs import find_trade_offs
from glm_grpo.errors import ConfigError
from glm_grpo.report.comparison import ComparedRun, Comparison, Gain
from glm_grpo.storage import RunFolder
from glm_grpo.training.resume import read_config
from glm_grpo.training.statistics import paired_bootstrap

_BOOTSTRAP_SEED = 0


def compare(run_dirs: Sequence[Path], yardstick: Mapping[str, float] | None) -> Comparison:
    """Judge runs by one weighted sum of raw scores, at every evaluation they stored.

    Args:
        run_dirs: At least two runs; the others are held against the first.
        yardstick: Weight by name of the term; None for the weights that the first run was trained
            with.

    Raises:
        ConfigError: The runs cannot be compared: other prompts, seeds, sizes or models, a term of
            the yardstick that was not scored, or was scored in another way.
        CheckpointError: A folder holds no run.
        StorageError: A run has fewer than two evaluations, or a table is damaged.
    """
    runs = _read_runs(run_dirs)
    given = runs[0].config.reward.weights() if yardstick is None else yardstick
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
    differing = differing_settings([run.config for run in runs])
    reference = _prompt_totals(runs[0].evaluations[-1], weights)
    compared = tuple(
        _judge(run, settings, weights, terms, None if run is runs[0] else reference)
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
        side_by_side=place_side_by_side(runs, weights, terms),
    )


def _read_runs(run_dirs: Sequence[Path]) -> list[EvaluatedRun]:
    paths = [path.resolve() for path in run_dirs]
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
    weights: Mapping[str, float],
    terms: Sequence[str],
    reference: Float32[Tensor, " P"] | None,
) -> ComparedRun:
    totals = [_prompt_totals(evaluation, weights) for evaluation in run.evaluations]
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


def _prompt_totals(
    evaluation: StoredEvaluation, weights: Mapping[str, float]
) -> Float32[Tensor, " P"]:
    """The yardstick total of each prompt, mean over its samples."""
    return picture_totals(evaluation, weights).mean(dim=1)
