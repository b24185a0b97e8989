"""Language model and head as one module: what is trained, and what engines wrap or shard."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor, nn
from transformers import GlmImageTextModel
from typing_extensions import override

from glm_grpo.models.network import PolicyNetwork


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
    """Scores tokens under the codebook distribution; arguments as in `PolicyNetwork`."""

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
        super().__init__(language_model, codebook_size=codebook_size, temperature=temperature)
        self.lm_head = lm_head

    @override
    def logits(self, hidden_states: Float[Tensor, "N D"]) -> Float32[Tensor, "N V"]:
        logits = nn.functional.linear(hidden_states, self.head.weight[: self.codebook_size])
        return logits.float() / self.temperature

    @property
    @override
    def head(self) -> nn.Linear:
        return self.lm_head

    @override
    def _read(self, sequences: TokenSequences) -> Float[Tensor, "N T D"]:
        hidden_states = self.language_model(
            input_ids=sequences.input_ids,
            attention_mask=sequences.attention_mask,
            position_ids=sequences.position_ids,
            use_cache=False,
        ).last_hidden_state
        return hidden_states[:, -sequences.token_ids.shape[1] :]
