"""Language model and head as one module: what is trained, and what engines wrap or shard."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor, nn
from transformers import GlmImageTextModel
from typing_extensions import override

from glm_grpo.models.adapted_policy import PolicyNetwork
from glm_grpo.models.token_scores import score_tokens, token_log_probs


class TokenSequences(NamedTuple):
    """Prompts, padded on the left to L tokens, with their T generated tokens.

    The last token is scored but not read: the model reads S = L + T - 1 tokens.

    Attributes:
        input_ids: Tokens to read.
        attention_mask: 1 on tokens, 0 on padding; None if there is no padding, which lets attention
            use a fused kernel without a mask and without repeated keys and values.
        position_ids: Temporal, height, width.
        token_ids: Tokens to score.
        sampling_mask: Codebook entries that could be drawn at each token; None: all.
    """

    input_ids: Int64[Tensor, "N S"]
    attention_mask: Int64[Tensor, "N S"] | None
    position_ids: Int64[Tensor, "3 N S"]
    token_ids: Int64[Tensor, "N T"]
    sampling_mask: Bool[Tensor, "N T V"] | None


class GlmImageNetwork(PolicyNetwork[TokenSequences]):
    """Scores tokens under the codebook distribution.

    Args:
        codebook_size: Number of the head's first rows that can be drawn.
        temperature: Divides the logits, > 0.
    """

    _no_split_modules: ClassVar[list[str]] = ["GlmImageTextDecoderLayer"]
    """Modules that accelerate shards as a unit."""

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

    def forward(
        self,
        input_ids: Int64[Tensor, "N S"],
        attention_mask: Int64[Tensor, "N S"] | None,
        position_ids: Int64[Tensor, "3 N S"],
        token_ids: Int64[Tensor, "N T"],
        sampling_mask: Bool[Tensor, "N T V"] | None,
    ) -> tuple[Float32[Tensor, "N T"], Float32[Tensor, "N T"], Float32[Tensor, "N T"]]:
        """The fields of `TokenScores`, from those of `TokenSequences`.

        Plain tensors, because engines find the tensors of a backward pass only in tuples.
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
        # FSDP2 hooks the returned tensors, and warns about views.
        return scores.log_probs.clone(), entropy, scores.outside_codebook

    def log_probs(self, sequences: TokenSequences) -> Float32[Tensor, "N T"]:
        """Only the log-probabilities of `forward`, without gradient."""
        return token_log_probs(
            self._read(sequences),
            self.lm_head.weight,
            sequences.token_ids,
            codebook_size=self._codebook_size,
            temperature=self.temperature,
            sampling_mask=sequences.sampling_mask,
        )

    def logits(self, hidden_states: Float[Tensor, "N D"]) -> Float32[Tensor, "N V"]:
        """Logits of the codebook in fp32, divided by the temperature."""
        logits = nn.functional.linear(hidden_states, self.head.weight[: self._codebook_size])
        return logits.float() / self.temperature

    @property
    @override
    def head(self) -> nn.Linear:
        return self.lm_head

    def _read(self, sequences: TokenSequences) -> Float[Tensor, "N T D"]:
        """The hidden states that predict the generated tokens."""
        hidden_states = self.language_model(
            input_ids=sequences.input_ids,
            attention_mask=sequences.attention_mask,
            position_ids=sequences.position_ids,
            use_cache=False,
        ).last_hidden_state
        return hidden_states[:, -sequences.token_ids.shape[1] :]
