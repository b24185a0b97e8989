"""Types for the memory and operations of a run, and the protocol that plans them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

from glm_grpo.models.base import NO_QUANTIZATION, Quantization

PHASES = ("sources", "rollout", "decode", "reward", "update", "idle")
"""Phases of a step. `sources` exists only for edits; `idle` is the memory that stays on the
accelerator in every phase."""

OVERHEAD_BYTES = 600 * 10**6
"""Approximate memory of a CUDA context with cuBLAS and cuDNN, taken before the first tensor."""

Offload = Literal["none", "modules", "modules_and_optimizer"]


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
class ModelSettings:
    """How the policy is loaded and trained.

    Attributes:
        adapter_rank: Rank of LoRA; None: train the language model and its head in full.
        is_checkpointing: Whether the backward pass recomputes activations.
        needs_reference: Whether a KL to the reference has a weight.
        is_on_accelerator: Selects the optimizer's implementation as torch does.
        quantization: Which weights are stored in fewer bits.
    """

    dtype: torch.dtype
    adapter_rank: int | None
    is_checkpointing: bool
    needs_reference: bool
    is_on_accelerator: bool
    quantization: Quantization = NO_QUANTIZATION


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of one step's work.

    Attributes:
        prompts: P, prompts of the step.
        group_size: G, images per prompt.
        height: Image height, pixels.
        width: Image width, pixels.
        micro_batch_size: Images per forward and backward pass.
        is_truncated: Whether top-k, top-p or min-p truncate the distribution.
        decode_batch_size: Images of a group to decode at once; None: all.
        vae_batch_size: Those to pass through the VAE at once; None: few.
        num_sources: Source pictures per prompt; their tokens are not counted in `prompt_tokens`.
        reads_targets: Whether target images are encoded as tokens.
    """

    prompts: int
    group_size: int
    height: int
    width: int
    prompt_tokens: int
    micro_batch_size: int
    is_truncated: bool
    decode_batch_size: int | None = None
    vae_batch_size: int | None = None
    num_sources: int = 0
    reads_targets: bool = False

    @property
    def images(self) -> int:
        """Number of images, P * G."""
        return self.prompts * self.group_size


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
class LanguageWork:
    """Work of the language model per token.

    Attributes:
        layer_entries: Entries of all matrices of all layers; every token is multiplied by each.
        head_entries: Entries of the head's rows that can be sampled; used only for generated
            tokens.
        attention_width: Layers x query heads x head size.
        read_bytes: Bytes of all weights that a token step reads: all but the token embedding, of
            which it only looks up rows.
        cache_bytes: Bytes of the keys and values of one token.
    """

    layer_entries: int
    head_entries: int
    attention_width: int
    read_bytes: int
    cache_bytes: int


@runtime_checkable
class Planner(Protocol):
    """Computes what runs of one model need, from its configs alone."""

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
        """Plan the memory of a run, or of each of its processes, by phase.

        Args:
            model: How the policy is loaded and trained.
            sizes: Sizes of this process's part of a step.
            scorers: Weights of the reward terms.
            offload: What waits in CPU memory; has no effect without an accelerator, nor for shards
                of the policy, which are never moved.
            evaluation: What an evaluation samples and decodes at once; None: no evaluation.
            processes: Processes that train together.
        """
        ...

    def sequence_tokens(self, sizes: BatchSizes) -> tuple[int, int]:
        """Tokens of the longest prompt with its source pictures, and T per image."""
        ...

    def longest_prompt_tokens(
        self, captions: Sequence[str], *, height: int, width: int
    ) -> int | None:
        """Tokens of the longest caption with the chat template; None without a tokenizer."""
        ...

    def language_work(self, model: ModelSettings) -> LanguageWork:
        """Work per token of the language model as a run loads it.

        Adapters count among the bytes read, but their operations are not counted.
        """
        ...

    def decoder_flops(self, height: int, width: int) -> tuple[int, int]:
        """Operations for one image of a denoising pass, and of turning latents into pixels."""
        ...
