"""Memory and operations of a run: the figures, and the protocol that finds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

from glm_grpo.models.base import AS_PUBLISHED, Quantization

PHASES = ("sources", "rollout", "decode", "reward", "update", "idle")
"""Of a step; the first is of edits alone, idle is what stays on the accelerator in every phase."""

OVERHEAD_BYTES = 600 * 10**6
"""Of a CUDA context with cuBLAS and cuDNN: what drivers take before the first tensor, roughly."""

Offload = Literal["none", "modules", "modules_and_optimizer"]


@dataclass(frozen=True)
class Parallelism:
    """How a run is spread.

    Attributes:
        count: Of processes, >= 1; each samples and replays its part of the prompts.
        is_sharded: The policy's weights, gradients and moments are cut over them (FSDP2); else
            each holds a copy (DDP).
        is_mixed: Shards of what is trained are kept in fp32 whatever the model's type, and put
            together in 16 bits.
        on_machine: How many share the CPU memory of this machine, >= 1.
    """

    count: int = 1
    is_sharded: bool = False
    is_mixed: bool = False
    on_machine: int = 1


UNDIVIDED = Parallelism()
"""A run of one process."""


@dataclass(frozen=True)
class ModelSettings:
    """How the policy is held.

    Attributes:
        adapter_rank: Of LoRA; None trains language model and head in full.
        is_checkpointing: Activations are computed again in the backward pass.
        needs_reference: A KL to the reference is weighted.
        is_on_accelerator: Chooses the optimizer's form as torch does.
        quantization: Which weights are held in fewer bits.
    """

    dtype: torch.dtype
    adapter_rank: int | None
    is_checkpointing: bool
    needs_reference: bool
    is_on_accelerator: bool
    quantization: Quantization = AS_PUBLISHED


@dataclass(frozen=True)
class BatchSizes:
    """What one step works on.

    Attributes:
        prompts: P.
        group_size: G.
        height: Pixels.
        width: Pixels.
        micro_batch_size: Images a forward and backward pass.
        is_truncated: By top-k, top-p or min-p.
        decode_batch_size: Images of a group that are drawn at once; None: all.
        vae_batch_size: Of those, images that go through the VAE at once; None: few.
        num_sources: Source pictures of a prompt, whose tokens are not in `prompt_tokens`.
        reads_targets: Whether target pictures are turned into tokens.
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
        """P * G."""
        return self.prompts * self.group_size


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
class MemoryItem:
    """One thing that takes memory.

    Attributes:
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
        phases: That the run has, of `PHASES`.
        is_on_accelerator: False: there is none, and phases are in CPU memory like all else.
        overhead: Bytes that driver and libraries take on the accelerator.
        cpu_at_start: Most bytes in CPU memory while the models are loaded.
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
        """Bytes of a phase where it runs, overhead included."""
        cpu = 0 if self.is_on_accelerator else self.cpu
        return self.overhead + cpu + sum(item.by_phase.get(phase, 0) for item in self.items)

    def excess(self, memory: int) -> int:
        """Bytes of all phases beyond what there is."""
        return sum(max(0, self.total(phase) - memory) for phase in self.phases)

    @property
    def cpu(self) -> int:
        """Bytes that lie in CPU memory for the whole run."""
        return sum(item.cpu for item in self.items)

    @property
    def peak_phase(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        """Bytes of that phase: what --memory is held against."""
        return self.total(self.peak_phase)


@dataclass(frozen=True)
class LanguageWork:
    """What the language model does for a token.

    Attributes:
        layer_entries: Of all matrices of all layers; each meets every token.
        head_entries: Of the head's rows that can be drawn; they meet generated tokens alone.
        attention_width: Layers x query heads x size of a head.
        read_bytes: Of all weights that a token step reads: all but the token embedding, of which
            it picks rows.
        cache_bytes: Keys and values of one token.
    """

    layer_entries: int
    head_entries: int
    attention_width: int
    read_bytes: int
    cache_bytes: int


@runtime_checkable
class Planner(Protocol):
    """Finds what runs of one model take, from its configs alone."""

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
        """Memory of a run, or of each process of it, by phase.

        Args:
            model: How the policy is held.
            sizes: What a step works on in this process.
            scorers: Weights of the reward terms.
            offload: What waits in CPU memory; of no effect without an accelerator, nor for shards
                of the policy, which stay where they are.
            evaluation: What an evaluation samples and decodes at once, where there is one.
            processes: That train together.
        """
        ...

    def sequence_tokens(self, sizes: BatchSizes) -> tuple[int, int]:
        """Tokens of the longest prompt with its source pictures, and T of an image."""
        ...

    def longest_prompt_tokens(
        self, captions: Sequence[str], *, height: int, width: int
    ) -> int | None:
        """Of at least one caption, with the chat template; None where no tokenizer can be read."""
        ...

    def language_work(self, model: ModelSettings) -> LanguageWork:
        """Of the language model as a run holds it.

        Adapters are read, their operations not counted.
        """
        ...

    def decoder_flops(self, height: int, width: int) -> tuple[int, int]:
        """Operations of a denoising pass and of turning latents into pixels, for one image."""
        ...
