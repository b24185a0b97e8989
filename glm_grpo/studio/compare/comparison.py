"""Compare runs on the held-out evaluations that they stored, by the same weights."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from glm_grpo.config import Config, flatten
from glm_grpo.digests import digest
from glm_grpo.errors import CheckpointError, ConfigError
from glm_grpo.run.config import read_config, refuse_no_run
from glm_grpo.run.folder import RunFolder, read_picture
from glm_grpo.run.origin import Origin, read_origin
from glm_grpo.run.stored import EvaluatedRun, StoredEvaluation, read_evaluated_run
from glm_grpo.run.summaries import Interval, gain_over_prompts
from rewards.problems import NOT_GIVEN
from rewards.reweigh import Mode, combine

_NO_DIFFERENCE = frozenset(
    {"run_dir", "train.resume", "train.resume_with_changes", "run.name", "run.notes", "run.tags"}
)
"""Keys that say where a run lies and what is said about it, not what it is."""

_EVALUATED_BY = ("eval.seed", "eval.samples_per_prompt")
"""Keys that must agree, and that `glm-grpo eval` can change."""
_SAME_EVALUATION = (*_EVALUATED_BY, "rollout.height", "rollout.width", "data.sources")
"""Keys that must agree: with others, noise, number or sizes of the pictures differ."""
_MODEL = "model.path"
_VERSIONS = "versions."
"""Prefix of packages among the settings that differ."""
_TRAINING = "training prompts"
"""Their number and digest, among the settings that differ."""
_NOT_OF_THE_SCORE = frozenset(
    {
        *("weight", "when", "std_floor"),
        *("timeout_seconds", "threads", "url"),
        *("retries", "requests_at_once", "request_timeout_seconds"),
        *("api_key_variable", "token_variable"),
    }
)
"""Options of a term that leave its raw scores as they are."""

_SWEEP_FILE = "multirun.yaml"
"""Hydra's, beside the runs of a sweep."""


def list_settings(config: Config) -> dict[str, str]:
    """All values of a config as JSON, by dotted key; a section that is absent has none."""
    flat = flatten(config.model_dump(mode="json"))
    return {key: json.dumps(value, ensure_ascii=False) for key, value in flat.items()}


def differing_settings(
    configs: Sequence[Config], origins: Sequence[Origin | None] = ()
) -> list[dict[str, str]]:
    """For each config the keys, with values as JSON, in which not all of them agree.

    A config without a key of another has "(not given)" there. Where a run lies is no difference.

    Args:
        origins: Of the same runs; if all are known, versions of packages are keys, too, such as
            `versions.torch`, and so are the training prompts, unless a run is an evaluation.
    """
    flat = [list_settings(config) for config in configs]
    known = _all_known(origins)
    for settings, origin in zip(flat, known, strict=False):
        settings |= {f"{_VERSIONS}{name}": each for name, each in origin.versions.items()}
        if all(each.training for each in known):
            prompts = digest(json.dumps(origin.training).encode())
            settings[_TRAINING] = f"{len(origin.training)} ({prompts})"
    keys = dict.fromkeys(key for settings in flat for key in settings)
    differing = [
        key
        for key in keys
        if key not in _NO_DIFFERENCE
        and len({settings.get(key, NOT_GIVEN) for settings in flat}) > 1
    ]
    return [{key: settings.get(key, NOT_GIVEN) for key in differing} for settings in flat]


def _all_known(origins: Sequence[Origin | None]) -> list[Origin]:
    """The origins, if all are known; else none, because contents cannot be compared."""
    known = [origin for origin in origins if origin is not None]
    return known if len(known) == len(origins) else []


def check_same_model(
    names: Sequence[str], configs: Sequence[Config], origins: Sequence[Origin | None]
) -> None:
    """Refuse runs of different models: by their files if these are known, else by their paths.

    Raises:
        ConfigError: The models differ.
    """
    paths = [config.model.path for config in configs]
    contents = [origin.files.get(_MODEL) for origin in _all_known(origins)]
    shown = paths
    if contents and None not in contents:
        shown = [f"{path} ({content})" for path, content in zip(paths, contents, strict=True)]
    if len(set(contents if shown is not paths else paths)) > 1:
        listed = ", ".join(f"{each} in {name}" for each, name in zip(shown, names, strict=True))
        raise ConfigError(
            f"{_MODEL} is {listed}: only runs of one model can be compared; leave some out, or "
            "train them again with one model"
        )


def check_same_evaluation(
    folders: Sequence[RunFolder], names: Sequence[str], configs: Sequence[Config]
) -> None:
    """Refuse runs whose held-out pictures were made in different ways.

    Args:
        folders: Folders of the runs, for the remedy.
        names: Names of the same runs, for the error.
        configs: Their configs.

    Raises:
        ConfigError: Seed, number or size of the pictures differ.
    """
    first, *others = (list_settings(config) for config in configs)
    for key in _SAME_EVALUATION:
        differing = [place for place, other in enumerate(others, 1) if other[key] != first[key]]
        if not differing:
            continue
        listed = ", ".join(
            f"{settings[key]} in {name}"
            for settings, name in zip((first, *others), names, strict=True)
        )
        remedy = (
            _evaluate_again(folders[differing[0]], {each: first[each] for each in _EVALUATED_BY})
            if key in _EVALUATED_BY
            else "leave some out, or train them again with one value"
        )
        raise ConfigError(
            f"{key} is {listed}: only runs whose held-out images were made in the same way can be "
            f"compared; {remedy}"
        )


def _evaluate_again(folder: RunFolder, settings: Mapping[str, str]) -> str:
    """The remedy for a run whose held-out pictures are not those of the others."""
    overrides = [f"{key}={value}" for key, value in settings.items()]
    command = shlex.join(["glm-grpo", "eval", str(folder.path), *overrides])
    return f"run `{command}`, and compare the folder that it prints instead"


def check_same_prompts(first: EvaluatedRun, run: EvaluatedRun, comparable: Sequence[str]) -> None:
    """Refuse a run whose evaluations are of other prompts than those of the first run.

    Target and source pictures are compared as far as both runs still have them.

    Args:
        first: The run that others are held against.
        run: Any run, the first one too.
        comparable: Terms that must apply to the same prompts in both.

    Raises:
        ConfigError: Prompts, their order, their texts or their pictures differ.
        StorageError: A picture cannot be read.
    """
    expected = first.evaluations[0]
    remedy = _same_prompts(first, run)
    for evaluation in run.evaluations:
        path = run.folder.evaluation_path(evaluation.step)
        if _identities(evaluation) != _identities(expected):
            raise ConfigError(
                f"{path} has other held-out prompts (id, prompt or texts, in their order) than the "
                f"first evaluation of {first.name}; {remedy}"
            )
        for name in comparable:
            if not torch.equal(evaluation.applies(name), expected.applies(name)):
                raise ConfigError(
                    f"{path}: {name} was scored for other prompts than in {first.name}, so some "
                    f"have no target there; {remedy}"
                )
    _check_same_pictures(first, run, "target")
    _check_same_pictures(first, run, "source")


def _same_prompts(first: EvaluatedRun, run: EvaluatedRun) -> str:
    path = first.config.data.eval_path
    return _evaluate_again(run.folder, {"data.eval_path": str(path)})


def list_scorings(
    configs: Sequence[Config], origins: Sequence[Origin | None]
) -> list[dict[str, dict[str, Any]]]:
    """For each run, what its raw scores depend on: options by name of the term.

    Arguments as in `sort_terms`.
    """
    known = _all_known(origins)
    contents = [_contents(origin) for origin in known] or [{} for _ in configs]
    return [
        {name: _scoring(config, name, content) for name in config.reward.terms}
        for config, content in zip(configs, contents, strict=True)
    ]


def _contents(origin: Origin) -> dict[str, str]:
    contents = {**origin.files, **origin.code}
    for key in contents.keys() & {*origin.changed}:
        contents[key] += ", changed during the run"
    return contents


def sort_terms(
    configs: Sequence[Config], origins: Sequence[Origin | None]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Terms that every run scored in the same way, and all others.

    Args:
        configs: Of the runs.
        origins: Of the same runs; if all are known, files and code are compared by content.
    """
    scorings = list_scorings(configs, origins)
    names = dict.fromkeys(name for scoring in scorings for name in scoring)
    comparable = tuple(
        name
        for name in names
        if all(name in scoring and scoring[name] == scorings[0].get(name) for scoring in scorings)
    )
    return comparable, tuple(name for name in names if name not in comparable)


def check_weights(
    runs: Sequence[EvaluatedRun], weights: Mapping[str, float], comparable: Sequence[str]
) -> None:
    """Refuse weights that do not measure all runs alike.

    Args:
        runs: All that are compared.
        weights: By name of the term, none of them 0.
        comparable: Terms that every run scored in the same way, see `sort_terms`.

    Raises:
        ConfigError: It has no term, or one that a run did not score or scored in another way.
    """
    if not weights:
        raise ConfigError("all weights are 0, so every run has total 0; set one, such as ocr=1")
    for name in weights:
        for run in runs:
            if name not in run.config.reward.terms:
                others = (
                    f"judge by terms that all runs scored ({', '.join(comparable)}), such as "
                    f"{comparable[0]}=1, or "
                    if comparable
                    else "no term was scored by all runs; "
                )
                raise ConfigError(
                    f"term {name!r}: {run.name} did not score it (it scored "
                    f"{', '.join(run.config.reward.terms)}); {others}score it with weight 0 when "
                    "training"
                )
        if name not in comparable:
            raise ConfigError(
                f"term {name!r} was scored in different ways: {_list_options(runs, name)}, so its "
                "scores cannot be compared; judge by terms that all runs scored alike "
                f"({', '.join(comparable) or 'none'})"
            )


def check_every_prompt_has_a_total(
    evaluation: StoredEvaluation, weights: Mapping[str, float]
) -> None:
    """Refuse weights under which a prompt has no total.

    Raises:
        ConfigError: None of its terms applies to a prompt; names the first such prompt.
    """
    has_total = torch.stack([evaluation.applies(name) for name in weights]).any(dim=0)
    for row in (~has_total).nonzero().flatten()[:1].tolist():
        raise ConfigError(
            f"weights of {', '.join(weights)}: none of its terms applies to held-out prompt "
            f"{evaluation.groups.prompt_ids[row]}; add a term that applies to every prompt"
        )


def _check_same_pictures(
    first: EvaluatedRun, run: EvaluatedRun, name: Literal["target", "source"]
) -> None:
    pairs = zip(_given(run, name), _given(first, name), strict=True)
    for picture, other in pairs:
        if picture is None or other is None:
            continue
        ours, theirs = run.folder.picture(picture), first.folder.picture(other)
        if not (os.path.isfile(ours) and os.path.isfile(theirs)):
            continue
        if not np.array_equal(np.asarray(read_picture(ours)), np.asarray(read_picture(theirs))):
            raise ConfigError(
                f"{ours} is not the same {name} image as {theirs}; {_same_prompts(first, run)}"
            )


def _given(run: EvaluatedRun, name: Literal["target", "source"]) -> list[str | None]:
    """Paths of the pictures that prompts came with; runs have as many sources each."""
    evaluation = run.evaluations[0]
    if name == "target":
        return [*evaluation.targets]
    return [path for paths in evaluation.sources for path in paths]


def _identities(evaluation: StoredEvaluation) -> list[tuple[str, str, tuple[str, ...]]]:
    groups = evaluation.groups
    return list(zip(groups.prompt_ids, groups.prompts, evaluation.texts, strict=True))


def _scoring(config: Config, name: str, contents: Mapping[str, str]) -> dict[str, Any]:
    """Options of a term; names of files and functions with a digest, if `contents` has it."""
    options = config.reward.terms[name].model_dump()
    for key in options:
        content = contents.get(f"reward.terms.{name}.{key}")
        if content is not None:
            options[key] = f"{Path(options[key]).name} ({content})"
    return {key: value for key, value in options.items() if key not in _NOT_OF_THE_SCORE}


def _list_options(runs: Sequence[EvaluatedRun], name: str) -> str:
    """The options of a term in which runs differ, with the value of each run."""
    every = list_scorings([run.config for run in runs], [run.origin for run in runs])
    scorings = [scoring[name] for scoring in every]
    keys = dict.fromkeys(key for scoring in scorings for key in scoring)
    differing = [key for key in keys if any(s.get(key) != scorings[0].get(key) for s in scorings)]
    return "; ".join(
        f"{key} {scoring.get(key)!r} in {run.name}"
        for key in differing
        for run, scoring in zip(runs, scorings, strict=True)
    )


@dataclass(frozen=True)
class ComparedRun:
    """One run on the held-out prompts.

    Attributes:
        name: The shortest end of its path that no other run's path has.
        settings: What of its config differs between the runs, by dotted key, as text.
        steps: Policy steps of its evaluations, in order, at least two.
        totals: Mean total at each of `steps`.
        gain: Gain of the total, from the first evaluation to the last.
        over_first: The last total less that of the first run; None for the first run itself.
        terms: Mean raw score of each term at the last evaluation.
        title: Its `run.name`; None where it was given none.
    """

    name: str
    settings: Mapping[str, str]
    steps: tuple[int, ...]
    totals: tuple[float, ...]
    gain: Interval
    over_first: Interval | None
    terms: Mapping[str, float]
    title: str | None = None

    @property
    def shown(self) -> str:
        """Title and folder, or the folder alone."""
        return self.name if self.title is None else f"{self.title} ({self.name})"


@dataclass(frozen=True)
class Comparison:
    """Runs judged by one reward on the same held-out prompts.

    Attributes:
        weights: By name of the term.
        prompts: Number of held-out prompts.
        samples_per_prompt: Images of each.
        runs: In the order they were named.
        untrained: Mean raw score of each term at the first evaluation of the first run that did not
            start from another run's weights; of the first run if all did.
        left_out: Terms that not every run scored in the same way.
        combine: Whether totals are weighted sums of raw scores, or of scores in units of the
            spread of the first evaluation of the first run.
        untrained_label: Other words for `untrained` if all runs started from weights.
    """

    weights: Mapping[str, float]
    prompts: int
    samples_per_prompt: int
    runs: tuple[ComparedRun, ...]
    untrained: Mapping[str, float]
    left_out: tuple[str, ...]
    combine: Mode = "weighted_sum"
    untrained_label: str = "untrained"


def compare(run_dirs: Sequence[Path], weights: Mapping[str, float] | None) -> Comparison:
    """Judge runs by one total, at every evaluation they stored.

    Args:
        run_dirs: At least two runs; the others are held against the first. A folder of runs,
            such as that of a sweep, stands for its runs, and a sweep's multirun.yaml, which a
            shell's star names too, for nothing.
        weights: By name of the term, of a weighted sum of raw scores; None for the reward
            that the first run was trained with, under `normalize_then_sum` in units of the spread
            of its first evaluation.

    Raises:
        ConfigError: The runs cannot be compared: other prompts, seeds, sizes or models, a term of
            those weighted that was not scored, or was scored in another way.
        CheckpointError: A folder holds no run.
        StorageError: A run has fewer than two evaluations, or a table is damaged.
    """
    runs = _read_runs(run_dirs)
    reward = runs[0].config.reward
    given = reward.weights() if weights is None else weights
    chosen = {name: weight for name, weight in given.items() if weight != 0}
    configs, origins = [run.config for run in runs], [run.origin for run in runs]
    comparable, left_out = sort_terms(configs, origins)
    check_weights(runs, chosen, comparable)
    first = runs[0].evaluations[0]
    for run in runs:
        check_same_prompts(runs[0], run, comparable)
    check_every_prompt_has_a_total(first, chosen)
    # Those weighted first; one that applies to no held-out prompt has no mean.
    names = [name for name in (*chosen, *comparable) if first.applies(name).any()]
    terms = tuple(dict.fromkeys(names))
    unstarted = [run for run in runs if run.config.model.start_from is None]
    origin = [*unstarted, *runs][0]
    untrained = origin.evaluations[0].term_means(terms)
    common = CommonReward(
        chosen,
        {name: reward.terms[name].std_floor for name in chosen},
        reward.combine if weights is None else "weighted_sum",
        first,
    )
    differing = differing_settings(configs, origins)
    reference = _prompt_totals(runs[0].evaluations[-1], common)
    compared = tuple(
        _compare_run(run, settings, common, terms, None if run is runs[0] else reference)
        for run, settings in zip(runs, differing, strict=True)
    )
    return Comparison(
        weights=chosen,
        prompts=len(first.groups.prompt_ids),
        samples_per_prompt=runs[0].config.eval.samples_per_prompt,
        runs=compared,
        untrained=untrained,
        left_out=left_out,
        combine=common.combine,
        untrained_label="untrained" if unstarted else "run 1, step 0",
    )


def _read_runs(run_dirs: Sequence[Path]) -> list[EvaluatedRun]:
    paths = [path.resolve() for each in run_dirs for path in _runs_at(each)]
    if len(paths) < 2 or len(set(paths)) < len(paths):
        for path in paths:
            refuse_no_run(RunFolder(path))
        raise ConfigError(
            f"runs {', '.join(map(str, run_dirs)) or '(none)'}: a comparison needs at least two, "
            "each named once"
        )
    folders = [RunFolder(path) for path in paths]
    names = short_names(paths)
    configs = [read_config(folder) for folder in folders]
    check_same_evaluation(folders, names, configs)
    check_same_model(names, configs, [read_origin(folder) for folder in folders])
    return [
        read_evaluated_run(folder, config, name=name)
        for folder, name, config in zip(folders, names, configs, strict=True)
    ]


def _runs_at(path: Path) -> list[Path]:
    """The runs of a folder of runs, such as a sweep's, by name; of any other path, itself."""
    if path.name == _SWEEP_FILE and path.is_file():
        return []
    is_sweep = (path / _SWEEP_FILE).is_file()
    if not is_sweep and (path / "config.yaml").is_file():
        return [path]
    runs = [config.parent for config in path.glob("*/config.yaml")]
    if is_sweep and not runs:
        raise CheckpointError(f"{path} is the folder of a sweep, but contains none of its runs")
    if not is_sweep:
        # Beside runs there may be folders of configs, such as `glm-grpo init` writes.
        runs = [run for run in runs if RunFolder(run).evaluations_dir.is_dir()] or [path]
    return sorted(runs, key=_natural_order)


def _natural_order(path: Path) -> list[int | str]:
    """9 before 10."""
    parts = re.split(r"(\d+)", path.name)
    return [int(part) if part.isdecimal() else part for part in parts]


def short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    length = 1
    while True:
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
        length += 1


def _compare_run(
    run: EvaluatedRun,
    settings: Mapping[str, str],
    reward: CommonReward,
    terms: Sequence[str],
    reference: Float32[Tensor, " P"] | None,
) -> ComparedRun:
    totals = [_prompt_totals(evaluation, reward) for evaluation in run.evaluations]
    return ComparedRun(
        name=run.name,
        settings=settings,
        steps=tuple(evaluation.step for evaluation in run.evaluations),
        totals=tuple(values.mean().item() for values in totals),
        gain=gain_over_prompts(totals[0], totals[-1]),
        over_first=None if reference is None else gain_over_prompts(reference, totals[-1]),
        terms=run.evaluations[-1].term_means(terms),
        title=run.config.run.name,
    )


def _prompt_totals(evaluation: StoredEvaluation, reward: CommonReward) -> Float32[Tensor, " P"]:
    """The total of each prompt, mean over its samples."""
    return reward.totals(evaluation).mean(dim=1)


@dataclass(frozen=True)
class CommonReward:
    """What all runs are judged by.

    Attributes:
        weights: By term, none of them 0; at least one term applies to each prompt.
        std_floors: For the same terms, see `RewardTable`; `weighted_sum` reads none.
        combine: How the weighted terms are combined.
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
