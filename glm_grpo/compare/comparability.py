"""Whether runs, and their terms, can be judged by one yardstick."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from glm_grpo.compare.settings import list_settings
from glm_grpo.config import Config
from glm_grpo.errors import ConfigError
from glm_grpo.run.folder import read_picture
from glm_grpo.run.stored import EvaluatedRun, StoredEvaluation

_SAME_EVALUATION = (
    "model.path",
    "eval.seed",
    "eval.samples_per_prompt",
    "rollout.height",
    "rollout.width",
)
"""Keys that must agree: with others, prompts, noise or sizes of the pictures differ."""
_NOT_OF_THE_SCORE = frozenset(
    {
        *("weight", "std_floor", "timeout_seconds", "run_in", "threads", "url"),
        *("retries", "requests_at_once", "request_timeout_seconds"),
        *("api_key_variable", "token_variable"),
    }
)
"""Options of a term that leave its raw scores as they are."""


def check_same_evaluation(names: Sequence[str], configs: Sequence[Config]) -> None:
    """Refuse runs whose held-out pictures were made in different ways.

    Args:
        names: Of the runs, for the error.
        configs: Of the same runs.

    Raises:
        ConfigError: They differ in model, seed, number or size of the pictures.
    """
    for key in _SAME_EVALUATION:
        values = [list_settings(config)[key] for config in configs]
        if len(set(values)) > 1:
            listed = ", ".join(
                f"{value} in {name}" for value, name in zip(values, names, strict=True)
            )
            raise ConfigError(
                f"{key} is {listed}: only runs whose held-out pictures were made in the same way "
                "can be compared; leave some out, or train them again with one value"
            )


def check_same_prompts(first: EvaluatedRun, run: EvaluatedRun, comparable: Sequence[str]) -> None:
    """Refuse a run whose evaluations are of other prompts than those of the first run.

    Target pictures are compared as far as both runs still have them.

    Args:
        first: The run that others are held against.
        run: Any run, the first one too.
        comparable: Terms that must apply to the same prompts in both.

    Raises:
        ConfigError: Prompts, their order, their texts or their targets differ.
        StorageError: A target picture cannot be read.
    """
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


def sort_terms(runs: Sequence[EvaluatedRun]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Terms that every run scored in the same way, and all others."""
    scorings = [{name: _scoring(run, name) for name in run.config.reward.terms} for run in runs]
    names = dict.fromkeys(name for scoring in scorings for name in scoring)
    comparable = tuple(
        name
        for name in names
        if all(name in scoring and scoring[name] == scorings[0].get(name) for scoring in scorings)
    )
    return comparable, tuple(name for name in names if name not in comparable)


def check_yardstick(
    runs: Sequence[EvaluatedRun], weights: Mapping[str, float], comparable: Sequence[str]
) -> None:
    """Refuse a yardstick that does not measure all runs alike.

    Args:
        runs: All that are compared.
        weights: Of the yardstick, without those that are 0.
        comparable: Terms that every run scored in the same way, see `sort_terms`.

    Raises:
        ConfigError: It has no term, or one that a run did not score or scored in another way.
    """
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


def check_every_prompt_has_a_total(
    evaluation: StoredEvaluation, weights: Mapping[str, float]
) -> None:
    """Refuse a yardstick that says nothing of some prompt.

    Raises:
        ConfigError: None of its terms applies to a prompt; names the first such prompt.
    """
    has_total = torch.stack([evaluation.applies(name) for name in weights]).any(dim=0)
    for row in (~has_total).nonzero().flatten()[:1].tolist():
        raise ConfigError(
            f"yardstick {', '.join(weights)}: none of its terms applies to held-out prompt "
            f"{evaluation.groups.prompt_ids[row]}; add a term that applies to every prompt"
        )


def _check_same_targets(first: EvaluatedRun, run: EvaluatedRun) -> None:
    pairs = zip(run.evaluations[0].targets, first.evaluations[0].targets, strict=True)
    for target, other in pairs:
        if target is None or other is None:
            continue
        ours, theirs = run.folder.picture(target), first.folder.picture(other)
        if not (os.path.isfile(ours) and os.path.isfile(theirs)):
            continue
        if not np.array_equal(np.asarray(read_picture(ours)), np.asarray(read_picture(theirs))):
            raise ConfigError(
                f"{ours} is another target picture than {theirs}; compare runs with the same "
                "data.eval_path"
            )


def _identities(evaluation: StoredEvaluation) -> list[tuple[str, str, tuple[str, ...]]]:
    groups = evaluation.groups
    return list(zip(groups.prompt_ids, groups.prompts, evaluation.texts, strict=True))


def _scoring(run: EvaluatedRun, name: str) -> dict[str, Any]:
    options = run.config.reward.terms[name].model_dump()
    return {key: value for key, value in options.items() if key not in _NOT_OF_THE_SCORE}


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
