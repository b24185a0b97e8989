"""Language model and head as one module: what is trained, and what engines wrap or shard."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor, nn
from transformers import GlmImageTextModel

from glm_grpo.models.glm_image.fast.token_scores import score_tokens, token_log_probs


class TokenSequences(NamedTuple):
    """Prompts, padded on the left to L tokens, with their T generated tokens.

    The last of these is not read but only scored: the model reads S = L + T - 1.

    Attributes:
        input_ids: What is read.
        attention_mask: 1 on tokens, 0 on padding; None where there is no padding, so that attention
            runs on a fused kernel that needs no mask, and does not repeat keys and values.
        position_ids: Temporal, height, width.
        token_ids: What is scored.
        sampling_mask: The codebook entries that could be drawn at each token; None for all.
    """

    input_ids: Int64[Tensor, "N S"]
    attention_mask: Int64[Tensor, "N S"] | None
    position_ids: Int64[Tensor, "3 N S"]
    token_ids: Int64[Tensor, "N T"]
    sampling_mask: Bool[Tensor, "N T V"] | None


class PolicyNetwork(nn.Module):
    """Scores tokens under the codebook distribution.

    Attributes:
        temperature: Divides the logits.
        has_entropy_gradient: Whether entropies have a gradient too, which takes memory.

    Args:
        language_model: GLM-Image's, with or without adapters.
        lm_head: Its head.
        codebook_size: Entries of the head that can be drawn.
        temperature: Divides the logits, > 0.
    """

    _no_split_modules: ClassVar[list[str]] = ["GlmImageTextDecoderLayer"]
    """Where accelerate cuts a model into parts that are gathered one by one."""

    def __init__(
        self,
        language_model: GlmImageTextModel,
        lm_head: nn.Linear,
        *,
        codebook_size: int,
        temperature: float,
    ) -> None:
        super().__init__()
        self.language_model = language_model
        self.lm_head = lm_head
        self._codebook_size = codebook_size
        self.temperature = temperature
        self.has_entropy_gradient = False

    def forward(
        self,
        input_ids: Int64[Tensor, "N S"],
        attention_mask: Int64[Tensor, "N S"] | None,
        position_ids: Int64[Tensor, "3 N S"],
        token_ids: Int64[Tensor, "N T"],
        sampling_mask: Bool[Tensor, "N T V"] | None,
    ) -> tuple[Float32[Tensor, "N T"], Float32[Tensor, "N T"], Float32[Tensor, "N T"]]:
        """The three of `TokenScores`: log-probability, with gradient, entropy, mass outside.

        Takes the fields of `TokenSequences`, and returns a tuple, because engines find the tensors
        of a backward pass in these, not in objects.
        """
        sequences = TokenSequences(
            input_ids, attention_mask, position_ids, token_ids, sampling_mask
        )
        scores = score_tokens(
            self._read(sequences),
            self.lm_head.weight,
            token_ids,
            codebook_size=self._codebook_size,
            temperature=self.temperature,
            sampling_mask=sampling_mask,
            has_entropy_gradient=self.has_entropy_gradient and torch.is_grad_enabled(),
        )
        entropy = scores.entropy.clone() if self.has_entropy_gradient else scores.entropy
        # FSDP2 hangs its backward pass on what is returned, and warns of views.
        return scores.log_probs.clone(), entropy, scores.outside_codebook

    def log_probs(self, sequences: TokenSequences) -> Float32[Tensor, "N T"]:
        """The log-probabilities of `forward` alone, without gradient."""
        return token_log_probs(
            self._read(sequences),
            self.lm_head.weight,
            sequences.token_ids,
            codebook_size=self._codebook_size,
            temperature=self.temperature,
            sampling_mask=sequences.sampling_mask,
        )

    def codebook_logits(self, hidden_states: Float[Tensor, "N D"]) -> Float32[Tensor, "N V"]:
        """Logits over the codebook alone, in fp32, divided by the temperature."""
        logits = nn.functional.linear(hidden_states, self.codebook_weight())
        return logits.float() / self.temperature

    def codebook_weight(self) -> Float[Tensor, "V D"]:
        """The rows of the head that stand for the codebook."""
        return self.lm_head.weight[: self._codebook_size]

    def _read(self, sequences: TokenSequences) -> Float[Tensor, "N T D"]:
        """The hidden states that predict the generated tokens."""
        hidden_states = self.language_model(
            input_ids=sequences.input_ids,
            attention_mask=sequences.attention_mask,
            position_ids=sequences.position_ids,
            use_cache=False,
        ).last_hidden_state
        return hidden_states[:, -sequences.token_ids.shape[1] :]
