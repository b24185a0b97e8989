"""Check that prompts and reward terms fit each other."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import islice

from glm_grpo.config import Config
from glm_grpo.data.prompts import PromptSource
from glm_grpo.errors import ConfigError, DataError, Errors
from glm_grpo.setup.prompts import Prompts
from rewards.base import asks_for_objects
from rewards.coverage import check_prompts, describe_uncovered
from rewards.problems import Problem, describe_problems
from rewards.score import Scorer
from rewards.types import Prompt, RewardError

_MOST_ERRORS = 10
"""Prompts of a set that are refused by a term, each with its reason."""

ASKING = "asks for a text in quotation marks, or by the field `text`"
"""What a prompt does to which a term of texts applies."""
ASKING_FOR_OBJECTS = "asks for objects, by the field `include`"
"""What a prompt does to which a term of objects applies."""


def check_used(config: Config, prompts: Prompts) -> None:
    """Refuse terms with a weight that apply to no training prompt, as far as the config tells.

    Their weight would go to the others. A run that began so may be resumed.
    """
    reward, training = config.reward, prompts.training
    if config.train.method == "sft" or config.train.resume is not None:
        return
    ids, texts, metadata = training.ids(), training.texts(), training.metadata()
    lacks_target, lacks_source = not training.has_targets(), config.data.sources == 0
    unused: dict[str, list[str]] = {}
    weights = {name: abs(weight) for name, weight in reward.weights().items() if weight != 0}
    for name in weights:
        needs, pattern = reward.terms[name].needs(), reward.terms[name].prompt_ids
        rows = [row for row, prompt_id in enumerate(ids) if fnmatchcase(prompt_id, pattern)]
        for is_lacking, lack in (
            (not rows, f"has an id that matches `prompt_ids`, {pattern!r}"),
            ("target" in needs and lacks_target, "has a target image, by the field `target`"),
            ("source" in needs and lacks_source, "has a source image, because data.sources is 0"),
            ("text" in needs and not any(texts[row] for row in rows), ASKING),
            (
                "objects" in needs and not any(asks_for_objects(metadata[row]) for row in rows),
                ASKING_FOR_OBJECTS,
            ),
        ):
            if is_lacking:
                unused.setdefault(lack, []).append(name)
                break
    if not unused:
        return
    names = [name for each in unused.values() for name in each]
    share = sum(weights[name] for name in names) / sum(weights.values())
    lacks = "; ".join(f"{' and '.join(each)}: none {lack}" for lack, each in unused.items())
    remedy = " ".join(f"{name}=null" for name in names)
    if not reward.allow_image_only and not any(
        reward.terms[name].needs() for name in weights if name not in names
    ):
        clip = "clip_score" if "clip_score" in reward.terms else "+reward.terms.clip_score.weight"
        remedy += f" and add a term that applies to every prompt ({clip}=0.5)"
    raise ConfigError(
        f"reward.terms: {share:.0%} of the weight applies to none of the {len(training)} training "
        f"prompts ({lacks}), and would go to the other terms. Give the prompts what they lack, or "
        f"leave these terms out: {remedy}"
    )


def check_terms(config: Config) -> None:
    """Refuse terms whose files or functions cannot be used."""
    errors = Errors()
    for term in config.reward.terms.values():
        with errors.collecting():
            try:
                term.check()
            except RewardError as error:
                raise ConfigError(str(error)) from error
    errors.raise_all()


def check_metadata(config: Config, prompts: PromptSource, *, is_training: bool = False) -> None:
    """Refuse prompts whose further columns ask for what a term could never score."""
    errors = Errors()
    for term in config.reward.terms.values():
        if is_training and (config.train.method == "sft" or term.when != "always"):
            continue
        rows = zip(prompts.ids(), prompts.origins(), prompts.metadata(), strict=True)
        problems = term.check_metadata(
            {
                f"{key} ({origin})": row
                for key, origin, row in rows
                if fnmatchcase(key, term.prompt_ids)
            }
        )
        try:
            for problem in islice(problems, _MOST_ERRORS):
                with errors.collecting():
                    raise DataError(problem)
            if next(problems, None) is not None:
                with errors.collecting():
                    raise DataError(f"{prompts.path}: other rows are not checked yet")
        except RewardError as error:
            raise ConfigError(str(error)) from error
    errors.raise_all()


def check_rows(config: Config, prompts: Prompts) -> None:
    """Refuse prompts to which no term applies, as far as their rows tell without a scorer.

    A target image that some rows lack is noticed when the prompts are loaded.
    """
    for _, prompt_set in prompts.named():
        is_training = prompt_set is prompts.training
        # The training prompts of a supervised run are not scored.
        if not (is_training and config.train.method == "sft"):
            _check_covered(config, prompt_set)


def _check_covered(config: Config, prompts: PromptSource) -> None:
    names = [name for name, weight in config.reward.weights().items() if weight != 0]
    terms = [config.reward.terms[name] for name in names]
    given = {"prompt": True, "target": prompts.has_targets(), "source": config.data.sources > 0}
    for prompt_id, origin, caption, texts, metadata in zip(
        prompts.ids(),
        prompts.origins(),
        prompts.captions(),
        prompts.texts(),
        prompts.metadata(),
        strict=True,
    ):
        has = given | {"text": bool(texts), "objects": asks_for_objects(metadata)}
        if not any(
            fnmatchcase(prompt_id, term.prompt_ids) and all(has[need] for need in term.needs())
            for term in terms
        ):
            raise ConfigError(f"{origin}: {describe_uncovered(prompt_id, caption, names)}")


def check_targets(config: Config, prompts: Prompts) -> None:
    """Refuse to learn from target images where no training prompt has one."""
    if not config.reads_targets or prompts.training.has_targets():
        return
    key, value, remedy = (
        ("train.method", "sft", "set train.method=grpo")
        if config.train.method == "sft"
        else (
            "sft.weight",
            config.sft.weight,
            "set sft.weight=0 and leave sft.final_weight out",
        )
    )
    rule = f"none of the {len(prompts.training)} training prompts has a target image to learn from"
    problem = Problem(key, value, rule, f"give the prompts targets, or {remedy}")
    raise ConfigError(describe_problems([problem]))


def check_scored(config: Config, scorer: Scorer, prompts: Prompts) -> list[str]:
    """Refuse prompts that no term can score; returns lines on terms that apply to few prompts."""
    lines = []
    for name, prompt_set in prompts.named():
        is_training = prompt_set is prompts.training
        # The training prompts of a supervised run are not scored.
        if not (is_training and config.train.method == "sft"):
            lines += check_prompts(
                scorer.terms,
                _each(prompt_set),
                set_name=f"{name} prompts",
                is_training=is_training,
            )
    if (
        config.rollout.dynamic_sampling_rounds
        and len(prompts.training) == config.rollout.prompts_per_step
    ):
        lines.append(
            "rollout.dynamic_sampling_rounds: every step samples all "
            f"{len(prompts.training)} training prompts, so none is left to replace one; add "
            "prompts or lower rollout.prompts_per_step"
        )
    return lines


def _each(prompt_set: PromptSource) -> Iterator[Prompt]:
    return (prompt_set[index] for index in range(len(prompt_set)))
