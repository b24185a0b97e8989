"""Memory of a run by phase and by what takes it: arithmetic on the parts of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from torch import nn

from glm_grpo.config import Config
from glm_grpo.models.base import UNDIVIDED, Parallelism
from glm_grpo.models.glm_image.loading import DTYPES
from glm_grpo.models.glm_image.memory import (
    BatchSizes,
    ModelSettings,
    ShardBytes,
    UpdateBytes,
    backward_bytes,
    build_meta_policy,
    cache_token_bytes,
    decode_bytes,
    gradient_bytes,
    rollout_bytes,
    scoring_bytes,
    shard_bytes,
    update_bytes,
    update_on_shards,
)
from glm_grpo.models.glm_image.meta import PartConfigs, build_decoder, module_bytes, pinned_bytes
from glm_grpo.models.glm_image.policy import GlmImagePolicy
from glm_grpo.models.glm_image.quantization import Quantization
from glm_grpo.models.offload import NEEDED
from glm_grpo.plan.scorers import ScorerSizes
from glm_grpo.training.data.prompts import evaluated_at_once

PHASES = ("rollout", "decode", "reward", "update", "idle")
"""Of a step; idle is what stays on the accelerator whatever the phase."""

OVERHEAD_BYTES = 600 * 10**6
"""Of a CUDA context with cuBLAS and cuDNN: what drivers take before the first tensor, roughly."""

Offload = Literal["none", "modules", "modules_and_optimizer"]

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class MemoryItem:
    """One thing that takes memory.

    Attributes:
        name: For people.
        by_phase: Bytes on the accelerator; 0 where a phase is left out.
        cpu: Bytes in CPU memory for the whole run, where it waits there or stays there.
    """

    name: str
    by_phase: Mapping[str, int]
    cpu: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """What a run takes.

    Attributes:
        items: In the order they are shown.
        is_on_accelerator: False: there is none, and phases are in CPU memory like all else.
        overhead: Bytes that driver and libraries take on the accelerator.
        cpu_at_start: Most bytes in CPU memory while the models are loaded.
        moved_in: Bytes that offloading copies to the accelerator in one step.
        moved_out: Bytes that offloading copies back in one step.
    """

    items: tuple[MemoryItem, ...]
    is_on_accelerator: bool
    overhead: int
    cpu_at_start: int
    moved_in: int
    moved_out: int

    def total(self, phase: str) -> int:
        """Bytes of a phase where it runs, overhead included."""
        cpu = 0 if self.is_on_accelerator else self.cpu
        return self.overhead + cpu + sum(item.by_phase.get(phase, 0) for item in self.items)

    def excess(self, memory: int) -> int:
        """Bytes of all phases beyond what there is."""
        return sum(max(0, self.total(phase) - memory) for phase in PHASES)

    @property
    def cpu(self) -> int:
        """Bytes that lie in CPU memory for the whole run."""
        return sum(item.cpu for item in self.items)

    @property
    def peak_phase(self) -> str:
        """The phase that takes most."""
        return max(PHASES, key=self.total)

    @property
    def peak(self) -> int:
        """Bytes of that phase: what --memory is held against."""
        return self.total(self.peak_phase)


def model_settings(config: Config, *, is_on_accelerator: bool) -> ModelSettings:
    """How the policy is held."""
    adapter = config.model.adapter
    return ModelSettings(
        dtype=DTYPES[config.model.dtype],
        adapter_rank=None if adapter is None else adapter.rank,
        is_checkpointing=config.model.gradient_checkpointing,
        needs_reference=config.loss.kl_coef > 0,
        is_on_accelerator=is_on_accelerator,
        quantization=Quantization(
            language=config.model.quantization, decoder=config.decode.quantization
        ),
    )


def batch_sizes(config: Config, *, prompt_tokens: int, processes: int = 1) -> BatchSizes:
    """What one step works on, in the process that has most of it.

    Args:
        config: Of the run.
        prompt_tokens: Of the longest prompt.
        processes: That share the prompts.
    """
    rollout = config.rollout
    prompts = math.ceil(rollout.prompts_per_step / processes)
    return BatchSizes(
        prompts=prompts,
        group_size=rollout.group_size,
        height=rollout.height,
        width=rollout.width,
        prompt_tokens=prompt_tokens,
        micro_batch_size=min(config.train.micro_batch_size, prompts * rollout.group_size),
        is_truncated=rollout.top_k is not None
        or (rollout.top_p is not None and rollout.top_p < 1.0),
        decode_batch_size=config.decode.batch_size,
    )


def evaluation_sizes(config: Config, *, prompt_tokens: int, processes: int = 1) -> BatchSizes:
    """What an evaluation works on at once, if there are as many held-out prompts."""
    sizes = batch_sizes(config, prompt_tokens=prompt_tokens, processes=processes)
    samples = config.eval.samples_per_prompt
    images = config.rollout.prompts_per_step * config.rollout.group_size // processes
    return replace(sizes, prompts=evaluated_at_once(images, samples), group_size=samples)


@dataclass(frozen=True)
class _Part:
    """Modules that move together: their bytes, and those that training changes."""

    name: str
    needs: str
    size: int
    pinned: int
    trained: int = 0


class MemoryPlanner:
    """Plans runs of one model; what was measured for one plan serves the next.

    Args:
        configs: Of the model.
    """

    def __init__(self, configs: PartConfigs) -> None:
        self._configs = configs
        self._known: dict[tuple[object, ...], object] = {}

    def plan(
        self,
        model: ModelSettings,
        sizes: BatchSizes,
        scorers: ScorerSizes,
        offload: Offload,
        *,
        evaluation: BatchSizes | None = None,
        processes: Parallelism = UNDIVIDED,
    ) -> MemoryPlan:
        """Plans a run, or each process of it.

        Counted are weights, gradients, optimizer state, caches and activations. Not counted are
        the activations of the scorers, scratch space inside operations, what a caching allocator
        cannot use between its blocks, and the program with its libraries in CPU memory.

        Args:
            model: How the policy is held.
            sizes: What a step works on in this process.
            scorers: Weights of the reward terms.
            offload: What waits in CPU memory; of no effect without an accelerator, nor for shards
                of the policy, which stay where they are.
            evaluation: What an evaluation samples and decodes at once, where there is one.
            processes: That train together.
        """
        is_offloading = offload != "none" and model.is_on_accelerator
        is_state_moved = offload == "modules_and_optimizer" and model.is_on_accelerator
        held = _without_update(model)
        language, policy = self._once(
            build_meta_policy, replace(held, needs_reference=model.needs_reference)
        )
        decoder = self._once(build_decoder, model.dtype, model.quantization.decoder is not None)
        shards = shard_bytes(policy, processes) if processes.is_sharded else None
        parts = [
            *(_policy_parts(policy, model) if shards is None else []),
            _part("reference copy", "reference", policy.reference_modules()),
            _part("decoder", "decoder", decoder),
            _Part("scorers", "rewards", scorers.movable, scorers.movable),
        ]
        state = 2 * (gradient_bytes(policy) if shards is None else shards.trained)
        vision = module_bytes([language.model.visual, language.model.vqmodel])
        update = self._update(model, replace(sizes, decode_batch_size=None), policy, shards)
        # DDP joins gradients in copies that it keeps.
        is_copying = processes.count > 1 and not processes.is_sharded
        rollout, prompt_cache, sample_cache = max(
            self._rollout(held, each, cache_token_bytes(language, model.dtype))
            for each in (sizes, evaluation or sizes)
        )
        group_size = max(sizes.group_size, (evaluation or sizes).group_size)
        drawn = replace(
            sizes, group_size=group_size, micro_batch_size=1, prompts=1, is_truncated=False
        )
        activations = {
            "rollout": max(0, rollout - prompt_cache - sample_cache),
            "decode": self._once(decode_bytes, replace(held, adapter_rank=None), drawn),
            "update": update.activations,
        }
        items = [
            *([] if shards is None else _shard_items(shards, update)),
            *[_weights_item(part, is_offloading) for part in parts],
            MemoryItem("scorers in own processes", _always(scorers.staying)),
            MemoryItem("scorers on the CPU", {}, cpu=scorers.on_cpu),
            MemoryItem("vision tower and VQ", {}, cpu=vision),
            MemoryItem(
                "optimizer state",
                {"update": state} if is_state_moved else _always(state),
                cpu=state if is_state_moved else 0,
            ),
            MemoryItem("gradients", {"update": update.gradients}),
            MemoryItem("gradient buckets", _always(gradient_bytes(policy) if is_copying else 0)),
            MemoryItem("cache of the prompts", {"rollout": prompt_cache}),
            MemoryItem("cache of the samples", {"rollout": sample_cache}),
            MemoryItem("activations", activations),
            MemoryItem("experience", {}, cpu=_experience_bytes(sizes, policy.codebook_size)),
        ]
        moving = parts if is_offloading else []
        return MemoryPlan(
            items=tuple(item for item in items if item.cpu or any(item.by_phase.values())),
            is_on_accelerator=model.is_on_accelerator,
            overhead=OVERHEAD_BYTES if model.is_on_accelerator else 0,
            cpu_at_start=_cpu_at_start(parts, shards, policy, is_offloading=is_offloading)
            + vision
            + scorers.on_cpu,
            moved_in=sum(part.size for part in moving) + is_state_moved * state,
            moved_out=sum(part.trained for part in moving) + is_state_moved * state,
        )

    def _update(
        self,
        model: ModelSettings,
        sizes: BatchSizes,
        policy: GlmImagePolicy,
        shards: ShardBytes | None,
    ) -> UpdateBytes:
        if shards is None:
            gradients = gradient_bytes(policy)
            replaying = self._once(update_bytes, model, sizes) - gradients
            return UpdateBytes(gradients, 0, max(0, replaying))
        return update_on_shards(
            shards,
            scoring=self._once(scoring_bytes, model, sizes),
            backward=self._once(backward_bytes, model, sizes),
        )

    def _rollout(
        self, held: ModelSettings, sizes: BatchSizes, a_token: int
    ) -> tuple[int, int, int]:
        """Most that sampling takes, and its caches: a prompt's is kept once for its group."""
        drawn = replace(sizes, micro_batch_size=1, decode_batch_size=None)
        return (
            self._once(rollout_bytes, held, drawn),
            sizes.prompts * sizes.prompt_tokens * a_token,
            sizes.images * sizes.tokens * a_token,
        )

    def _once(self, find: Callable[..., _Found], *arguments: object) -> _Found:
        """Of the model and hashable arguments."""
        key = (find, *arguments)
        if key not in self._known:
            self._known[key] = find(self._configs, *arguments)
        found: _Found = self._known[key]  # type: ignore[assignment]
        return found


def _without_update(model: ModelSettings) -> ModelSettings:
    """How the policy is held where nothing is learnt, so that it is measured once for all plans."""
    return replace(model, is_checkpointing=False, needs_reference=False, is_on_accelerator=False)


def _part(name: str, needs: str, modules: Sequence[nn.Module]) -> _Part:
    return _Part(name, needs, module_bytes(modules), pinned_bytes(modules))


def _policy_parts(policy: GlmImagePolicy, model: ModelSettings) -> list[_Part]:
    """Frozen weights and adapters, or all of it where it is trained in full."""
    trained = gradient_bytes(policy)
    adapters = 0 if model.adapter_rank is None else trained
    frozen = module_bytes(policy.modules()) - adapters
    pinned = pinned_bytes(policy.modules())
    return [
        _Part("language model and head", "policy", frozen, pinned, trained - adapters),
        _Part("adapters", "policy", adapters, 0, adapters),
    ]


def _weights_item(part: _Part, is_offloading: bool) -> MemoryItem:
    if not is_offloading:
        return MemoryItem(part.name, _always(part.size))
    phases = [phase for phase, needed in NEEDED.items() if part.needs in needed]
    return MemoryItem(part.name, dict.fromkeys(phases, part.size), cpu=part.pinned)


def _shard_items(shards: ShardBytes, update: UpdateBytes) -> list[MemoryItem]:
    together = dict.fromkeys(("rollout", "decode", "reward"), shards.whole)
    return [
        MemoryItem("policy, own shards", _always(shards.frozen + shards.trained)),
        MemoryItem("policy, put together", {**together, "update": update.whole}),
    ]


def _always(size: int) -> Mapping[str, int]:
    return dict.fromkeys(PHASES, size)


def _experience_bytes(sizes: BatchSizes, entries: int) -> int:
    """Pictures, token ids, log-probs, and which entries could be drawn."""
    a_token = 8 + 4 + (entries if sizes.is_truncated else 0)
    return sizes.images * (3 * sizes.height * sizes.width + a_token * sizes.tokens)


def _cpu_at_start(
    parts: Sequence[_Part],
    shards: ShardBytes | None,
    policy: GlmImagePolicy,
    *,
    is_offloading: bool,
) -> int:
    """All weights are loaded before they move; pinned copies of a part stand beside it at first.

    A policy that is cut up stays until the others have moved.
    """
    staying, upcast = (0, 0) if shards is None else (module_bytes(policy.modules()), shards.upcast)
    loaded = sum(part.size for part in parts) + staying
    if not is_offloading:
        return max(loaded, upcast)
    peak = pinned = 0
    for part in parts:
        pinned += part.pinned
        peak = max(peak, loaded + pinned)
        loaded -= part.size
    return max(peak, pinned + upcast if shards is not None else 0)
