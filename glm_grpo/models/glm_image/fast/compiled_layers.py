"""Compile the language model's layers for replay, and check that they equal the eager ones."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GlmImageTextModel
from transformers.models.glm_image.modeling_glm_image import GlmImageTextDecoderLayer

from glm_grpo.models.compiling import COMPILING, reason_of
from glm_grpo.models.glm_image.network import GlmImageNetwork, TokenSequences

TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest mean difference of log-probs, nats per token, by the dtype of the head."""

_MOST_GRAPHS = 32
"""Compiled forms of a layer, beyond which torch runs it eagerly. With and without gradient,
adapters and mask there are 8, torch's default; a mask makes some more, by the divisors of a row's
length (seen on an H200)."""

_logger = logging.getLogger(__name__)


class _CompiledLayer(GlmImageTextDecoderLayer):
    """A decoder layer that runs compiled on whole rows, and eagerly with a cache."""

    def forward(self, hidden_states: Tensor, *, past_key_values: Any, **kwargs: Any) -> Any:
        # Required: if a cache came under another name, as from transformers 5.24 on, the compiled
        # function would fill it.
        if past_key_values is None:
            return self.compiled(self, hidden_states, **kwargs)
        return GlmImageTextDecoderLayer.forward(
            self, hidden_states, past_key_values=past_key_values, **kwargs
        )


def _read(layer: _CompiledLayer, hidden_states: Tensor, **kwargs: Any) -> Any:
    forward = partial(GlmImageTextDecoderLayer.forward, layer, **kwargs)
    if layer.is_recomputing and layer.training:
        # Inside the compiled function: outside, the recomputation may use another compiled graph
        # than the forward pass, which keeps other tensors (pytorch issue 166926).
        return checkpoint(forward, hidden_states, use_reentrant=False)
    return forward(hidden_states)


class CompiledLayers:
    """Decoder layers, compiled in place.

    They run eagerly until `check` has compared them with the eager ones, and stay eager if they
    differ or cannot be compiled.

    Args:
        language_models: With or without adapters.
    """

    def __init__(self, *language_models: GlmImageTextModel) -> None:
        self._layers = [layer for model in language_models for layer in model.layers]
        self._is_recomputing = self._layers[0].gradient_checkpointing
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, _MOST_GRAPHS)
        # One function for all layers, which are alike, and for any number and length of rows.
        compiled = torch.compile(_read, dynamic=True, options=COMPILING)
        for layer in self._layers:
            layer.compiled, layer.is_recomputing = compiled, self._is_recomputing
        self._is_checked = False

    def check(self, network: GlmImageNetwork, sequences: TokenSequences) -> None:
        """Decide at the first call whether to use the compiled layers.

        Args:
            network: Contains one of the language models.
            sequences: Tokens of the first replay.
        """
        if self._is_checked:
            return
        self._is_checked = True
        eager = network.log_probs(sequences)
        self._use(_CompiledLayer, is_recomputing_outside=False)
        try:
            compiled = network.log_probs(sequences)
            trained = _with_backward_pass(network, sequences)
            gaps = [float((each - eager).abs().mean()) for each in (compiled, trained)]
            allowed = TOLERANCES[network.lm_head.weight.dtype]
            is_equal = all(gap <= allowed for gap in gaps)
            shown = " and ".join(f"{gap:.1e}" for gap in gaps)
            reason = "" if is_equal else f"log-probs differ by {shown} nats per token"
        # The same rows were read eagerly just now, so compiling causes this, whatever it is.
        except Exception as error:
            reason = reason_of(error)
        if reason:
            self._use(GlmImageTextDecoderLayer, is_recomputing_outside=self._is_recomputing)
            _logger.warning(
                "the language model is not compiled (%s): tokens are replayed eagerly, which is "
                "slower; model.compile=false skips the attempt",
                reason,
            )

    def _use(self, kind: type[GlmImageTextDecoderLayer], *, is_recomputing_outside: bool) -> None:
        for layer in self._layers:
            # Another class keeps parameters, hooks and names as they are. A wrapper would be
            # plainer; this stays until a GPU has measured both.
            layer.__class__, layer.gradient_checkpointing = kind, is_recomputing_outside


def _with_backward_pass(network: GlmImageNetwork, sequences: TokenSequences) -> Tensor:
    """Log-probs as an update reads them; its backward pass is compiled as well."""
    first: nn.Module = network.language_model.layers[0]
    with torch.enable_grad():
        network.language_model.train()
        log_probs = network(sequences)[0]
        network.language_model.eval()
        # All layers take part in the gradient of the first one.
        torch.autograd.grad(log_probs.sum(), _smallest(first.parameters()))
    return log_probs.detach()


def _smallest(parameters: Iterable[nn.Parameter]) -> nn.Parameter:
    return min((each for each in parameters if each.requires_grad), key=nn.Parameter.numel)
