"""Language model and generation head as one module that scores tokens under guidance."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor, nn
from transformers import JanusForConditionalGeneration
from typing_extensions import override

from glm_grpo.config.sections import RolloutSection
from glm_grpo.models.network import PolicyNetwork

PUBLISHED_GUIDANCE = 5.0
"""Scale of guidance that the model is published with. Source: `convert_janus_weights_to_hf.py` of
transformers."""


def guidance_of(rollout: RolloutSection) -> float:
    """Scale of guidance between tokens; as published if none is set."""
    return PUBLISHED_GUIDANCE if rollout.guidance_scale is None else rollout.guidance_scale


class TokenSequences(NamedTuple):
    """Prompts, padded on the left to L tokens, with their T generated tokens.

    Without guidance there are N prompts; with guidance twice as many, those with a condition first,
    and S = L + T - 1 tokens are read of each: the last token is scored but not read.

    Attributes:
        attention_mask: 1 on tokens, 0 on padding; None if there is no padding, which lets attention
            use a fused kernel without a mask.
        token_ids: Tokens to score.
        sampling_mask: Codes that could be drawn at each token; None: all.
    """

    input_ids: Int64[Tensor, "R L"]
    attention_mask: Int64[Tensor, "R S"] | None
    token_ids: Int64[Tensor, "N T"]
    sampling_mask: Bool[Tensor, "N T V"] | None


class JanusNetwork(PolicyNetwork[TokenSequences]):
    """Scores tokens under the guided distribution, softmax((u + w (c - u)) / temperature).

    c and u are the head's logits with and without the prompt. The last map of the head is linear,
    so guidance is applied to the states before it, in fp32: one pass of it instead of two.
    Source: classifier-free guidance, Ho and Salimans 2022 (arXiv 2207.12598), in the form of
    `JanusForConditionalGeneration.generate`.

    Args:
        temperature: Divides the logits, > 0.
        guidance_scale: w, >= 1; at 1 only the rows with a condition are read.
    """

    _no_split_modules: ClassVar[list[str]] = ["LlamaDecoderLayer"]
    """Modules that accelerate shards as a unit."""

    def __init__(
        self, model: JanusForConditionalGeneration, *, temperature: float, guidance_scale: float
    ) -> None:
        super().__init__(
            model.model.language_model,
            codebook_size=len(model.model.generation_head.vision_head.weight),
            temperature=temperature,
        )
        self.generation_embeddings = model.model.generation_embeddings
        self.generation_aligner = model.model.generation_aligner
        self.generation_head = model.model.generation_head
        self.guidance_scale = guidance_scale

    @property
    @override
    def head(self) -> nn.Linear:
        last: nn.Linear = self.generation_head.vision_head
        return last

    @property
    def is_guided(self) -> bool:
        """Whether every image takes a second row, without the prompt."""
        return self.guidance_scale > 1.0

    @override
    def logits(self, hidden_states: Float[Tensor, "R D"]) -> Float32[Tensor, "N V"]:
        last = self.head
        products = self._guide(hidden_states) @ last.weight.T
        return (products.float() + last.bias) / self.temperature

    def embed_tokens(self, token_ids: Int64[Tensor, "N T"]) -> Float[Tensor, "R T D"]:
        """Generated tokens as the language model reads them, the same in both rows."""
        states = self.generation_aligner(self.generation_embeddings(token_ids))
        return torch.cat([states, states]) if self.is_guided else states

    @override
    def _read(self, sequences: TokenSequences) -> Float[Tensor, "N T D"]:
        prompts = self.language_model.embed_tokens(sequences.input_ids)
        generated = self.embed_tokens(sequences.token_ids[:, :-1])
        mask = sequences.attention_mask
        hidden_states = self.language_model(
            inputs_embeds=torch.cat([prompts, generated], dim=1),
            attention_mask=mask,
            position_ids=None if mask is None else positions(mask),
            use_cache=False,
        ).last_hidden_state
        return self._guide(hidden_states[:, -sequences.token_ids.shape[1] :])

    def _guide(self, hidden_states: Float[Tensor, "R *T D"]) -> Float[Tensor, "N *T D"]:
        head = self.generation_head
        states = head.activation_fn(head.proj_out(hidden_states))
        if not self.is_guided:
            return states
        conditional, unconditional = states.float().chunk(2)
        guided = unconditional + self.guidance_scale * (conditional - unconditional)
        return guided.to(states.dtype)


def positions(attention_mask: Int64[Tensor, "R S"]) -> Int64[Tensor, "R S"]:
    """Positions that do not count padding; sampling and replay use the same ones.

    Stock generation counts it. Rotary angles are relative, so that is the same function.
    """
    return (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
