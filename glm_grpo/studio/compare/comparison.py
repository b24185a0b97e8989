"""Compare runs on the held-out evaluations that they stored, by the same weights."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from glm_grpo.config import Config, flatten
from glm_grpo.digests import digest
from glm_grpo.errors import CheckpointError, ConfigError
from glm_grpo.run.config import read_config, refuse_no_run
from glm_grpo.run.folder import RunFolder, read_image
from glm_grpo.run.provenance import Provenance
from glm_grpo.run.stored import EvaluatedRun, StoredEvaluation, read_evaluated_run
from glm_grpo.run.summaries import Interval, gain_over_prompts
from rewards.options import changeable_keys
from rewards.problems import NOT_GIVEN
from rewards.weighting import Mode, combine

_NO_DIFFERENCE = frozenset(
    {"run_dir", "train.resume", "train.resume_with_changes", "run.name", "run.notes", "run.tags"}
)
"""Keys that say where a run lies and what is said about it, not what it is."""

_EVALUATED_BY = ("eval.seed", "eval.samples_per_prompt")
"""Keys that must agree, and that `glm-grpo eval` can change."""
_SAME_EVALUATION = (*_EVALUATED_BY, "rollout.height", "rollout.width", "data.sources")
"""Keys that must agree: with others, noise, number or sizes of the images differ."""
_NOT_OF_THE_SCORE = frozenset({"weight", "when", "std_floor"})
"""Options of a term that leave its raw scores as they are, beside those that may always change."""

_SWEEP_FILE = "multirun.yaml"
"""Hydra's, beside the runs of a sweep."""


def _settings(run: EvaluatedRun) -> dict[str, str]:
    """All values of a run's config as JSON, by dotted key."""
    flat = flatten(run.config.model_dump(mode="json"))
    return {key: json.dumps(value, ensure_ascii=False) for key, value in flat.items()}


def _known_origins(runs: Sequence[EvaluatedRun]) -> list[Provenance]:
    """Origins of the runs if all are known; else none, because contents cannot be compared."""
    known = [run.provenance for run in runs if run.provenance is not None]
    return known if len(known) == len(runs) else []


def _differing_settings(runs: Sequence[EvaluatedRun]) -> list[dict[str, str]]:
    """For each run the settings, as JSON, in which not all of them agree.

    A run without a key of another has "(not given)" there. If all origins are known, versions of
    packages are keys, too, such as `versions.torch`, and so are the training prompts, unless a run
    is an evaluation.
    """
    flat = [_settings(run) for run in runs]
    known = _known_origins(runs)
    for settings, provenance in zip(flat, known, strict=False):
        settings |= {f"versions.{name}": each for name, each in provenance.versions.items()}
        if all(each.training for each in known):
            prompts = digest(json.dumps(provenance.training).encode())
            settings["training prompts"] = f"{len(provenance.training)} ({prompts})"
    keys = dict.fromkeys(key for settings in flat for key in settings if key not in _NO_DIFFERENCE)
    shown = [{key: settings.get(key, NOT_GIVEN) for key in keys} for settings in flat]
    differing = [key for key in keys if len({settings[key] for settings in shown}) > 1]
    return [{key: settings[key] for key in differing} for settings in shown]


def _list(values: Iterable[object], runs: Iterable[EvaluatedRun], between: str = ", ") -> str:
    return between.join(f"{each} in {run.name}" for each, run in zip(values, runs, strict=True))


def _check_same_model(runs: Sequence[EvaluatedRun]) -> None:
    """Refuse runs of different models: by their files if these are known, else by their paths."""
    shown = [run.config.model.path for run in runs]
    contents = [provenance.files.get("model.path") for provenance in _known_origins(runs)]
    has_contents = bool(contents) and None not in contents
    if has_contents:
        shown = [f"{path} ({content})" for path, content in zip(shown, contents, strict=True)]
    if len({*(contents if has_contents else shown)}) > 1:
        raise ConfigError(
            f"model.path is {_list(shown, runs)}: only runs of one model can be compared; leave "
            "some out, or train them again with one model"
        )


def _check_same_evaluation(runs: Sequence[EvaluatedRun]) -> None:
    """Refuse runs whose held-out images differ in seed, number or size."""
    settings = [_settings(run) for run in runs]
    first = settings[0]
    for key in _SAME_EVALUATION:
        odd = [run for run, each in zip(runs, settings, strict=True) if each[key] != first[key]]
        if not odd:
            continue
        remedy = (
            _evaluate_again(odd[0], {each: first[each] for each in _EVALUATED_BY})
            if key in _EVALUATED_BY
            else "leave some out, or train them again with one value"
        )
        raise ConfigError(
            f"{key} is {_list((each[key] for each in settings), runs)}: only runs whose held-out "
            f"images were made in the same way can be compared; {remedy}"
        )


def _evaluate_again(run: EvaluatedRun, settings: Mapping[str, str]) -> str:
    """The remedy for a run whose held-out images are not those of the others."""
    overrides = [f"{key}={value}" for key, value in settings.items()]
    command = shlex.join(["glm-grpo", "eval", str(run.folder.path), *overrides])
    return f"run `{command}`, and compare the folder that it prints instead"


def _check_same_prompts(first: EvaluatedRun, run: EvaluatedRun, comparable: Sequence[str]) -> None:
    """Refuse a run whose evaluations are of other prompts than those of the first run.

    Target and source images are compared as far as both runs still have them.
    """
    path = str(first.config.data.eval_path)
    remedy = _evaluate_again(run, {"data.eval_path": path})
    expected = _identity(first.evaluations[0], comparable)
    for evaluation in run.evaluations:
        if _identity(evaluation, comparable) != expected:
            raise ConfigError(
                f"{run.folder.evaluation_path(evaluation.step)} has other held-out prompts (id, "
                "prompt, texts, or terms that apply, in their order) than the first evaluation of "
                f"{first.name}; {remedy}"
            )
    for ours, theirs in zip(_image_paths(run), _image_paths(first), strict=False):
        if not (ours and theirs and ours.is_file() and theirs.is_file()):
            continue
        if not np.array_equal(np.asarray(read_image(ours)), np.asarray(read_image(theirs))):
            raise ConfigError(f"{ours} is not the same image as {theirs}; {remedy}")


def _identity(evaluation: StoredEvaluation, comparable: Sequence[str]) -> tuple[object, ...]:
    groups = evaluation.groups
    applies = [evaluation.applies(name).tolist() for name in comparable]
    return groups.prompt_ids, groups.prompts, evaluation.texts, applies


def _image_paths(run: EvaluatedRun) -> list[Path | None]:
    """Target and source images of the prompts."""
    evaluation = run.evaluations[0]
    stored = [*evaluation.targets, *(path for paths in evaluation.sources for path in paths)]
    return [None if path is None else run.folder.image_path(path) for path in stored]


def _list_scorings(runs: Sequence[EvaluatedRun]) -> list[dict[str, dict[str, Any]]]:
    """For each run, what its raw scores depend on: options by name of the term.

    Names of files and functions have a digest of the content if all origins are known.
    """
    known = _known_origins(runs)
    contents = [_contents(provenance) for provenance in known] or [{} for _ in runs]
    # Runs of earlier versions do not know all modules, or the scorers.
    shared = set.intersection(*map(set, contents))
    contents = [
        {key: each for key, each in content.items() if "/" not in key or key in shared}
        for content in contents
    ]
    return [
        {name: _scoring(run.config, name, content) for name in run.config.reward.terms}
        for run, content in zip(runs, contents, strict=True)
    ]


def _contents(provenance: Provenance) -> dict[str, str]:
    scorers = {f"{key}/scorer": scorer for key, scorer in provenance.scorers.items()}
    contents = {**provenance.files, **provenance.code, **scorers}
    changed = ", changed during the run"
    return {
        key: f"{content}{changed if key.partition('/')[0] in provenance.changed else ''}"
        for key, content in contents.items()
    }


def _scoring(config: Config, name: str, contents: Mapping[str, str]) -> dict[str, Any]:
    term = config.reward.terms[name]
    options = term.model_dump()
    for key in options:
        content = contents.get(f"reward.terms.{name}.{key}")
        if content is not None:
            options[key] = f"{Path(options[key]).name} ({content})"
    # Further modules of its code, or its scorer.
    places = (key.partition("/") for key in contents if key.startswith(f"reward.terms.{name}."))
    options |= {place: contents[f"{key}/{place}"] for key, slash, place in places if slash}
    others = _NOT_OF_THE_SCORE.union(changeable_keys(term))
    return {key: value for key, value in options.items() if key not in others}


def _sort_terms(runs: Sequence[EvaluatedRun]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Terms that every run scored in the same way, and all others."""
    scorings = _list_scorings(runs)
    names = dict.fromkeys(name for scoring in scorings for name in scoring)
    comparable = tuple(
        name
        for name in names
        if all(name in scoring and scoring[name] == scorings[0].get(name) for scoring in scorings)
    )
    return comparable, tuple(name for name in names if name not in comparable)


def _check_weights(
    runs: Sequence[EvaluatedRun], weights: Mapping[str, float], comparable: Sequence[str]
) -> None:
    """Refuse weights that do not measure all runs alike, or under which a prompt has no total."""
    if not weights:
        raise ConfigError("all weights are 0, so every run has total 0; set one, such as ocr=1")
    alike = f"judge by terms that all runs scored alike ({', '.join(comparable) or 'none'})"
    for name in weights:
        for run in runs:
            terms = run.config.reward.terms
            if name not in terms:
                nearest = difflib.get_close_matches(name, terms, n=1)
                meant = f"did you mean {nearest[0]}? Otherwise " if nearest else ""
                raise ConfigError(
                    f"term {name!r}: {run.name} did not score it (it scored {', '.join(terms)}); "
                    f"{meant}{alike}, or score it with weight 0 when training"
                )
        if name not in comparable:
            raise ConfigError(
                f"term {name!r} was scored in different ways: {_list_options(runs, name)}, so its "
                f"scores cannot be compared; {alike}"
            )
    first = runs[0].evaluations[0]
    has_total = torch.stack([first.applies(name) for name in weights]).any(dim=0)
    for row in (~has_total).nonzero().flatten()[:1].tolist():
        raise ConfigError(
            f"weights of {', '.join(weights)}: none of its terms applies to held-out prompt "
            f"{first.groups.prompt_ids[row]}; add a term that applies to every prompt"
        )


def _list_options(runs: Sequence[EvaluatedRun], name: str) -> str:
    """The options of a term in which runs differ, with the value of each run."""
    scorings = [scoring[name] for scoring in _list_scorings(runs)]
    keys = dict.fromkeys(key for scoring in scorings for key in scoring)
    return "; ".join(
        _list((f"{key} {scoring.get(key)!r}" for scoring in scorings), runs, "; ")
        for key in keys
        if any(scoring.get(key) != scorings[0].get(key) for scoring in scorings)
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
        base: Mean raw score of each term at the first evaluation of the first run that did not
            start from another run's weights; of the first run if all did.
        left_out: Terms that not every run scored in the same way.
        combine: Whether totals are weighted sums of raw scores, or of scores in units of the
            spread of the first evaluation of the first run.
        base_label: Other words for `base` if all runs started from weights.
    """

    weights: Mapping[str, float]
    prompts: int
    samples_per_prompt: int
    runs: tuple[ComparedRun, ...]
    base: Mapping[str, float]
    left_out: tuple[str, ...]
    combine: Mode = "weighted_sum"
    base_label: str = "base"


def compare(run_dirs: Sequence[Path], weights: Mapping[str, float] | None) -> Comparison:
    """Judge runs by one total, at every evaluation they stored.

    Args:
        run_dirs: At least two runs; the others are compared with the first. A folder of runs, such
            as that of a sweep, stands for its runs, and a sweep's multirun.yaml, which a shell's
            star names too, for nothing.
        weights: Weights by term of a sum of raw scores; None for the reward that the first run was
            trained with, under `normalize_then_sum` in units of the spread of its first evaluation.
    """
    runs = _read_runs(run_dirs)
    _check_same_evaluation(runs)
    _check_same_model(runs)
    reward = runs[0].config.reward
    given = reward.weights() if weights is None else weights
    chosen = {name: weight for name, weight in given.items() if weight != 0}
    comparable, left_out = _sort_terms(runs)
    _check_weights(runs, chosen, comparable)
    for run in runs:
        _check_same_prompts(runs[0], run, comparable)
    first = runs[0].evaluations[0]
    # Those weighted first; one that applies to no held-out prompt has no mean.
    names = [name for name in (*chosen, *comparable) if first.applies(name).any()]
    terms = tuple(dict.fromkeys(names))
    unstarted = [run for run in runs if run.config.model.start_from is None]
    common = CommonReward(
        chosen,
        {name: reward.terms[name].std_floor for name in chosen},
        reward.combine if weights is None else "weighted_sum",
        first,
    )
    totals = [[common.prompt_totals(each) for each in run.evaluations] for run in runs]
    compared = tuple(
        ComparedRun(
            name=run.name,
            settings=settings,
            steps=tuple(evaluation.step for evaluation in run.evaluations),
            totals=tuple(values.nanmean().item() for values in own),
            gain=gain_over_prompts(own[0], own[-1]),
            over_first=None if run is runs[0] else gain_over_prompts(totals[0][-1], own[-1]),
            terms=run.evaluations[-1].term_means(terms),
            title=run.config.run.name,
        )
        for run, settings, own in zip(runs, _differing_settings(runs), totals, strict=True)
    )
    return Comparison(
        weights=chosen,
        prompts=len(first.groups.prompt_ids),
        samples_per_prompt=runs[0].config.eval.samples_per_prompt,
        runs=compared,
        base=[*unstarted, *runs][0].evaluations[0].term_means(terms),
        left_out=left_out,
        combine=common.combine,
        base_label="base" if unstarted else "run 1, step 0",
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
    return [
        read_evaluated_run(folder, read_config(folder), name=name)
        for folder, name in zip(folders, _short_names(paths), strict=True)
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


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that distinguish them."""
    length = 1
    while True:
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
        length += 1


@dataclass(frozen=True)
class CommonReward:
    """What all runs are judged by.

    Attributes:
        weights: By term, none of them 0; at least one term applies to each prompt.
        std_floors: For the same terms, see `RewardTable`; `weighted_sum` reads none.
        combine: How the weighted terms are combined.
        base: The evaluation whose spread is the unit under `normalize_then_sum`.
    """

    weights: Mapping[str, float]
    std_floors: Mapping[str, float]
    combine: Mode
    base: StoredEvaluation

    def prompt_totals(self, evaluation: StoredEvaluation) -> Float32[Tensor, " P"]:
        """The total of each prompt, mean over its samples; NaN if none of them has a total."""
        table, base = (
            each.groups.weigh(self.weights, self.std_floors) for each in (evaluation, self.base)
        )
        return combine(table, mode=self.combine, base_scores=base).nanmean(dim=1)
