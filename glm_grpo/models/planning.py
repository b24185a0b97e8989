"""Types for the memory and operations of a run, and the protocol that plans them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from glm_grpo.config import Config
from glm_grpo.config.sections import AdapterSection, RolloutSection

PHASES = ("sources", "rollout", "decode", "reward", "update", "idle")
"""Phases of a step. `sources` exists only for edits; `idle` is the memory that stays on the
accelerator in every phase."""

OVERHEAD_BYTES = 600 * 10**6
"""Approximate memory of a CUDA context with cuBLAS and cuDNN, taken before the first tensor."""


@dataclass(frozen=True)
class Parallelism:
    """How a run is distributed.

    Attributes:
        count: Number of processes, >= 1; each samples and replays its part of the prompts.
        is_sharded: Whether the policy's weights, gradients and moments are sharded over them
            (FSDP2); else each holds a copy (DDP).
        is_mixed: Whether shards of trained weights are kept in fp32 whatever the model's dtype, and
            gathered in 16 bits.
        on_machine: Number of processes that share this machine's CPU memory, >= 1.
    """

    count: int = 1
    is_sharded: bool = False
    is_mixed: bool = False
    on_machine: int = 1


UNDIVIDED = Parallelism()
"""A run with one process."""


@dataclass(frozen=True)
class ScorerSizes:
    """Weights of the reward terms, in bytes.

    Attributes:
        movable: Networks that wait in CPU memory when modules are offloaded.
        on_cpu: Engines that always run on the CPU.
    """

    movable: int = 0
    on_cpu: int = 0


@dataclass(frozen=True)
class MemoryItem:
    """One item that takes memory.

    Attributes:
        by_phase: Bytes on the accelerator; 0 in phases that are missing.
        cpu: Bytes in CPU memory for the whole run, whether it waits or stays there.
    """

    name: str
    by_phase: Mapping[str, int]
    cpu: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a run.

    Attributes:
        items: Items in the order in which they are shown.
        phases: Phases of the run, a subset of `PHASES`.
        is_on_accelerator: Whether there is an accelerator; if not, phases use CPU memory like
            everything else.
        overhead: Bytes on the accelerator for driver and libraries.
        cpu_at_start: Peak bytes in CPU memory while the models are loaded.
        moved_in: Bytes that offloading copies to the accelerator in one step.
        moved_out: Bytes that offloading copies back in one step.
    """

    items: tuple[MemoryItem, ...]
    phases: tuple[str, ...]
    is_on_accelerator: bool
    overhead: int
    cpu_at_start: int
    moved_in: int
    moved_out: int

    def total(self, phase: str) -> int:
        """Bytes of a phase on its device, including overhead."""
        cpu = 0 if self.is_on_accelerator else self.cpu
        return self.overhead + cpu + sum(item.by_phase.get(phase, 0) for item in self.items)

    def excess(self, memory: int) -> int:
        """Bytes by which all phases together exceed the memory."""
        return sum(max(0, self.total(phase) - memory) for phase in self.phases)

    @property
    def cpu(self) -> int:
        """Bytes in CPU memory for the whole run."""
        return sum(item.cpu for item in self.items)

    @property
    def peak_phase(self) -> str:
        """Phase that takes the most memory."""
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        """Bytes of the peak phase, which are compared with --memory."""
        return self.total(self.peak_phase)


@dataclass(frozen=True)
class LanguageShape:
    """Sizes of a trained language model; every layer is alike.

    Attributes:
        width: Size of a hidden state, D.
        mlp_width: Size of the states between the two maps of an MLP, M.
        heads: Query heads of a layer.
        kv_heads: Key and value heads of a layer.
        head_size: Size of a head's queries, keys and values.
        matrices: Inputs and outputs of each matrix of a layer.
        matrix_names: Names of their modules, as in `model.adapter.target_modules`.
        layer_vectors: Entries of each other tensor of a layer.
        outside: Entries of each tensor outside the layers, the token embedding first.
        unread: Entries of `outside` that a token step does not read, such as the embedding.
        drawn: Number of codes that can be drawn, V.
        stored_states: States of size D that a layer stores per token for the backward pass, with
            adapters and in fp32.
        backward_states: Further states of size D per token during the backward pass of one layer.
        is_prompt_shared: Whether the samples of a prompt share its keys and values.
    """

    layers: int
    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_size: int
    matrices: tuple[tuple[int, int], ...]
    matrix_names: tuple[str, ...]
    layer_vectors: tuple[int, ...]
    outside: tuple[int, ...]
    unread: int
    drawn: int
    stored_states: int
    backward_states: int
    is_prompt_shared: bool = True

    @property
    def layer_entries(self) -> int:
        """Entries of the matrices of all layers, by each of which every token is multiplied."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.matrices)

    @property
    def head_entries(self) -> int:
        """Entries of the head's rows that can be drawn; used only for generated tokens."""
        return self.drawn * self.width

    @property
    def attention_width(self) -> int:
        """Layers x query heads x head size."""
        return self.layers * self.heads * self.head_size

    def adapter_factors(self, adapter: AdapterSection) -> list[int]:
        """Entries of each factor of the adapters of a layer."""
        adapted = adapter.target_modules or self.matrix_names
        return [
            adapter.rank * size
            for name, sizes in zip(self.matrix_names, self.matrices, strict=True)
            if name in adapted
            for size in sizes
        ]

    def adapter_entries(self, adapter: AdapterSection) -> int:
        """Entries of the adapters of all layers."""
        return self.layers * sum(self.adapter_factors(adapter))

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_size * dtype.itemsize


@dataclass(frozen=True)
class PartBytes:
    """Weights of one part of a model.

    Attributes:
        size: Bytes of all weights and buffers.
        pinned: Bytes in pinned CPU memory, where torch rounds each tensor up to a power of two.
    """

    size: int
    pinned: int


@runtime_checkable
class Planner(Protocol):
    """Knows the sizes of one model from its configs alone; `plan_memory` adds them up."""

    @property
    def language(self) -> LanguageShape:
        """Sizes of the language model."""
        ...

    @property
    def usual_prompt_tokens(self) -> int:
        """Tokens to assume for the longest prompt if the tokenizer is not available."""
        ...

    @property
    def smaller_sides(self) -> Sequence[int]:
        """Sides in pixels, largest first, that a run can try to save memory."""
        ...

    def rows_per_image(self, rollout: RolloutSection) -> int:
        """Rows of the language model for each image: 2 with guidance between tokens."""
        ...

    def unplaced(self, dtype: torch.dtype) -> int:
        """Bytes of weights that are loaded, but stay in CPU memory."""
        ...

    def vision(self, dtype: torch.dtype) -> PartBytes:
        """Weights that turn images into tokens."""
        ...

    def decoder(self, dtype: torch.dtype, quantization: str | None) -> PartBytes:
        """Weights of the decoder; `quantization` is `decode.quantization`."""
        ...

    def decode_bytes(self, config: Config, *, group_size: int, prompt_tokens: int) -> int:
        """Peak bytes of decoding one group, besides weights."""
        ...

    def sources_bytes(self, config: Config) -> int:
        """Peak bytes of encoding one image as tokens, besides weights."""
        ...

    def sequence_tokens(self, config: Config, prompt_tokens: int) -> tuple[int, int]:
        """Tokens of the longest prompt with its source images, and T per image."""
        ...

    def longest_prompt_tokens(
        self, captions: Sequence[str], *, height: int, width: int
    ) -> int | None:
        """Tokens of the longest caption with the chat template; None without a tokenizer."""
        ...

    def decode_flops(self, config: Config) -> int:
        """Operations of decoding one training image."""
        ...
