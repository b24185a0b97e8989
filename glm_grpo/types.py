"""The data that travels, in the order it travels.

Axes, everywhere outside `glm_image/` and `rewards/`:

=====  ====================================================================
P      prompts of one batch
G      images (token grids) sampled for each prompt
T      AR tokens of one image: preview grid, then target grid; of an edit, target grid alone
N      source pictures of a prompt, 0 for text-to-image; in `glm_grpo.grpo`, some of the P * G
       sequences
S      tokens of a target grid or of a source picture
R      reward terms
H W    pixels
=====  ====================================================================

P and G stay separate axes, so a token row can never meet another prompt's reward. One image size
per batch: T is a constant and there is no padding mask over generated tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float32, Int64, UInt8
from torch import Tensor

from rewards.types import Prompt, RewardTable


@dataclass(frozen=True)
class PromptBatch:
    """What one step asks for.

    Attributes:
        prompts: The P prompts, all with N source pictures.
        group_size: G, images per prompt (>= 2 when training).
        height: Pixels, a multiple of 32.
        width: Pixels, a multiple of 32.
        seed: Of sampling; tokens are a function of (seed, prompt position, policy).
        decode_seeds: P seeds, one initial noise per prompt, shared by its G images.
        source_token_ids: What policy and decoder read of the source pictures: codebook ids, row by
            row. Encoded once, since rounding may flip a tie; None before that, and for
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
        """N."""
        return len(self.prompts[0].sources)


@dataclass(frozen=True)
class Rollout:
    """Sampled token grids with the log-probability of every token under the sampling distribution.

    Attributes:
        token_ids: Codebook ids, preview grid first, then target grid.
        log_probs: Natural logarithm, of the distribution the token was drawn from (temperature,
            truncation and renormalisation included).
        sampling_mask: The codebook entries that could be sampled at each token (top-k / top-p), V
            wide; None when nothing was truncated.
        policy_step: Number of optimizer steps of the policy that sampled.
    """

    token_ids: Int64[Tensor, "P G T"]
    log_probs: Float32[Tensor, "P G T"]
    sampling_mask: Bool[Tensor, "P G T V"] | None
    policy_step: int


@dataclass(frozen=True)
class ImageBatch:
    """Decoded pictures.

    Attributes:
        pixels: RGB, 0..255.
        decode_seeds: One per prompt: `torch.Generator().manual_seed(seed)` draws its noise.
    """

    pixels: UInt8[Tensor, "P G 3 H W"]
    decode_seeds: tuple[int, ...]


@dataclass(frozen=True)
class Advantages:
    """Group-relative advantages.

    Attributes:
        values: Zero mean inside every group; exactly 0 in flat groups.
        is_flat: True where all G rewards of a prompt are equal.
    """

    values: Float32[Tensor, "P G"]
    is_flat: Bool[Tensor, " P"]


@dataclass(frozen=True)
class OffPolicyCorrection:
    """For tokens that were sampled by a policy older than the one the updates begin with.

    Attributes:
        proximal_log_probs: Of the tokens under the policy that the updates begin with: what ratios
            are taken to, instead of the log-probs as sampled.
        weights: What each token's part of the policy loss is multiplied by, >= 0.
    """

    proximal_log_probs: Float32[Tensor, "*sequences T"]
    weights: Float32[Tensor, "*sequences T"]


@dataclass(frozen=True)
class Examples:
    """Token grids of target pictures, as examples to learn from.

    Attributes:
        prompts: One image each, at least one.
        token_ids: Token grids of the targets of these prompts.
        places: Position of each of these prompts in the batch. Empty if no prompt of the batch has
            a target: `prompts` then holds one that is replayed with weight 0, because all processes
            must call the model equally often.
        weight: Factor of the mean cross-entropy in the loss.
    """

    prompts: PromptBatch
    token_ids: Int64[Tensor, "A T"]
    places: Int64[Tensor, " B"]
    weight: float


@dataclass(frozen=True)
class Experience:
    """All of one batch: what is trained on, stored and replayed.

    Attributes:
        prompts: What was asked for.
        rollout: What was sampled.
        images: What was drawn.
        rewards: Raw scores of every term.
        totals: The weighted rewards.
        penalties: KL to the reference taken from each total before groups are compared; 0 where
            it stands in the loss or nowhere.
        advantages: From totals less penalties.
        reference_log_probs: Of the sampled tokens under the policy before training; None where
            nobody has read them yet.
        is_sampled_by_reference: Whether the policy that sampled has the weights of the reference;
            False where no KL to it is weighted.
        correction: Of every token, P G T; None where the policy that sampled is the one that the
            updates begin with.
        trained: The groups that are trained on, in the order of the prompts of the step that they
            stand for; the others were flat and are stored and counted alone. None: all of them.
    """

    prompts: PromptBatch
    rollout: Rollout
    images: ImageBatch
    rewards: RewardTable
    totals: Float32[Tensor, "P G"]
    penalties: Float32[Tensor, "P G"]
    advantages: Advantages
    reference_log_probs: Float32[Tensor, "P G T"] | None = None
    is_sampled_by_reference: bool = False
    correction: OffPolicyCorrection | None = None
    trained: Int64[Tensor, " K"] | None = None

    def trained_rows(self) -> Int64[Tensor, " K"]:
        """`trained`, also where it is all groups."""
        return torch.arange(len(self.totals)) if self.trained is None else self.trained

    def is_discarded(self) -> Bool[Tensor, " P"]:
        """Groups that others were sampled in place of."""
        return ~torch.isin(torch.arange(len(self.totals)), self.trained_rows())


@dataclass(frozen=True)
class EvaluationPart:
    """Some of the held-out prompts, sampled and scored; attributes as in `Evaluation`.

    Attributes:
        seconds: How long that took.
    """

    step: int
    prompts: tuple[Prompt, ...]
    images: ImageBatch
    rewards: RewardTable
    entropy: Float32[Tensor, " P"]
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """Held-out prompts, sampled and scored at one policy step with fixed seeds.

    Attributes:
        step: Number of training steps of the policy that sampled; 0 before training.
        prompts: The P prompts, the same in every evaluation of a run.
        images: G samples per prompt.
        rewards: Raw scores of every term.
        totals: The weighted rewards, on a scale that compares across steps; see
            `rewards.reweigh.contributions`.
        entropy: Minus the mean log-probability of the tokens sampled for each prompt, nats: an
            unbiased estimate of the entropy a token of the sampling distribution has.
    """

    step: int
    prompts: tuple[Prompt, ...]
    images: ImageBatch
    rewards: RewardTable
    totals: Float32[Tensor, "P G"]
    entropy: Float32[Tensor, " P"]


Count = Callable[[int, int], object]
"""Is told how much of a long piece of work is done, and of how much: 3 of 8."""


def not_counted(done: int, total: int) -> None:
    """The `Count` where nobody watches."""
