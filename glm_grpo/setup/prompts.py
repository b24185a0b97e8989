"""The two prompt sets of a run, and batches of the held-out one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from glm_grpo.config import Config
from glm_grpo.data.places import EMBEDDED
from glm_grpo.data.prompts import (
    PromptSource,
    check_prompts_suffice,
    evaluated_at_once,
    evaluation_batches,
    load_prompts,
)
from glm_grpo.errors import ConfigError, Errors
from glm_grpo.models.base import ReservedTokens
from glm_grpo.tiny.prompts import embedded_prompts
from glm_grpo.training.distributed.processes import ALONE, Processes
from glm_grpo.types import PromptBatch
from rewards.problems import Problem, describe_problems


@dataclass(frozen=True)
class Prompts:
    """The two prompt sets of a run."""

    training: PromptSource
    held_out: PromptSource

    def named(self) -> tuple[tuple[str, PromptSource], ...]:
        """Both prompt sets, with their names for messages."""
        return ("training", self.training), ("held-out", self.held_out)


def read_prompts(
    config: Config, reserved: ReservedTokens, check: Callable[..., None] | None = None
) -> Prompts:
    """Read and check both prompt sets.

    Args:
        reserved: Texts that no prompt may contain.
        check: Refuses prompts that the reward cannot score, see `check_metadata`.
    """
    errors = Errors()
    with errors.collecting():
        check_training = None if check is None else partial(check, is_training=True)
        training = read_prompt_set(config.data.path, config, reserved, check_training)
        check_prompts_suffice(training, prompts_per_step=config.rollout.prompts_per_step)
    with errors.collecting():
        held_out = read_held_out(config, reserved, check)
    errors.raise_all()
    return Prompts(training=training, held_out=held_out)


def read_held_out(
    config: Config, reserved: ReservedTokens, check: Callable[..., None] | None = None
) -> PromptSource:
    """Read and check the held-out prompts; refuse to group them by a column that none has.

    Args:
        reserved: Texts that no prompt may contain.
        check: As for `read_prompts`.
    """
    held_out = read_prompt_set(config.data.eval_path, config, reserved, check)
    column = config.eval.group_by
    columns = dict.fromkeys(name for row in held_out.metadata() for name in row)
    if column is not None and column not in columns:
        rule = f"is no column of {held_out.path}"
        remedy = f"name one of {', '.join(columns)}" if columns else "leave it out: it has none"
        raise ConfigError(describe_problems([Problem("eval.group_by", column, rule, remedy)]))
    return held_out


def read_prompt_set(
    path: str,
    config: Config,
    reserved: ReservedTokens,
    check: Callable[[PromptSource], None] | None = None,
) -> PromptSource:
    """Read prompts of a file, a folder, a hub data set, or the embedded world (`tiny:...`).

    Args:
        reserved: Texts that no prompt may contain.
        check: As for `load_prompts`.
    """
    height, width = config.rollout.height, config.rollout.width
    if path.startswith(EMBEDDED):
        name = path.removeprefix(EMBEDDED)
        prompts = embedded_prompts(name, height=height, width=width, sources=config.data.sources)
        if check is not None:
            check(prompts)
        return prompts
    return load_prompts(
        path,
        height=height,
        width=width,
        reserved=reserved,
        sources=config.data.sources,
        check=check,
    )


def held_out_batches(
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
