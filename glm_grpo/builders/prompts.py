"""Build and check the prompt sets of a run, and deal batches from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from glm_grpo.builders.family import family_of
from glm_grpo.builders.models import model_path
from glm_grpo.config import TINY, Config
from glm_grpo.data.files import shorten
from glm_grpo.data.places import EMBEDDED
from glm_grpo.data.prompts import (
    PromptSource,
    SparePrompts,
    batch_for_step,
    check_prompts_suffice,
    evaluated_at_once,
    evaluation_batches,
    load_prompts,
    spares_for_step,
)
from glm_grpo.errors import ConfigError
from glm_grpo.models.base import ReservedTokens
from glm_grpo.models.family import ModelFamily
from glm_grpo.output import printable
from glm_grpo.tiny.prompts import is_known, known_form, tiny_prompts
from glm_grpo.training.distributed.processes import ALONE, Processes
from glm_grpo.training.phase import Models
from glm_grpo.types import PromptBatch
from rewards.problems import Problem, describe_problems
from rewards.texts import find_quoted_texts, is_blank
from rewards.types import Prompt

_MOST_NAMED = 3
"""Largest number of prompts that a hint names."""
_ASKING = "a prompt asks for a text in quotation marks, or by the field `text`"


@dataclass(frozen=True)
class Prompts:
    """The two prompt sets of a run."""

    training: PromptSource
    held_out: PromptSource

    def named(self) -> tuple[tuple[str, PromptSource], ...]:
        """Both prompt sets, with their names for messages."""
        return ("training", self.training), ("held-out", self.held_out)


def check_model(config: Config) -> ReservedTokens:
    """Check the model's files; returns the texts that no prompt may contain.

    Raises:
        ConfigError, ModelError: There is no model, or its files cannot be used.
    """
    family, path = family_of(config.model.path), model_path(config.model.path)
    reserved = family.check_model(path)
    family.check_sizes(path, config)
    return reserved


def build_prompts(config: Config, reserved: ReservedTokens | None = None) -> Prompts:
    """Load and check both prompt sets.

    Args:
        reserved: From `check_model`; None: call it first.

    Raises:
        ConfigError, ModelError: As for `check_model`.
        DataError: A prompt cannot be used, or there are fewer than a step takes.
    """
    if reserved is None:
        reserved = check_model(config)
    training = build_prompt_set(config.data.path, config, reserved)
    check_prompts_suffice(training, prompts_per_step=config.rollout.prompts_per_step)
    return Prompts(
        training=training,
        held_out=build_prompt_set(config.data.eval_path, config, reserved),
    )


def build_held_out(config: Config) -> PromptSource:
    """Check the model's files, then load and check only the held-out prompts.

    Raises:
        ModelError, DataError: As for `build_prompts`.
    """
    reserved = family_of(config.model.path).check_model(model_path(config.model.path))
    return build_prompt_set(config.data.eval_path, config, reserved)


def build_prompt_set(path: str, config: Config, reserved: ReservedTokens) -> PromptSource:
    """Load prompts of a file, a folder, a hub data set, or the embedded world (`tiny:...`).

    Args:
        reserved: Texts that no prompt may contain.
    """
    height, width = config.rollout.height, config.rollout.width
    if path.startswith(EMBEDDED):
        name = path.removeprefix(EMBEDDED)
        return tiny_prompts(name, height=height, width=width, sources=config.data.sources)
    return load_prompts(
        path, height=height, width=width, reserved=reserved, sources=config.data.sources
    )


def hint_at_prompts(config: Config, prompts: Prompts) -> list[str]:
    """Hints on prompts that are valid but probably not as intended; needs no model."""
    lines = []
    if config.model.path == TINY:
        is_edit = config.data.sources > 0
        for of, prompt_set in prompts.named():
            rows = [
                row
                for row, caption in enumerate(prompt_set.captions())
                if not is_known(caption, is_edit=is_edit)
            ]
            if rows:
                lines.append(
                    f"{len(rows)} of {len(prompt_set)} {of} prompts are not of the form "
                    f"{known_form(is_edit=is_edit)} that the embedded model knows: "
                    f"{_name_some(prompt_set, rows)}"
                )
    family = family_of(config.model.path)
    lines += [line for of, each in prompts.named() for line in _hint_at_glyphs(family, of, each)]
    trained = set(prompts.training.identities())
    rows = [row for row, each in enumerate(prompts.held_out.identities()) if each in trained]
    if rows:
        lines.append(
            f"{len(rows)} of {len(prompts.held_out)} held-out prompts are also trained on: "
            f"{_name_some(prompts.held_out, rows)}"
        )
    return lines


def _hint_at_glyphs(family: ModelFamily, of: str, prompt_set: PromptSource) -> list[str]:
    """Hint on prompts whose quoted texts differ from those that the glyph encoder reads."""
    differing = {}
    for row, caption in enumerate(prompt_set.captions()):
        quoted = sorted(find_quoted_texts(caption))
        read = sorted(
            text.strip() for text in family.find_glyph_texts(caption) if not is_blank(text)
        )
        if read != quoted:
            differing[row] = f"{_list_some(read)} for {_list_some(quoted)}"
    if not differing:
        return []
    return [
        f"in {len(differing)} of {len(prompt_set)} {of} prompts the model's glyph encoder reads "
        f"other texts than the quoted ones: {_name_some(prompt_set, differing)}; {family.QUOTING}"
    ]


def list_texts(config: Config, prompts: Prompts) -> list[str]:
    """Lines on the texts that the reward asks for; empty if no term reads them."""
    if not any("text" in term.needs() for term in config.reward.terms.values()):
        return []
    lines = []
    for of, prompt_set in prompts.named():
        asked = {row: _list_some(each) for row, each in enumerate(prompt_set.texts()) if each}
        named = f": {_name_some(prompt_set, asked)}" if asked else f"; {_ASKING}"
        lines.append(f"texts asked for in {len(asked)} of {len(prompt_set)} {of} prompts{named}")
    return lines


def check_tied(config: Config, prompts: Prompts) -> None:
    """Refuse a reward that, on these training prompts, uses only the picture.

    `only` is not regarded here: which terms match no id is a hint of `check_prompt_sets`.

    Raises:
        ConfigError: No training prompt has what a tied term needs.
    """
    reward, training = config.reward, prompts.training
    if reward.allow_untied or config.train.method == "sft":
        return
    has = {
        "prompt": True,
        "text": any(training.texts()),
        "target": training.has_targets(),
        "source": config.data.sources > 0,
    }
    weights = {name: weight for name, weight in reward.weights().items() if weight != 0}
    needs = {name: reward.terms[name].needs() for name in weights if reward.terms[name].needs()}
    if any(all(has[need] for need in each) for each in needs.values()):
        return
    others = ", ".join(name for name in weights if name not in needs) or "nothing"
    remedies = {
        "text": "quote the text to be rendered in the prompt, or give it in the field `text`",
        "target": "give the prompts target images (field `target`)",
        "source": "set data.sources and give the prompts sources",
    }
    missing = dict.fromkeys(need for each in needs.values() for need in each if not has[need])
    raise ConfigError(
        f"reward.terms: none of the {len(training)} training prompts has what the terms "
        f"{', '.join(needs)} need, so only {others} would be trained on: one picture that scores "
        f"well would do for every prompt. Remedies: {'; '.join(remedies[need] for need in missing)}"
        "; add a term that applies to every prompt (+reward.terms.clip_score.weight=0.5); or set "
        "reward.allow_untied=true"
    )


def check_prompt_sets(config: Config, models: Models, prompts: Prompts) -> list[str]:
    """Refuse prompts that no term can score; returns lines on terms that apply to few prompts.

    Raises:
        RewardError: See `Scorer.check_prompts`.
        ConfigError: The run learns from target images, but no training prompt has one.
    """
    lines = []
    for of, prompt_set in prompts.named():
        is_training = prompt_set is prompts.training
        # The training prompts of a supervised run are not scored.
        if not (is_training and config.train.method == "sft"):
            lines += models.scorer.check_prompts(
                _each(prompt_set), of=f"{of} prompts", is_training=is_training
            )
    if config.rollout.refill_rounds and len(prompts.training) == config.rollout.prompts_per_step:
        lines.append(
            f"rollout.refill_rounds: every step samples all {len(prompts.training)} training "
            "prompts, so none is left to replace one; add prompts or lower rollout.prompts_per_step"
        )
    if config.reads_targets and all(each.target is None for each in _each(prompts.training)):
        raise _missing_targets_error(config, len(prompts.training))
    return lines


def _each(prompt_set: PromptSource) -> Iterator[Prompt]:
    return (prompt_set[index] for index in range(len(prompt_set)))


def _missing_targets_error(config: Config, count: int) -> ConfigError:
    key, value, remedy = (
        ("train.method", "sft", "set train.method=grpo")
        if config.train.method == "sft"
        else (
            "anchor.weight",
            config.anchor.weight,
            "set anchor.weight=0 and leave anchor.final_weight out",
        )
    )
    rule = f"none of the {count} training prompts has a target image to learn from"
    problem = Problem(key, value, rule, f"give the prompts targets, or {remedy}")
    return ConfigError(describe_problems([problem]))


def _name_some(prompt_set: PromptSource, rows: Iterable[int] | Mapping[int, str]) -> str:
    """Ids of the first prompts, with a remark on each."""
    said = rows if isinstance(rows, Mapping) else dict.fromkeys(rows, "")
    # Accessing a prompt loads its pictures.
    named = [
        printable(f"{prompt_set[row].prompt_id} {text}".rstrip())
        for row, text in islice(said.items(), _MOST_NAMED)
    ]
    return ", ".join([*named, *(["..."] if len(said) > _MOST_NAMED else [])])


def _list_some(texts: Sequence[str]) -> str:
    """The first texts, each shortened."""
    shown = [*map(shorten, texts[:_MOST_NAMED]), *(["..."] if len(texts) > _MOST_NAMED else [])]
    return " and ".join(shown) or "nothing"


def build_batch(config: Config, prompts: PromptSource, step: int) -> PromptBatch:
    """Batch of a step, from 0."""
    return batch_for_step(
        prompts,
        step=step,
        seed=config.train.seed,
        prompts_per_step=config.rollout.prompts_per_step,
        group_size=config.rollout.group_size,
    )


def build_spares(config: Config, prompts: PromptSource, step: int) -> SparePrompts:
    """Prompts that can replace those of a step, from 0."""
    return spares_for_step(
        prompts,
        step=step,
        seed=config.train.seed,
        prompts_per_step=config.rollout.prompts_per_step,
        group_size=config.rollout.group_size,
    )


def build_evaluation_batches(
    config: Config, held_out: PromptSource, processes: Processes = ALONE
) -> list[PromptBatch]:
    """Held-out prompts of this process in batches, with the same seeds at every evaluation."""
    images = config.rollout.prompts_per_step * config.rollout.group_size // processes.count
    return evaluation_batches(
        held_out,
        processes.part(len(held_out)),
        prompts_per_batch=evaluated_at_once(images, config.eval.samples_per_prompt),
        samples_per_prompt=config.eval.samples_per_prompt,
        seed=config.eval.seed,
    )
