"""The data types of a step, in the order in which they are passed on.

Axes, everywhere except in the families of `models/` and in `rewards/`:

=====  ====================================================================
P      prompts of one batch
G      images (token grids) sampled for each prompt
T      AR tokens of one image: preview grid, then target grid; only the target grid for edits
N      source images of a prompt, 0 for text-to-image; in `glm_grpo.grpo`, some of the P * G
       sequences
S      tokens of a target grid or of a source image
R      reward terms
K h w  places of an image: K = h * w cells of its grid of tokens
A B    target images to learn from, and their prompts in the batch
L      groups of a step that are trained on
H W    pixels
=====  ====================================================================

P and G stay separate axes, so a token row can never be paired with another prompt's reward. A batch
has one image size: T is a constant, and there is no padding mask over generated tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float32, Int64, UInt8
from torch import Tensor

from rewards.types import Prompt, RewardTable
from rewards.weighting import is_zero_std

ProgressCallback = Callable[[int, int], object]
"""Called with the amount of work done and the total, such as 3 of 8."""

Normalization = Literal["group_std", "mean_only", "batch_std"]
"""What centred rewards are divided by: see `glm_grpo.grpo.advantages`."""


@dataclass(frozen=True)
class PromptBatch:
    """Prompts and seeds of one step.

    Attributes:
        prompts: The P prompts, all with N source images.
        group_size: G, images per prompt (>= 2 when training).
        height: Image height in pixels.
        width: Image width in pixels.
        seed: Sampling seed; tokens are a function of (seed, prompt id, policy).
        decode_seeds: P seeds, one initial noise per prompt, shared by its G images; without effect
            on a decoder that does not denoise.
        source_token_ids: Codebook ids of the source images, row by row, as policy and decoder
            read them. Encoded once, because rounding may flip a tie; None before that, and for
            text-to-image.
    """

    prompts: tuple[Prompt, ...]
    group_size: int
    height: int
    width: int
    seed: int
    decode_seeds: tuple[int, ...]
    source_token_ids: Int64[Tensor, "P N S"] | None = None

    @property
    def num_sources(self) -> int:
        """N, source images per prompt."""
        return len(self.prompts[0].sources)


@dataclass(frozen=True)
class Rollout:
    """Sampled token grids with the log-probability of every token under the sampling distribution.

    Attributes:
        token_ids: Codebook ids, preview grid first, then target grid.
        log_probs: Natural logarithm, under the distribution the token was drawn from (including
            temperature, truncation and renormalisation).
        sampling_mask: Codebook entries that could be sampled at each token (top-k / top-p), V wide;
            None if nothing was truncated.
    """

    token_ids: Int64[Tensor, "P G T"]
    log_probs: Float32[Tensor, "P G T"]
    sampling_mask: Bool[Tensor, "P G T V"] | None


@dataclass(frozen=True)
class ImageBatch:
    """Decoded images.

    Attributes:
        pixels: RGB, 0..255.
        decode_seeds: One per prompt: `torch.Generator().manual_seed(seed)` draws its noise.
    """

    pixels: UInt8[Tensor, "P G 3 H W"]
    decode_seeds: tuple[int, ...]


@dataclass(frozen=True)
class TargetTokens:
    """Token grids of target images, for supervised fine-tuning or the SFT term.

    Attributes:
        prompts: Prompts with a target image, one image each, at least one.
        token_ids: Token grids of these prompts' targets.
        prompt_indices: Position of each of these prompts in the batch. Empty if no prompt of the
            batch has a target; `prompts` then contains one that is replayed with weight 0, because
            all processes must call the model equally often.
        weight: Weight of the SFT term, the mean cross-entropy of these tokens, in the loss.
    """

    prompts: PromptBatch
    token_ids: Int64[Tensor, "A T"]
    prompt_indices: Int64[Tensor, " B"]
    weight: float


@dataclass(frozen=True)
class Experience:
    """Everything about one batch: what is trained on, stored and replayed.

    Attributes:
        totals: Weighted scores; NaN for images that are left out of their group.
        penalties: KL to the reference, subtracted from each total before groups are compared; 0 if
            the KL is part of the loss or unused.
        advantages: One per image, or with credit by place one per token (T columns): zero sum in
            every group in every column; exactly 0 in zero-std groups, and for images that are left
            out of their group.
        reference_log_probs: Log-probs of the sampled tokens under the reference policy; None
            if no KL to the reference has a weight.
        is_sampled_by_reference: Whether the policy that sampled has the weights of the reference;
            False if no KL to the reference has a weight.
        is_stale: Whether an older policy sampled than the one that the updates begin with.
        trained: Indices of the groups to train on, in the order of the step's prompts that they
            represent; the others had no standard deviation and are only stored and counted. None:
            all groups.
        place_credit: What each place of an image, on the grid of its tokens, contributed to the
            total by all terms that say so, less the mean of its group; reward units, exactly 0 in
            zero-std groups. None with credit by image.
    """

    prompts: PromptBatch
    rollout: Rollout
    images: ImageBatch
    scores: RewardTable
    totals: Float32[Tensor, "P G"]
    penalties: Float32[Tensor, "P G"]
    advantages: Float32[Tensor, "P G columns"]
    reference_log_probs: Float32[Tensor, "P G T"] | None = None
    is_sampled_by_reference: bool = False
    is_stale: bool = False
    trained: Int64[Tensor, " L"] | None = None
    place_credit: Float32[Tensor, "P G h w"] | None = None

    def rewards(self) -> Float32[Tensor, "P G"]:
        """Totals minus penalties, from which advantages are computed."""
        return self.totals - self.penalties

    def is_zero_std(self) -> Bool[Tensor, " P"]:
        """Whether the rewards of a group are equal, of the images that are not left out."""
        return is_zero_std(self.rewards())

    def is_learned_from(self) -> Bool[Tensor, "P G"]:
        """Whether an advantage of the image, or of one of its tokens, is not 0."""
        return (self.advantages != 0).any(dim=-1)

    def trained_groups(self) -> Int64[Tensor, " L"]:
        """`trained`, with None resolved to all groups."""
        return torch.arange(len(self.totals)) if self.trained is None else self.trained

    def is_discarded(self) -> Bool[Tensor, " P"]:
        """Whether other groups were sampled in place of a group."""
        return ~torch.isin(torch.arange(len(self.totals)), self.trained_groups())


@dataclass(frozen=True)
class EvaluationPart:
    """Some of the held-out prompts, sampled and scored; attributes as in `Evaluation`.

    Attributes:
        seconds: Duration of the evaluation.
    """

    step: int
    prompts: tuple[Prompt, ...]
    images: ImageBatch
    scores: RewardTable
    entropy: Float32[Tensor, " P"]
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """Held-out prompts, sampled and scored at one policy step with fixed seeds.

    Attributes:
        step: Number of training steps of the policy that sampled; 0 before training.
        prompts: The P prompts, the same in every evaluation of a run.
        images: G samples per prompt.
        totals: Weighted scores, on a scale that is comparable across steps; see
            `rewards.weighting.contributions`; NaN for images that a term with a weight refused.
        entropy: Minus the mean log-probability of each prompt's sampled tokens, nats: an unbiased
            estimate of the sampling distribution's entropy per token.
    """

    step: int
    prompts: tuple[Prompt, ...]
    images: ImageBatch
    scores: RewardTable
    totals: Float32[Tensor, "P G"]
    entropy: Float32[Tensor, " P"]


def no_progress(done: int, total: int) -> None:
    """A `ProgressCallback` that does nothing."""
