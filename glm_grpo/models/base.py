"""Protocols of the models: an AR policy, and the decoder of its tokens.

`glm_grpo.models.glm_image` contains the GLM-Image implementations. A second model is a second
folder beside it, and `glm_grpo.builders`, which constructs one or the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor, nn

from glm_grpo.grpo.update import PolicyForUpdate
from glm_grpo.types import Count, ImageBatch, PromptBatch, Rollout, not_counted


@runtime_checkable
class Policy(PolicyForUpdate, Protocol):
    """An AR model that samples token grids and is trained.

    `replay` and `reference_log_probs` score tokens under the distribution that `sample` draws from:
    temperature and truncation included.

    Attributes:
        codebook_size: Token ids are in [0, codebook_size).
    """

    codebook_size: int

    @property
    def network(self) -> nn.Module:
        """What is trained, as one module, for DDP or FSDP2 to wrap."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        ...

    def tokens_per_image(self, height: int, width: int, *, has_preview: bool = True) -> int:
        """T of an image of `height` x `width` pixels; edits are generated without a preview."""
        ...

    def encode_sources(self, batch: PromptBatch) -> PromptBatch:
        """The batch with the tokens of its source pictures; the same where it has none."""
        ...

    def sample(
        self,
        batch: PromptBatch,
        *,
        policy_step: int,
        phase: str = "rollout",
        count: Count = not_counted,
    ) -> Rollout:
        """Sample G token grids for each of P prompts, a pure function of weights and batch.

        Args:
            batch: Prompts and seed.
            policy_step: Recorded in the rollout.
            phase: Of the run, for errors.
            count: Told of every token of the grids.

        Raises:
            NonFiniteError: A log-probability is not finite; names phase, prompt, sample and token.
        """
        ...

    def tokenize_pictures(
        self,
        pixels: UInt8[Tensor, "N 3 H W"],
        *,
        has_preview: bool = True,
        preview: Preview = "zeros",
    ) -> Int64[Tensor, "N T"]:
        """Token grids that the decoder turns back into these pictures.

        Args:
            pixels: RGB, 0..255, of a size that is generated.
            has_preview: False for edits.
            preview: Tokens of the preview, which the decoder does not read: zeros, those of the
                picture made as small as the preview, or the target's nearest ones.
        """
        ...

    def wrap(self, wrapped: nn.Module) -> None:
        """Replay through a wrapper of `network` from now on, which joins gradients of processes."""
        ...

    def run_network_once(self) -> None:
        """A pass of `network` over as little as possible, without gradient."""
        ...

    def modules(self) -> Sequence[nn.Module]:
        """Modules that sampling and replay need on the accelerator."""
        ...

    def source_modules(self) -> Sequence[nn.Module]:
        """Modules that `encode_sources` needs on the accelerator."""
        ...

    def is_reference(self) -> bool:
        """Whether policy and reference have the same weights."""
        ...

    def mix_reference(self, mix: float) -> None:
        """Move the reference towards the policy: mix * policy + (1 - mix) * reference."""
        ...

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Load initial weights, named as in `state_tensors`, into policy and reference."""
        ...

    def reference_tensors(self) -> dict[str, Tensor]:
        """The reference, by the names of `state_tensors`; empty while it is the untrained one."""
        ...

    def load_reference_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `reference_tensors` returned."""
        ...

    def reference_modules(self) -> Sequence[nn.Module]:
        """Modules that the reference needs on the accelerator besides those of `modules`."""
        ...

    def state_tensors(self) -> dict[str, Tensor]:
        """The tensors that training changes, by name."""
        ...

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `state_tensors` returned.

        Raises:
            CheckpointError: Names or shapes do not fit this model.
        """
        ...


@runtime_checkable
class Decoder(Protocol):
    """A frozen model that turns token grids into pictures.

    Pictures are a function of (prompt, tokens, decode seed): the G images of a prompt share one
    initial noise.

    Attributes:
        steps: Of denoising, >= 1.
    """

    steps: int

    def with_steps(self, steps: int) -> Decoder:
        """The same model with another number of denoising steps, >= 1."""
        ...

    def decode(self, batch: PromptBatch, token_ids: Int64[Tensor, "P G T"]) -> ImageBatch:
        """Pictures of a batch.

        Raises:
            DecoderError: A pixel is not finite; names prompt and sample.
        """
        ...

    def decode_groups(
        self, batch: PromptBatch, token_ids: Int64[Tensor, "P G T"]
    ) -> Iterator[UInt8[Tensor, "G 3 H W"]]:
        """As `decode`, prompt by prompt; each group is on the CPU when it is handed out."""
        ...

    def modules(self) -> Sequence[nn.Module]:
        """What decoding needs on the accelerator."""
        ...


@dataclass(frozen=True)
class ReservedTokens:
    """Texts that stand for a token of their own, which a prompt cannot hold as text.

    Attributes:
        language: Of the language model's tokenizer.
        glyphs: Of the glyph encoder's.
        find_glyph_texts: The parts of a prompt that the glyph encoder reads.
    """

    language: frozenset[str] = frozenset()
    glyphs: frozenset[str] = frozenset()
    find_glyph_texts: Callable[[str], Sequence[str]] = lambda _: ()


Preview = Literal["zeros", "encode", "repeat"]
"""What stands in the preview of a given picture, see `Policy.tokenize_pictures`."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""By the value of `model.dtype`."""


@dataclass(frozen=True)
class Quantization:
    """What is held in fewer bits than the model's type.

    Attributes:
        language: Matrices of the language model's layers in 4 bits, blocks of 64, scales in 8 bits;
            None: none. Source: QLoRA, Dettmers et al. 2023 (arXiv 2305.14314), section 3.
        decoder: Weights of the diffusion transformer in 8 bits, cast to the model's type layer by
            layer as they are used; None: none.
    """

    language: Literal["nf4"] | None = None
    decoder: Literal["float8"] | None = None


AS_PUBLISHED = Quantization()
"""Every weight in the model's type."""
