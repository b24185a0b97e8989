"""Will a config fit, and if not, which keys make it fit: found by planning again, not guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from glm_grpo.analysis.planned_sizes import batch_sizes, evaluation_sizes, model_settings
from glm_grpo.analysis.process_rules import refuse_for_processes
from glm_grpo.analysis.scorer_sizes import scorer_sizes
from glm_grpo.config import Config, effective_config
from glm_grpo.errors import ConfigError
from glm_grpo.glm_image.meta_models import read_part_configs
from glm_grpo.glm_image.plan import MemoryPlanner, ScorerSizes
from glm_grpo.glm_image.quantization import refuse_without_accelerator
from glm_grpo.glm_image.shards import ONE_PROCESS, Processes
from glm_grpo.report.memory_plan import MemoryAdvice, MemoryPlan

_Change = Mapping[str, Any]
"""Dotted keys and their values, set together."""


class ConfigPlanner:
    """Plans configs of one model.

    Args:
        path: Folder of the model, or the published model's hub id.
        prompt_tokens: Of the longest prompt, >= 1.
        is_on_accelerator: False: there is none, and everything is in CPU memory.
        processes: That train together; plans are of the one with the largest part.

    Raises:
        ModelError: The model's configs are not at hand.
        ConfigError: No prompt has so few tokens.
    """

    def __init__(
        self,
        path: str,
        *,
        prompt_tokens: int,
        is_on_accelerator: bool,
        processes: Processes = ONE_PROCESS,
    ) -> None:
        if prompt_tokens < 1:
            raise ConfigError(
                f"--prompt-tokens {prompt_tokens}: must be at least 1; give the tokens of the "
                "longest prompt"
            )
        self._planner = MemoryPlanner(read_part_configs(path))
        self._prompt_tokens = prompt_tokens
        self._scorers: dict[str, ScorerSizes] = {}
        self._is_on_accelerator = is_on_accelerator
        self._processes = processes

    def plan(self, config: Config) -> MemoryPlan:
        """Memory by phase.

        Raises:
            ConfigError: Weights of 4 bits are asked for where there is no accelerator, or so many
                processes cannot run it.
            RewardError: A term names a network that does not exist.
        """
        self._refuse_unfit(config)
        config = self._effective(config)
        key = config.reward.model_dump_json()
        if key not in self._scorers:
            self._scorers[key] = scorer_sizes(config.reward.terms.values())
        return self._planner.plan(
            model_settings(config, is_on_accelerator=self._is_on_accelerator),
            batch_sizes(config, prompt_tokens=self._prompt_tokens, processes=self._processes.count),
            self._scorers[key],
            config.offload,
            evaluation=evaluation_sizes(
                config, prompt_tokens=self._prompt_tokens, processes=self._processes.count
            ),
            processes=self._processes,
        )

    def advise(self, config: Config, memory: int) -> list[MemoryAdvice]:
        """Changes that make a config fit, those that alter the training least first.

        First changes of one key that suffice by themselves, for each key the mildest. Where there
        are none, one list of changes that suffice together, without those it can do without.

        Args:
            config: One that does not fit.
            memory: Bytes.

        Returns:
            Empty where nothing helps.
        """
        config = self._effective(config)
        alone = []
        for kind in _CHANGES:
            fitting = self._mildest(config, (), [*kind(config)], memory)
            if fitting is not None:
                alone.append(self._advice(config, [fitting]))
        return alone or self._advise_together(config, memory)

    def _advise_together(self, config: Config, memory: int) -> list[MemoryAdvice]:
        """All keys at their strongest, one after the other; then each relaxed as far as it goes."""
        chosen: list[tuple[_Change, list[_Change]]] = []
        for kind in _CHANGES:
            before = [strongest for strongest, _ in chosen]
            changes = [*kind(_changed(config, *before))]
            possible = self._possible(config, before, changes)
            if possible:
                chosen.append((possible[-1], changes))
            if self._fits(config, [strongest for strongest, _ in chosen], memory):
                break
        else:
            return []
        kept = [strongest for strongest, _ in chosen]
        for strongest, changes in reversed(chosen):
            at = kept.index(strongest)
            others = kept[:at] + kept[at + 1 :]
            if self._fits(config, others, memory):
                kept = others
                continue
            mildest = self._mildest(config, others, changes, memory)
            kept = [*kept[:at], strongest if mildest is None else mildest, *kept[at + 1 :]]
        return [self._advice(config, kept)]

    def _mildest(
        self, config: Config, others: Sequence[_Change], changes: list[_Change], memory: int
    ) -> _Change | None:
        """The first that suffices; none where not even the strongest, the last, does."""
        possible = self._possible(config, others, changes)
        if not possible or not self._fits(config, [*others, possible[-1]], memory):
            return None
        return next(each for each in possible if self._fits(config, [*others, each], memory))

    def _possible(
        self, config: Config, others: Sequence[_Change], changes: Sequence[_Change]
    ) -> list[_Change]:
        """Those that go together with the others in a config that a run here would take."""
        return [each for each in changes if self._runnable(config, [*others, each]) is not None]

    def _advice(self, config: Config, changes: Sequence[_Change]) -> MemoryAdvice:
        overrides = tuple(text for change in changes for text in _overrides(change))
        return MemoryAdvice(overrides, self.plan(_changed(config, *changes)).peak)

    def _fits(self, config: Config, changes: Sequence[_Change], memory: int) -> bool:
        """False also where no run would take the changed config."""
        changed = self._runnable(config, changes)
        return changed is not None and self.plan(changed).peak <= memory

    def _runnable(self, config: Config, changes: Sequence[_Change]) -> Config | None:
        """The changed config; none where it is not valid, or no run would take it here."""
        try:
            changed = _changed(config, *changes)
            self._refuse_unfit(changed)
        except (ValidationError, ConfigError):
            return None
        return changed

    def _effective(self, config: Config) -> Config:
        processes = self._processes
        return effective_config(
            config, processes=processes.count, is_sharded=processes.is_sharded
        ).config

    def _refuse_unfit(self, config: Config) -> None:
        refuse_without_accelerator(
            config.model.quantization, is_on_accelerator=self._is_on_accelerator
        )
        refuse_for_processes(config, self._processes)


def _changed(config: Config, *changes: _Change) -> Config:
    values = config.model_dump(mode="json")
    for change in changes:
        for key, value in change.items():
            *sections, name = key.split(".")
            section = values
            for part in sections:
                section = section[part]
            section[name] = value
    return Config.model_validate(values)


def _overrides(change: _Change) -> tuple[str, ...]:
    written = (f"{key}={_as_written(value)}" for key, value in change.items())
    # A shell would make several words of what stands in braces.
    return tuple(f"'{text}'" if "{" in text else text for text in written)


def _as_written(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_as_written(each)}" for key, each in value.items()) + "}"
    return str(value)


def _more_offload(config: Config) -> Iterator[_Change]:
    choices = ("none", "modules", "modules_and_optimizer")
    for choice in choices[choices.index(config.offload) + 1 :]:
        yield {"offload": choice}


def _smaller_micro_batches(config: Config) -> Iterator[_Change]:
    for size in range(config.train.micro_batch_size - 1, 0, -1):
        # Powers of two suffice to find the right order, and each plan takes a second or two.
        if size & (size - 1) == 0:
            yield {"train.micro_batch_size": size}


def _smaller_decodes(config: Config) -> Iterator[_Change]:
    at_once = min(config.decode.batch_size or config.rollout.group_size, config.rollout.group_size)
    for size in range(at_once - 1, 0, -1):
        if size & (size - 1) == 0:
            yield {"decode.batch_size": size}


def _checkpointing(config: Config) -> Iterator[_Change]:
    if not config.model.gradient_checkpointing:
        yield {"model.gradient_checkpointing": True}


def _smaller_adapters(config: Config) -> Iterator[_Change]:
    if config.model.adapter is None:
        yield {"model.adapter": {"rank": 32, "alpha": 64.0}}
        yield {"model.adapter": {"rank": 32, "alpha": 64.0}, "model.dtype": "bfloat16"}
    else:
        for rank in (32, 16, 8):
            if rank < config.model.adapter.rank:
                yield {"model.adapter.rank": rank}


def _fewer_bits(config: Config) -> Iterator[_Change]:
    decoder = {"decode.quantization": "float8"}
    if config.decode.quantization is None:
        yield decoder
    if config.model.quantization is None and config.model.adapter is not None:
        yield {**decoder, "model.quantization": "nf4"}


def _fewer_prompts(config: Config) -> Iterator[_Change]:
    for prompts in range(config.rollout.prompts_per_step - 1, 0, -1):
        if prompts & (prompts - 1) == 0:
            yield {"rollout.prompts_per_step": prompts}


def _smaller_groups(config: Config) -> Iterator[_Change]:
    for size in (16, 8, 4):
        if size < config.rollout.group_size:
            yield {"rollout.group_size": size}


def _smaller_pictures(config: Config) -> Iterator[_Change]:
    for side in (1024, 768, 512, 256):
        if side < min(config.rollout.height, config.rollout.width):
            yield {"rollout.height": side, "rollout.width": side}


_CHANGES: tuple[Callable[[Config], Iterator[_Change]], ...] = (
    _more_offload,
    _smaller_micro_batches,
    _smaller_decodes,
    _checkpointing,
    _smaller_adapters,
    _fewer_bits,
    _fewer_prompts,
    _smaller_groups,
    _smaller_pictures,
)
"""In the order of how little they change what is learnt: the first four change nothing."""
