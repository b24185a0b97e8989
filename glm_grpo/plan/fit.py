"""Plan the memory of a config, and find keys that make it fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from glm_grpo.config import Config, effective_config
from glm_grpo.errors import ConfigError
from glm_grpo.models.find import find_model
from glm_grpo.models.planning import UNDIVIDED, MemoryPlan, Parallelism, Planner
from glm_grpo.output import describe_bytes
from glm_grpo.plan.memory import plan_memory
from glm_grpo.plan.processes import refuse_for_processes, refuse_without_accelerator

UNCERTAINTY = 0.1
"""Largest relative deviation of measured peaks from a plan."""

_Remedy = Mapping[str, Any]
"""Keys and values that are set together."""


def _remedies(config: Config, sides: Iterable[int]) -> Iterator[_Remedy]:
    """Remedies, least intrusive first; those before 8 bits only cost time.

    Remedies that do not apply are refused or save nothing, and are skipped.

    Args:
        sides: Smaller sides of images, in pixels.
    """
    rollout, adapter = config.rollout, config.model.adapter
    for choice in ("modules", "modules_and_optimizer"):
        yield {"offload": choice}
    yield from _smaller("train.micro_batch_size", (16, 8, 4, 2, 1), config.train.micro_batch_size)
    sampled = rollout.batch_size or rollout.prompts_per_step * rollout.group_size
    groups = (rollout.group_size * prompts for prompts in (8, 4, 2, 1))
    yield from _smaller("rollout.batch_size", groups, sampled)
    yield from _smaller("decode.vae_batch_size", (2, 1), config.decode.vae_batch_size or 1)
    drawn = min(config.decode.batch_size or rollout.group_size, rollout.group_size)
    yield from _smaller("decode.batch_size", (16, 8, 4, 2, 1), drawn)
    yield {"model.gradient_checkpointing": True}
    yield {"decode.quantization": "float8"}
    ranks = (32, 16, 8)
    if adapter is None:
        yield from ({"model.adapter": {"rank": rank, "alpha": 64.0}} for rank in ranks)
    else:
        yield from _smaller("model.adapter.rank", ranks, adapter.rank)
    yield {"model.dtype": "bfloat16"}
    yield {"model.quantization": "nf4"}
    prompts = (32, 16, 8, 4, 2, 1)
    yield from _smaller("rollout.prompts_per_step", prompts, rollout.prompts_per_step)
    yield from _smaller("rollout.group_size", (16, 8, 4), rollout.group_size)
    for side in sides:
        if side < min(rollout.height, rollout.width):
            yield {"rollout.height": side, "rollout.width": side}


def _smaller(key: str, sizes: Iterable[int], than: int) -> Iterator[_Remedy]:
    return ({key: size} for size in sizes if size < than)


@dataclass(frozen=True)
class MemoryAdvice:
    """Settings with which a run fits.

    Attributes:
        overrides: Command-line overrides to set together; empty if nothing makes it fit.
        peak: Peak bytes with them.
    """

    overrides: tuple[str, ...]
    peak: int

    def describe(self, memory: int) -> str:
        """Describe what to change."""
        if not self.overrides:
            return "no change of a single key makes it fit, nor do all of them together"
        return (
            f"it fits with {' '.join(self.overrides)}: {describe_bytes(self.peak)}, "
            f"{describe_bytes(memory - self.peak)} free"
        )


class ConfigPlanner:
    """Plans the memory of configs of one model.

    Args:
        prompt_tokens: Tokens of the longest prompt, >= 1.
        is_on_accelerator: Whether there is an accelerator; if not, everything is in CPU memory.
        parallelism: Processes that train together; plans are for the one with the largest part.

    Raises:
        ConfigError: No prompt can have so few tokens.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        prompt_tokens: int,
        is_on_accelerator: bool,
        parallelism: Parallelism = UNDIVIDED,
    ) -> None:
        if prompt_tokens < 1:
            raise ConfigError(
                f"--prompt-tokens {prompt_tokens}: must be at least 1; give the tokens of the "
                "longest prompt"
            )
        self._planner = planner
        self._prompt_tokens = prompt_tokens
        self._is_on_accelerator = is_on_accelerator
        self._parallelism = parallelism

    def plan(self, config: Config) -> MemoryPlan:
        """Plan memory by phase."""
        return plan_memory(
            self._planner,
            self._effective(config),
            prompt_tokens=self._prompt_tokens,
            is_on_accelerator=self._is_on_accelerator,
            parallelism=self._parallelism,
        )

    def refuse_misfit(self, config: Config) -> None:
        """Refuse what the processes, or their devices, cannot run."""
        refuse_without_accelerator(
            config.model.quantization, is_on_accelerator=self._is_on_accelerator
        )
        refuse_for_processes(config, self._parallelism)

    def advise(self, config: Config, memory: int) -> MemoryAdvice:
        """Find keys that make a config fit: add helpful remedies in order until it fits.

        Then drop those that turn out to be unnecessary, the latest first.

        Args:
            config: Config that does not fit.
            memory: Available bytes.
        """
        config = self._effective(config)
        plan, chosen = self.plan(config), dict[tuple[str, ...], _Remedy]()
        for remedy in _remedies(config, self._planner.smaller_sides):
            if plan.peak <= memory:
                break
            # A stronger remedy for the same keys replaces the earlier one.
            with_it = {**chosen, tuple(remedy): remedy}
            helped = self._plan_changed(config, with_it.values())
            if helped is not None and helped.excess(memory) < plan.excess(memory):
                plan, chosen = helped, with_it
        if plan.peak > memory:
            return MemoryAdvice((), plan.peak)
        for keys in reversed(tuple(chosen)):
            without = {each: chosen[each] for each in chosen if each != keys}
            fitting = self._plan_changed(config, without.values())
            if fitting is not None and fitting.peak <= memory:
                plan, chosen = fitting, without
        changes = (change for remedy in chosen.values() for change in remedy.items())
        return MemoryAdvice(tuple(_written(*change) for change in changes), plan.peak)

    def _plan_changed(self, config: Config, remedies: Iterable[_Remedy]) -> MemoryPlan | None:
        """Plan with remedies applied; None if they are not allowed here or conflict."""
        try:
            changed = _changed(config, remedies)
            find_model(config.model.path).family.check_keys(changed)
            self.refuse_misfit(changed)
            return self.plan(changed)
        except (ValidationError, ConfigError):
            return None

    def _effective(self, config: Config) -> Config:
        parallelism = self._parallelism
        return effective_config(
            config, processes=parallelism.count, is_sharded=parallelism.is_sharded
        ).config


def _changed(config: Config, remedies: Iterable[_Remedy]) -> Config:
    values = config.model_dump(mode="json")
    for key, value in (change for remedy in remedies for change in remedy.items()):
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section = section[part]
        section[name] = value
    return Config.model_validate(values)


def _written(key: str, value: Any) -> str:
    """Format an override for a shell, quoting braces that it would expand."""
    if isinstance(value, Mapping):
        return f"'{key}={{{', '.join(f'{name}: {each}' for name, each in value.items())}}}'"
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"
