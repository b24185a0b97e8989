"""The module that a policy trains: a language model and its head, which score tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor, nn

from glm_grpo.models.token_scores import score_tokens, token_log_probs


@runtime_checkable
class TokensToScore(Protocol):
    """What all families' sequences have; the prompts are those of the family."""

    @property
    def token_ids(self) -> Int64[Tensor, "N T"]:
        """Tokens to score."""
        ...

    @property
    def sampling_mask(self) -> Bool[Tensor, "N T V"] | None:
        """Codebook entries that could be drawn at each token; None: all."""
        ...


Sequences = TypeVar("Sequences", bound=TokensToScore)


class PolicyNetwork(nn.Module, ABC, Generic[Sequences]):
    """The module that an `AdaptedPolicy` trains, and that engines wrap or shard.

    Attributes:
        has_entropy_gradient: Whether entropies have a gradient too, which takes memory.

    Args:
        language_model: Stock decoder, with `embed_tokens` and `layers`.
        codebook_size: V, the number of the head's first rows that can be drawn.
        temperature: Divides the logits, > 0.
    """

    has_entropy_gradient = False

    def __init__(self, language_model: Any, *, codebook_size: int, temperature: float) -> None:
        super().__init__()
        self.language_model = language_model
        self.codebook_size = codebook_size
        self.temperature = temperature

    @property
    @abstractmethod
    def head(self) -> nn.Linear:
        """The last map, whose first rows give the logits of the codebook; never quantised."""

    @abstractmethod
    def logits(self, hidden_states: Float[Tensor, "R D"]) -> Float32[Tensor, "N V"]:
        """Logits that tokens are drawn from, from the states of all rows."""

    @abstractmethod
    def _read(self, sequences: Sequences) -> Float[Tensor, "N T D"]:
        """Read sequences; returns the head's input at each token to score."""

    def forward(
        self, sequences: Sequences
    ) -> tuple[Float32[Tensor, "N T"], Float32[Tensor, "N T"], Float32[Tensor, "N T"]]:
        """The fields of `TokenScores`.

        Plain tensors, because engines find the tensors of a backward pass only in tuples.
        """
        scores = score_tokens(
            self._read(sequences),
            self.head.weight,
            sequences.token_ids,
            bias=self.head.bias,
            codebook_size=self.codebook_size,
            temperature=self.temperature,
            sampling_mask=sequences.sampling_mask,
            has_entropy_gradient=self.has_entropy_gradient and torch.is_grad_enabled(),
        )
        entropy = scores.entropy.clone() if self.has_entropy_gradient else scores.entropy
        # FSDP2 hooks the returned tensors, and warns about views.
        return scores.log_probs.clone(), entropy, scores.outside_codebook

    def log_probs(self, sequences: Sequences) -> Float32[Tensor, "N T"]:
        """Only the log-probabilities of `forward`, without gradient."""
        return token_log_probs(
            self._read(sequences),
            self.head.weight,
            sequences.token_ids,
            bias=self.head.bias,
            codebook_size=self.codebook_size,
            temperature=self.temperature,
            sampling_mask=sequences.sampling_mask,
        )
