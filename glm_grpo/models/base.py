"""Protocols of the models: an AR policy, and the decoder of its tokens.

`glm_grpo.models.glm_image` and `glm_grpo.models.janus_pro` implement them. `glm_grpo.models.family`
is what a further family must provide, and `glm_grpo.models.find` chooses between families.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor, nn

from glm_grpo.grpo.credit import TokenPlaces
from glm_grpo.grpo.policy import PolicyForUpdate
from glm_grpo.types import ImageBatch, ProgressCallback, PromptBatch, Rollout, no_progress

Preview = Literal["zeros", "encode", "repeat"]
"""Source of the preview tokens of a given image, see `Policy.tokenize_images`."""

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
    """An AR model that samples token grids and replays them.

    `replay` and `reference_log_probs` score tokens under the distribution that `sample` draws from,
    including temperature and truncation. Weights, shards and the reference are those of
    `glm_grpo.models.adapted_policy.AdaptedPolicy`.

    Attributes:
        codebook_size: Token ids are in [0, codebook_size).
    """

    codebook_size: int

    @abstractmethod
    def tokens_per_image(self, batch: PromptBatch) -> int:
        """T, the number of tokens of each image of a batch."""
        ...

    @abstractmethod
    def token_places(self, batch: PromptBatch) -> TokenPlaces:
        """Which places of an image each of its T tokens draws, for credit by place."""
        ...

    @abstractmethod
    def encode_sources(self, batch: PromptBatch) -> PromptBatch:
        """Encode the batch's source images as tokens; without any, return it unchanged."""
        ...

    @abstractmethod
    def sample(
        self,
        batch: PromptBatch,
        *,
        phase: str = "rollout",
        on_progress: ProgressCallback = no_progress,
    ) -> Rollout:
        """Sample G token grids for each of P prompts, a pure function of weights and batch.

        Args:
            phase: Phase of the run, for errors.
            on_progress: Called after every token of the grids.

        Raises:
            NonFiniteError: A log-probability is not finite; the message names phase, prompt, sample
                and token.
        """
        ...

    @abstractmethod
    def reference_log_probs(
        self, prompts: PromptBatch, rollout: Rollout, rows: Int64[Tensor, " N"]
    ) -> Float32[Tensor, "N T"]:
        """Score the tokens of these rows under the reference policy, without gradient."""
        ...

    @abstractmethod
    def tokenize_images(
        self,
        pixels: UInt8[Tensor, "N 3 H W"],
        *,
        num_sources: int = 0,
        preview: Preview = "zeros",
    ) -> Int64[Tensor, "N T"]:
        """Encode images as token grids that the decoder turns back into them.

        Args:
            pixels: RGB, 0..255, of a size that can be generated.
            num_sources: Number of source images; above 0 the grids are those of edits.
            preview: How to make tokens that the model draws before those of the image, if it
                does; see `sft.preview`. The decoder does not read them.
        """
        ...


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
