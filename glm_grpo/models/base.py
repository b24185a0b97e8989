"""Protocols of the models: an AR policy, and the decoder of its tokens.

`glm_grpo.models.glm_image` and `glm_grpo.models.janus_pro` implement them. `glm_grpo.models.family`
is what a further family must provide, and `glm_grpo.models.find` chooses between families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor, nn

from glm_grpo.grpo.credit import TokenPlaces
from glm_grpo.grpo.policy import PolicyForUpdate
from glm_grpo.types import Count, ImageBatch, PromptBatch, Rollout, not_counted

Preview = Literal["zeros", "encode", "repeat"]
"""Source of the preview tokens of a given picture, see `Policy.tokenize_pictures`."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes by the value of `model.dtype`."""


def overflow_remedy(dtype: torch.dtype) -> str:
    """What to do if a model in this dtype has numbers that are not finite; else empty."""
    if dtype != torch.float16:
        return ""
    largest = torch.finfo(dtype).max
    return (
        f"float16 holds no number above {largest:.0f}, which this model may need: use "
        "model.dtype=bfloat16 or model.dtype=float32"
    )


def lost_weights_remedy(dtype: torch.dtype) -> str:
    """What to do if trained weights in this dtype give numbers that are not finite."""
    calmer = "in a new run lower optim.learning_rate or optim.max_grad_norm"
    overflow = overflow_remedy(dtype)
    return f"{overflow}; or, if they have been trained before, {calmer}" if overflow else calmer


@runtime_checkable
class Policy(PolicyForUpdate, Protocol):
    """An AR model that samples token grids and is trained.

    `replay` and `reference_log_probs` score tokens under the distribution that `sample` draws from,
    including temperature and truncation.

    Attributes:
        codebook_size: Token ids are in [0, codebook_size).
    """

    codebook_size: int

    @property
    def network(self) -> nn.Module:
        """The trained module, for DDP or FSDP2 to wrap."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        ...

    def tokens_per_image(self, batch: PromptBatch) -> int:
        """T, the number of tokens of each image of a batch."""
        ...

    def token_places(self, batch: PromptBatch) -> TokenPlaces:
        """Which places of an image each of its T tokens draws, for credit by place."""
        ...

    def encode_sources(self, batch: PromptBatch) -> PromptBatch:
        """Encode the batch's source pictures as tokens; without any, return it unchanged."""
        ...

    def sample(
        self,
        batch: PromptBatch,
        *,
        phase: str = "rollout",
        count: Count = not_counted,
    ) -> Rollout:
        """Sample G token grids for each of P prompts, a pure function of weights and batch.

        Args:
            phase: Phase of the run, for errors.
            count: Called after every token of the grids.

        Raises:
            NonFiniteError: A log-probability is not finite; the message names phase, prompt, sample
                and token.
        """
        ...

    def first_layers(self, count: int) -> Policy:
        """A copy in float32 with only the first layers, which runs the same code.

        It shows whether sampling and replay compute the same, which half precision at full depth
        cannot. Adapters have small random factors in it.

        Args:
            count: Number of layers of the language model, >= 1.
        """
        ...

    def tokenize_pictures(
        self,
        pixels: UInt8[Tensor, "N 3 H W"],
        *,
        num_sources: int = 0,
        preview: Preview = "zeros",
    ) -> Int64[Tensor, "N T"]:
        """Encode pictures as token grids that the decoder turns back into them.

        Args:
            pixels: RGB, 0..255, of a size that can be generated.
            num_sources: Number of source pictures; above 0 the grids are those of edits.
            preview: How to make tokens that the model draws before those of the picture, if it
                does; see `anchor.preview`. The decoder does not read them.
        """
        ...

    def wrap(self, wrapped: nn.Module) -> None:
        """Replay through a wrapper of `network` from now on, which joins gradients of processes."""
        ...

    def run_network_once(self) -> None:
        """Run `network` on the smallest possible input, without gradient."""
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
        """Reference weights, named as in `state_tensors`; empty while it is the untrained model."""
        ...

    def load_reference_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `reference_tensors` returned."""
        ...

    def reference_modules(self) -> Sequence[nn.Module]:
        """Modules that the reference needs on the accelerator in addition to those of `modules`."""
        ...

    def state_tensors(self) -> dict[str, Tensor]:
        """Trained tensors by name."""
        ...

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_tensors` returned.

        Raises:
            CheckpointError: Names or shapes do not match this model.
        """
        ...


@runtime_checkable
class Decoder(Protocol):
    """A frozen model that turns token grids into pictures.

    Pictures are a function of (prompt, tokens, decode seed): the G images of a prompt share the
    same initial noise, if there is any.
    """

    @property
    def steps(self) -> int | None:
        """Number of denoising steps, >= 1; None if it does not denoise."""
        ...

    def with_steps(self, steps: int) -> Decoder:
        """The same model with another number of denoising steps, >= 1; only if it denoises."""
        ...

    def decode(self, batch: PromptBatch, token_ids: Int64[Tensor, "P G T"]) -> ImageBatch:
        """Decode all pictures of a batch.

        Raises:
            DecoderError: A pixel is not finite; the message names prompt and sample.
        """
        ...

    def decode_groups(
        self, batch: PromptBatch, token_ids: Int64[Tensor, "P G T"]
    ) -> Iterator[UInt8[Tensor, "G 3 H W"]]:
        """Like `decode`, prompt by prompt; each group is on the CPU when it is yielded."""
        ...

    def modules(self) -> Sequence[nn.Module]:
        """Modules that decoding needs on the accelerator."""
        ...


@dataclass(frozen=True)
class TextRule:
    """How a model finds the texts that a prompt asks it to draw.

    Attributes:
        find: Finds them in a prompt.
        advice: Clause for hints on how to quote them.
    """

    find: Callable[[str], Sequence[str]]
    advice: str


@dataclass(frozen=True)
class ReservedTokens:
    """Texts of special tokens, which a prompt cannot contain as text.

    Attributes:
        in_prompts: Refused anywhere in a prompt.
        in_texts: Refused in the texts that `text_rule` finds.
        text_rule: None for a model that reads a prompt as a whole.
    """

    in_prompts: frozenset[str] = frozenset()
    in_texts: frozenset[str] = frozenset()
    text_rule: TextRule | None = None
