"""What the families of models share: the protocol of a decoder, dtypes, texts in prompts.

`glm_grpo.models.family` is what a family must provide, and `glm_grpo.models.find` chooses between
families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor, nn

from glm_grpo.types import ImageBatch, PromptBatch

Preview = Literal["zeros", "encode", "repeat"]
"""Source of the preview tokens of a given image, see `AdaptedPolicy.tokenize_images`."""

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
class Decoder(Protocol):
    """A frozen model that turns token grids into images.

    Images are a function of (prompt, tokens, decode seed): the G images of a prompt share the
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
        """Decode all images of a batch.

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
