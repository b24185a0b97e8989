"""Will it fit? Memory of a run by phase, from configs alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from glm_grpo.glm_image.decode_memory import decode_bytes
from glm_grpo.glm_image.meta_memory import module_bytes, pinned_bytes
from glm_grpo.glm_image.meta_models import PartConfigs, build_decoder
from glm_grpo.glm_image.phase_memory import (
    BatchSizes,
    ModelSettings,
    build_meta_policy,
    cache_bytes,
    gradient_bytes,
    rollout_bytes,
    update_bytes,
)
from glm_grpo.glm_image.policy import Policy
from glm_grpo.glm_image.residency import NEEDED
from glm_grpo.glm_image.shards import (
    ONE_PROCESS,
    Processes,
    ShardBytes,
    UpdateBytes,
    backward_bytes,
    scoring_bytes,
    shard_bytes,
    update_on_shards,
)
from glm_grpo.report.memory_plan import PHASES, MemoryItem, MemoryPlan, PhaseBytes

OVERHEAD_BYTES = 600 * 10**6
"""Of a CUDA context with cuBLAS and cuDNN: what drivers take before the first tensor, roughly."""

Offload = Literal["none", "modules", "modules_and_optimizer"]


@dataclass(frozen=True)
class ScorerSizes:
    """Weights of the reward terms, bytes.

    Attributes:
        movable: Of networks that wait in CPU memory when modules are offloaded.
        staying: Of networks in processes of their own, which no one moves.
        on_cpu: Of engines that run on the CPU in any case.
    """

    movable: int = 0
    staying: int = 0
    on_cpu: int = 0


@dataclass(frozen=True)
class _Part:
    """Modules that move together: their bytes, and those that training changes."""

    name: str
    needs: str
    size: int
    pinned: int
    trained: int = 0


_Models = tuple[Any, Policy, Sequence[nn.Module]]


class MemoryPlanner:
    """Plans runs of one model; what was measured for one plan serves the next.

    Args:
        configs: Of the model.
    """

    def __init__(self, configs: PartConfigs) -> None:
        self._configs = configs
        self._known: dict[tuple[Any, ...], int] = {}
        self._built: dict[ModelSettings, _Models] = {}

    def plan(
        self,
        model: ModelSettings,
        sizes: BatchSizes,
        scorers: ScorerSizes,
        offload: Offload,
        *,
        evaluation: BatchSizes | None = None,
        processes: Processes = ONE_PROCESS,
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
        language, policy, decoder = self._build(model)
        shards = shard_bytes(policy, processes) if processes.is_sharded else None
        trained = gradient_bytes(policy) if shards is None else shards.trained
        parts = [
            *(_policy_parts(policy, model) if shards is None else []),
            _part("reference copy", "reference", policy.reference_modules()),
            _part("decoder", "decoder", decoder),
            _Part("scorers", "rewards", scorers.movable, scorers.movable),
        ]
        state = 2 * trained
        is_state_moved = offload == "modules_and_optimizer" and model.is_on_accelerator
        vision = module_bytes([language.model.visual, language.model.vqmodel])
        update = self._update(model, sizes, policy, shards)
        items = [
            *([] if shards is None else _shard_items(shards, update)),
            *[_weights_item(part, is_offloading) for part in parts if part.size],
            MemoryItem("scorers in own processes", _always(scorers.staying)),
            MemoryItem("scorers on the CPU", {}, cpu=scorers.on_cpu),
            MemoryItem("vision tower and VQ", {}, cpu=vision),
            MemoryItem(
                "optimizer state",
                {"update": state} if is_state_moved else _always(state),
                cpu=state if is_state_moved else 0,
            ),
            MemoryItem("gradients", {"update": update.gradients}),
            MemoryItem("gradient buckets", _always(_bucket_bytes(policy, processes))),
            *self._work(model, sizes, evaluation or sizes, language, update),
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
        policy: Policy,
        shards: ShardBytes | None,
    ) -> UpdateBytes:
        replayed = replace(sizes, decode_batch_size=None)
        if shards is None:
            gradients = gradient_bytes(policy)
            replaying = self._once(update_bytes, model, replayed) - gradients
            return UpdateBytes(gradients, 0, max(0, replaying))
        return update_on_shards(
            shards,
            scoring=self._once(scoring_bytes, model, replayed),
            backward=self._once(backward_bytes, model, replayed),
        )

    def _work(
        self,
        model: ModelSettings,
        sizes: BatchSizes,
        evaluation: BatchSizes,
        language: Any,
        update: UpdateBytes,
    ) -> list[MemoryItem]:
        """What comes and goes within a phase."""
        # What a phase does not depend on is left out, so that it is measured once for all plans.
        held = _without_update(model)
        rollouts = [
            (
                self._once(
                    rollout_bytes, held, replace(each, micro_batch_size=1, decode_batch_size=None)
                ),
                cache_bytes(language, each, model.dtype),
            )
            for each in (sizes, evaluation)
        ]
        sampling, (prompt_cache, generated_cache) = max(rollouts)
        group_size = max(sizes.group_size, evaluation.group_size)
        drawn = replace(
            sizes, group_size=group_size, micro_batch_size=1, prompts=1, is_truncated=False
        )
        sampling -= prompt_cache + generated_cache
        activations = {
            "rollout": max(0, sampling),
            "decode": self._once(decode_bytes, replace(held, adapter_rank=None), drawn),
            "update": update.activations,
        }
        return [
            MemoryItem("cache of the prompts", {"rollout": prompt_cache}),
            MemoryItem("cache of the samples", {"rollout": generated_cache}),
            MemoryItem("activations", activations),
        ]

    def _build(self, model: ModelSettings) -> _Models:
        """Language model, policy around it, and the parts of the decoder."""
        key = replace(_without_update(model), needs_reference=model.needs_reference)
        if key not in self._built:
            language, policy = build_meta_policy(self._configs, key)
            is_in_8_bits = model.quantization.decoder is not None
            decoder = build_decoder(self._configs, model.dtype, is_in_8_bits=is_in_8_bits)
            self._built[key] = (language, policy, decoder)
        return self._built[key]

    def _once(
        self,
        measure: Callable[[PartConfigs, ModelSettings, BatchSizes], int],
        model: ModelSettings,
        sizes: BatchSizes,
    ) -> int:
        key = (measure, model, sizes)
        if key not in self._known:
            self._known[key] = measure(self._configs, model, sizes)
        return self._known[key]


def _without_update(model: ModelSettings) -> ModelSettings:
    """How the policy is held where nothing is learnt."""
    return replace(model, is_checkpointing=False, needs_reference=False, is_on_accelerator=False)


def _part(name: str, needs: str, modules: Sequence[nn.Module]) -> _Part:
    return _Part(name, needs, module_bytes(modules), pinned_bytes(modules))


def _weights_item(part: _Part, is_offloading: bool) -> MemoryItem:
    if not is_offloading:
        return MemoryItem(part.name, _always(part.size))
    phases = [phase for phase, needed in NEEDED.items() if part.needs in needed]
    return MemoryItem(part.name, dict.fromkeys(phases, part.size), cpu=part.pinned)


def _always(size: int) -> PhaseBytes:
    return dict.fromkeys(PHASES, size)


def _experience_bytes(sizes: BatchSizes, entries: int) -> int:
    """Pictures, token ids, log-probs, and which entries could be drawn."""
    a_token = 8 + 4 + (entries if sizes.is_truncated else 0)
    return sizes.images * (3 * sizes.height * sizes.width + a_token * sizes.tokens)


def _policy_parts(policy: Policy, model: ModelSettings) -> list[_Part]:
    """Frozen weights and adapters, or all of it where it is trained in full."""
    trained = gradient_bytes(policy)
    adapters = 0 if model.adapter_rank is None else trained
    frozen = module_bytes(policy.modules()) - adapters
    pinned = pinned_bytes(policy.modules())
    return [
        _Part("language model and head", "policy", frozen, pinned, trained - adapters),
        _Part("adapters", "policy", adapters, 0, adapters),
    ]


def _shard_items(shards: ShardBytes, update: UpdateBytes) -> list[MemoryItem]:
    together = dict.fromkeys(("rollout", "decode", "reward"), shards.whole)
    return [
        MemoryItem("policy, own shards", _always(shards.frozen + shards.trained)),
        MemoryItem("policy, put together", {**together, "update": update.whole}),
    ]


def _bucket_bytes(policy: Policy, processes: Processes) -> int:
    """DDP joins gradients in copies that it keeps."""
    is_copying = processes.count > 1 and not processes.is_sharded
    return gradient_bytes(policy) if is_copying else 0


def _cpu_at_start(
    parts: Sequence[_Part], shards: ShardBytes | None, policy: Policy, *, is_offloading: bool
) -> int:
    """All weights are loaded before they move; pinned copies of a part stand beside it at first.

    A policy that is cut up stays until the others have moved.
    """
    staying = 0 if shards is None else module_bytes(policy.modules())
    loaded = sum(part.size for part in parts) + staying
    if not is_offloading:
        return max(loaded, 0 if shards is None else shards.upcast)
    peak = pinned = 0
    for part in parts:
        pinned += part.pinned
        peak = max(peak, loaded + pinned)
        loaded -= part.size
    return max(peak, 0 if shards is None else pinned + shards.upcast)
