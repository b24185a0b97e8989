"""Will it fit? Memory of a run by phase, from configs alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from glm_grpo.glm_image.meta_memory import module_bytes, pinned_bytes
from glm_grpo.glm_image.meta_models import PartConfigs, build_decoder
from glm_grpo.glm_image.phase_memory import (
    BatchSizes,
    ModelSettings,
    build_meta_policy,
    cache_bytes,
    decode_bytes,
    gradient_bytes,
    optimizer_state_bytes,
    rollout_bytes,
    update_bytes,
)
from glm_grpo.glm_image.residency import NEEDED
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


class MemoryPlanner:
    """Plans runs of one model; what was measured for one plan serves the next.

    Args:
        configs: Of the model.
    """

    def __init__(self, configs: PartConfigs) -> None:
        self._configs = configs
        self._known: dict[tuple[Any, ...], int] = {}

    def plan(
        self, model: ModelSettings, sizes: BatchSizes, scorers: ScorerSizes, offload: Offload
    ) -> MemoryPlan:
        """Plans a run.

        Counted are weights, gradients, optimizer state, caches and activations. Not counted are
        the activations of the scorers, scratch space inside operations, what a caching allocator
        cannot use between its blocks, and the program with its libraries in CPU memory.

        Args:
            model: How the policy is held.
            sizes: What a step works on.
            scorers: Weights of the reward terms.
            offload: What waits in CPU memory; of no effect without an accelerator.
        """
        is_offloading = offload != "none" and model.is_on_accelerator
        language, policy = build_meta_policy(self._configs, model)
        adapters = 0 if model.adapter_rank is None else gradient_bytes(policy)
        decoder = build_decoder(self._configs, model.dtype)
        frozen = module_bytes(policy.modules()) - adapters
        pinned_policy = pinned_bytes(policy.modules())
        trained = gradient_bytes(policy)
        parts = [
            _Part("language model and head", "policy", frozen, pinned_policy, trained - adapters),
            _Part("adapters", "policy", adapters, 0, adapters),
            _part("reference copy", "reference", policy.reference_modules()),
            _part("decoder", "decoder", decoder),
            _Part("scorers", "rewards", scorers.movable, scorers.movable),
        ]
        state = optimizer_state_bytes(policy)
        is_state_moved = offload == "modules_and_optimizer" and model.is_on_accelerator
        vision = module_bytes([language.model.visual, language.model.vqmodel])
        items = [
            *[_weights_item(part, is_offloading) for part in parts if part.size],
            MemoryItem("scorers in own processes", _always(scorers.staying)),
            MemoryItem("scorers on the CPU", {}, cpu=scorers.on_cpu),
            MemoryItem("vision tower and VQ", {}, cpu=vision),
            MemoryItem(
                "optimizer state",
                {"update": state} if is_state_moved else _always(state),
                cpu=state if is_state_moved else 0,
            ),
            *self._work(model, sizes, policy=(language, trained)),
            MemoryItem("experience", {}, cpu=_experience_bytes(sizes, policy.codebook_size)),
        ]
        moving = parts if is_offloading else []
        return MemoryPlan(
            items=tuple(item for item in items if item.cpu or any(item.by_phase.values())),
            is_on_accelerator=model.is_on_accelerator,
            overhead=OVERHEAD_BYTES if model.is_on_accelerator else 0,
            cpu_at_start=_cpu_at_start(parts, is_offloading) + vision + scorers.on_cpu,
            moved_in=sum(part.size for part in moving) + is_state_moved * state,
            moved_out=sum(part.trained for part in moving) + is_state_moved * state,
        )

    def _work(
        self, model: ModelSettings, sizes: BatchSizes, *, policy: tuple[Any, int]
    ) -> list[MemoryItem]:
        """What comes and goes within a phase."""
        language, gradients = policy
        prompt_cache, generated_cache = cache_bytes(language, sizes, model.dtype)
        sampling = self._once(rollout_bytes, model, sizes) - prompt_cache - generated_cache
        replaying = self._once(update_bytes, model, sizes) - gradients
        activations = {
            "rollout": max(0, sampling),
            "decode": self._once(decode_bytes, model, sizes),
            "update": max(0, replaying),
        }
        return [
            MemoryItem("gradients", {"update": gradients}),
            MemoryItem("cache of the prompts", {"rollout": prompt_cache}),
            MemoryItem("cache of the samples", {"rollout": generated_cache}),
            MemoryItem("activations", activations),
        ]

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


def _cpu_at_start(parts: Sequence[_Part], is_offloading: bool) -> int:
    """All weights are loaded before they move; pinned copies of a part stand beside it at first."""
    loaded = sum(part.size for part in parts)
    if not is_offloading:
        return loaded
    peak = pinned = 0
    for part in parts:
        pinned += part.pinned
        peak = max(peak, loaded + pinned)
        loaded -= part.size
    return peak
