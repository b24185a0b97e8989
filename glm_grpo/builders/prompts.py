"""Build the prompt sets of a run, and deal batches from them."""

from __future__ import annotations

from dataclasses import dataclass

from glm_grpo.builders.family import family_of
from glm_grpo.builders.models import model_path
from glm_grpo.config import Config
from glm_grpo.data.places import EMBEDDED
from glm_grpo.data.prompts import (
    PromptSource,
    check_prompts_suffice,
    evaluated_at_once,
    evaluation_batches,
    load_prompts,
)
from glm_grpo.errors import Errors
from glm_grpo.models.base import ReservedTokens
from glm_grpo.tiny.prompts import tiny_prompts
from glm_grpo.training.distributed.processes import ALONE, Processes
from glm_grpo.types import PromptBatch


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
    # First, because a path that is no model belongs to no family.
    reserved = family.check_model(path)
    family.check_keys(config)
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
    errors = Errors()
    with errors.collecting():
        training = build_prompt_set(config.data.path, config, reserved)
        check_prompts_suffice(training, prompts_per_step=config.rollout.prompts_per_step)
    with errors.collecting():
        held_out = build_prompt_set(config.data.eval_path, config, reserved)
    errors.raise_all()
    return Prompts(training=training, held_out=held_out)


def build_held_out(config: Config) -> PromptSource:
    """Check the model's files, then load and check only the held-out prompts.

    Raises:
        ModelError, DataError: As for `build_prompts`.
    """
    family = family_of(config.model.path)
    reserved = family.check_model(model_path(config.model.path))
    family.check_keys(config)
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


def build_evaluation_batches(
    config: Config, held_out: PromptSource, processes: Processes = ALONE
) -> list[PromptBatch]:
    """Held-out prompts of this process in batches, with the same seeds at every evaluation."""
    return evaluation_batches(
        held_out,
        processes.part(len(held_out)),
        prompts_per_batch=evaluated_at_once(
            config.rollout, config.eval.samples_per_prompt, processes.count
        ),
        samples_per_prompt=config.eval.samples_per_prompt,
        seed=config.eval.seed,
    )
