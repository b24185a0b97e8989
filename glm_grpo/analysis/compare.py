"""Runs judged by one yardstick on the held-out evaluations that they stored."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64
from PIL import Image
from torch import Tensor

from glm_grpo.analysis.stored import EvaluatedRun, StoredEvaluation, read_evaluated_run
from glm_grpo.config import Config
from glm_grpo.config.problems import NOT_GIVEN
from glm_grpo.errors import ConfigError
from glm_grpo.report.compare_page import ComparedRun, Comparison, Gain, TradeOff
from glm_grpo.storage import RunFolder, storage_errors
from glm_grpo.training.resume import read_config
from glm_grpo.training.statistics import paired_bootstrap
from rewards.reweigh import combine

_BOOTSTRAP_SEED = 0
_MOST_TRADE_OFFS = 6
"""Pairs of terms that are drawn: all of up to four terms."""
_SAME_EVALUATION = (
    "model.path",
    "eval.seed",
    "eval.samples_per_prompt",
    "rollout.height",
    "rollout.width",
)
"""Keys that must agree: with others, prompts, noise or sizes of the pictures differ."""
_NO_DIFFERENCE = frozenset({"run_dir", "train.resume"})
"""Keys that say where a run lies, not what it is."""
_NOT_OF_THE_SCORE = frozenset(
    {
        *("weight", "std_floor", "timeout_seconds", "run_in", "threads", "url"),
        *("retries", "requests_at_once", "request_timeout_seconds", "api_key_variable"),
    }
)
"""Options of a term that leave its raw scores as they are."""


def parse_weights(words: Sequence[str], *, option: str) -> dict[str, float]:
    """Read `TERM=NUMBER` words of a command line.

    Args:
        words: As given behind the option.
        option: Such as `--yardstick`, for the error.

    Raises:
        ConfigError: A word is of another form, names a term twice, or is no finite number.
    """
    weights: dict[str, float] = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not name or name in weights or not math.isfinite(weight):
            raise ConfigError(
                f"{option} {word!r}: must be the name of a term, = and a finite number, each term "
                f"once; write {option} lpips=0.4 ocr=0.6, say"
            )
        weights[name] = weight
    return weights


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
    comparable, left_out = _sort_terms(runs)
    _check_yardstick(runs, weights, comparable)
    first = runs[0].evaluations[0]
    for run in runs:
        _check_same_prompts(runs[0], run, comparable)
    _check_every_prompt_has_a_total(first, weights)
    # Those of the yardstick first; one that applies to no held-out prompt has no mean.
    names = [name for name in (*weights, *comparable) if first.applies(name).any()]
    terms = tuple(dict.fromkeys(names))
    untrained = first.term_means(terms)
    differing = _differing_settings([run.config for run in runs])
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
        trade_offs=_find_trade_offs(compared, untrained, weights),
        left_out=left_out,
    )


def pareto_optimal(points: Float64[Tensor, "N D"]) -> Bool[Tensor, " N"]:
    """Which points no other point is at least as high as in all, and higher than in one."""
    others, own = points[None, :, :], points[:, None, :]
    is_beaten = (others >= own).all(dim=-1) & (others > own).any(dim=-1)
    return ~is_beaten.any(dim=1)


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
    _check_same_evaluation(names, configs)
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


def _check_same_evaluation(names: Sequence[str], configs: Sequence[Config]) -> None:
    for key in _SAME_EVALUATION:
        values = [_leaves(config)[key] for config in configs]
        if len(set(values)) > 1:
            listed = ", ".join(
                f"{value} in {name}" for value, name in zip(values, names, strict=True)
            )
            raise ConfigError(
                f"{key} is {listed}: only runs whose held-out pictures were made in the same way "
                "can be compared; leave some out, or train them again with one value"
            )


def _check_same_prompts(first: EvaluatedRun, run: EvaluatedRun, comparable: Sequence[str]) -> None:
    expected = first.evaluations[0]
    for evaluation in run.evaluations:
        path = run.folder.evaluation_path(evaluation.step)
        if _identities(evaluation) != _identities(expected):
            raise ConfigError(
                f"{path} holds other held-out prompts (id, prompt or texts, in their order) than "
                f"the first evaluation of {first.name}; compare runs with the same data.eval_path"
            )
        for name in comparable:
            if not torch.equal(evaluation.applies(name), expected.applies(name)):
                raise ConfigError(
                    f"{path}: {name} was scored for other prompts than in {first.name}, so some "
                    "have no target there; compare runs with the same data.eval_path"
                )
    _check_same_targets(first, run)


def _check_same_targets(first: EvaluatedRun, run: EvaluatedRun) -> None:
    """Compare target pictures as far as both runs still have them."""
    pairs = zip(run.evaluations[0].targets, first.evaluations[0].targets, strict=True)
    for target, other in pairs:
        if target is None or other is None:
            continue
        ours, theirs = run.folder.path / target, first.folder.path / other
        if not (ours.is_file() and theirs.is_file()):
            continue
        with storage_errors("read", ours):
            is_same = np.array_equal(np.asarray(Image.open(ours)), np.asarray(Image.open(theirs)))
        if not is_same:
            raise ConfigError(
                f"{ours} is another target picture than {theirs}; compare runs with the same "
                "data.eval_path"
            )


def _identities(evaluation: StoredEvaluation) -> list[tuple[str, str, tuple[str, ...]]]:
    groups = evaluation.groups
    return list(zip(groups.prompt_ids, groups.prompts, evaluation.texts, strict=True))


def _sort_terms(runs: Sequence[EvaluatedRun]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Terms that every run scored in the same way, and all others."""
    scorings = [{name: _scoring(run, name) for name in run.config.reward.terms} for run in runs]
    names = dict.fromkeys(name for scoring in scorings for name in scoring)
    comparable = tuple(
        name
        for name in names
        if all(name in scoring and scoring[name] == scorings[0].get(name) for scoring in scorings)
    )
    return comparable, tuple(name for name in names if name not in comparable)


def _scoring(run: EvaluatedRun, name: str) -> dict[str, Any]:
    options = run.config.reward.terms[name].model_dump()
    return {key: value for key, value in options.items() if key not in _NOT_OF_THE_SCORE}


def _check_yardstick(
    runs: Sequence[EvaluatedRun], weights: Mapping[str, float], comparable: Sequence[str]
) -> None:
    if not weights:
        raise ConfigError(
            "the yardstick has no weight other than 0, so every run has total 0; give a term one, "
            "such as --yardstick ocr=1"
        )
    for name in weights:
        for run in runs:
            if name not in run.config.reward.terms:
                raise ConfigError(
                    f"yardstick term {name!r}: {run.name} did not score it (it scored "
                    f"{', '.join(run.config.reward.terms)}); judge by terms that all runs scored "
                    f"({', '.join(comparable) or 'there is none'}), such as --yardstick "
                    f"{comparable[0] if comparable else 'ocr'}=1, or score it with weight 0 when "
                    "training"
                )
        if name not in comparable:
            raise ConfigError(
                f"yardstick term {name!r} was scored in different ways: "
                f"{_list_options(runs, name)}, so its scores are no common measure; judge by "
                f"terms that all runs scored alike ({', '.join(comparable) or 'there is none'})"
            )


def _list_options(runs: Sequence[EvaluatedRun], name: str) -> str:
    """The options of a term in which runs differ, with the value of each run."""
    scorings = [_scoring(run, name) for run in runs]
    keys = dict.fromkeys(key for scoring in scorings for key in scoring)
    differing = [key for key in keys if any(s.get(key) != scorings[0].get(key) for s in scorings)]
    return "; ".join(
        f"{key} {scoring.get(key)!r} in {run.name}"
        for key in differing
        for run, scoring in zip(runs, scorings, strict=True)
    )


def _check_every_prompt_has_a_total(
    evaluation: StoredEvaluation, weights: Mapping[str, float]
) -> None:
    has_total = torch.stack([evaluation.applies(name) for name in weights]).any(dim=0)
    for row in (~has_total).nonzero().flatten()[:1].tolist():
        raise ConfigError(
            f"yardstick {', '.join(weights)}: none of its terms applies to held-out prompt "
            f"{evaluation.groups.prompt_ids[row]}; add a term that applies to every prompt"
        )


def _differing_settings(configs: Sequence[Config]) -> list[dict[str, str]]:
    """For each config the keys, with values, in which not all of them agree."""
    flat = [_leaves(config) for config in configs]
    keys = dict.fromkeys(key for leaves in flat for key in leaves)
    differing = [
        key
        for key in keys
        if key not in _NO_DIFFERENCE and len({leaves.get(key, NOT_GIVEN) for leaves in flat}) > 1
    ]
    return [{key: leaves.get(key, NOT_GIVEN) for key in differing} for leaves in flat]


def _leaves(config: Config) -> dict[str, str]:
    """All values of a config as JSON, by dotted key."""
    return dict(_walk(config.model_dump(mode="json")))


def _walk(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _walk(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value, ensure_ascii=False)


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
    # A weighted sum reads no floor.
    table = evaluation.groups.weigh(weights, dict.fromkeys(weights, 1.0))
    return combine(table, mode="weighted_sum").mean(dim=1)


def _find_trade_offs(
    runs: Sequence[ComparedRun], untrained: Mapping[str, float], weights: Mapping[str, float]
) -> tuple[TradeOff, ...]:
    pairs = itertools.islice(itertools.combinations(untrained, 2), _MOST_TRADE_OFFS)
    found = []
    for pair in pairs:
        # A term of negative weight is better where it is lower.
        signs = [-1.0 if weights.get(name, 0.0) < 0 else 1.0 for name in pair]
        points = torch.tensor(
            [
                [sign * terms[name] for sign, name in zip(signs, pair, strict=True)]
                for terms in (untrained, *(run.terms for run in runs))
            ],
            dtype=torch.float64,
        )
        is_optimal = pareto_optimal(points)[1:].tolist()
        found.append(TradeOff(*pair, is_optimal=tuple(is_optimal)))
    return tuple(found)
