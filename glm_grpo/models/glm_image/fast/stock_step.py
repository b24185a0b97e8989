"""The stock forward pass as a token step, and the choice of the fastest step that equals it."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import GlmImageTextModel
from transformers.cache_utils import Cache, DynamicCache

from glm_grpo.models.compiling import STEP_TOLERANCES, reason_of
from glm_grpo.models.glm_image.fast.recorded_step import RecordedStep
from glm_grpo.models.glm_image.fast.token_step import Finish, Step, TokenStep
from glm_grpo.models.glm_image.prompt_inputs import PromptInputs

_CHECKED_TOKENS = 3
"""Tokens to compare. The first reads only the prompt; the others also generated tokens."""

_CHECKED_PROMPTS = 2
"""Prompts to compare; of two, one is usually padded, and their second cache stays small."""

_logger = logging.getLogger(__name__)


@runtime_checkable
class StepBuilder(Protocol):
    """Builds a step that continues prefilled prompts; arguments as in `TokenStep`."""

    def __call__(
        self,
        language_model: GlmImageTextModel,
        inputs: PromptInputs,
        cache: Cache,
        *,
        group_size: int,
        positions: Int64[Tensor, "3 P T"],
    ) -> Step:
        """See `TokenStep`."""
        ...


class StockStep(Step):
    """The model's own forward pass, one token of every sample at a time.

    Slower than `TokenStep`, but works with any layers. Arguments as there.
    """

    def __init__(
        self,
        language_model: GlmImageTextModel,
        inputs: PromptInputs,
        cache: Cache,
        *,
        group_size: int,
        positions: Int64[Tensor, "3 P T"],
    ) -> None:
        self._model = language_model
        self._cache = DynamicCache()
        for index, layer in enumerate(cache.layers):
            keys, values = (
                each.repeat_interleave(group_size, dim=0) for each in (layer.keys, layer.values)
            )
            self._cache.update(keys, values, index)
        device = cache.layers[0].keys.device
        self._mask = inputs.attention_mask.repeat_interleave(group_size, dim=0).to(device)
        self._positions = positions.repeat_interleave(group_size, dim=1).to(device)
        self._written = 0

    def __call__(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """See `Step`."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=1)
        at = slice(self._written, self._written + 1)
        self._written += 1
        read = self._model(
            input_ids=token_ids.unsqueeze(1),
            attention_mask=self._mask,
            position_ids=self._positions[..., at],
            past_key_values=self._cache,
            use_cache=True,
        )
        hidden: Tensor = read.last_hidden_state[:, -1]
        return hidden


@torch.no_grad()
def choose_step(
    language_model: GlmImageTextModel,
    inputs: PromptInputs,
    cache: Cache,
    *,
    positions: Int64[Tensor, "3 P T"],
    finish: Finish[Any],
    is_compiling: bool = False,
) -> StepBuilder:
    """Choose the fastest step that equals the stock one on these prompts; warn if one does not.

    Args:
        cache: Prefilled with them; not changed.
        positions: Positions of the generated tokens, T for each prompt.
        finish: Work on every hidden state, which a recorded step must be able to record.
        is_compiling: Whether to try a compiled step on a CUDA device.
    """
    few = slice(0, _CHECKED_PROMPTS)
    some = PromptInputs(
        inputs.input_ids[few],
        inputs.attention_mask[few],
        inputs.position_ids[:, few],
        inputs.next_position[few],
    )
    read = DynamicCache()
    for index, layer in enumerate(cache.layers):
        read.update(layer.keys[few], layer.values[few], index)
    fast: dict[str, StepBuilder] = {"token step": TokenStep}
    if cache.layers[0].keys.device.type == "cuda":
        fast = {"recorded token step": RecordedStep, **fast}
        if is_compiling:
            fast = {"compiled token step": partial(RecordedStep, is_compiled=True), **fast}
    for name, build in fast.items():
        reason = _difference(build, language_model, some, read, positions[:, few], finish)
        if not reason:
            return build
        _logger.warning(
            "the %s does not fit this model (%s): a slower one is used; check that your version of "
            "transformers is supported",
            name,
            reason,
        )
    return StockStep


def _difference(
    build: StepBuilder,
    language_model: GlmImageTextModel,
    inputs: PromptInputs,
    cache: Cache,
    positions: Int64[Tensor, "3 P T"],
    finish: Finish[Any],
) -> str:
    """Reason to fall back from a step to a slower one; empty if there is none."""
    try:
        ours, theirs, recorded = (
            each(language_model, inputs, cache, group_size=1, positions=positions)
            for each in (build, StockStep, build)
        )
        read_and_finish = recorded.then(finish)
        uniforms = torch.full(inputs.next_position.shape, 0.5, dtype=torch.float64)
        for token in range(min(positions.shape[2], _CHECKED_TOKENS)):
            token_ids = torch.full_like(
                inputs.next_position, token, device=cache.layers[0].keys.device
            )
            found, expected = ours(token_ids), theirs(token_ids)
            read_and_finish(token_ids, uniforms.to(token_ids.device))
        gap = float((found - expected).abs().max() / expected.abs().max())
    # Layers of another version of transformers, or no compiler.
    except Exception as error:
        return reason_of(error)
    return "" if gap <= STEP_TOLERANCES[expected.dtype] else f"hidden states differ by {gap:.1e}"


class ChosenStep:
    """Builds the step that `choose_step` finds at the first call; a `StepBuilder`.

    Args:
        finish: As in `choose_step`.
        is_compiling: As in `choose_step`.
    """

    def __init__(self, finish: Finish[Any], *, is_compiling: bool = False) -> None:
        self._finish, self._is_compiling = finish, is_compiling
        self._build: StepBuilder | None = None

    def __call__(
        self,
        language_model: GlmImageTextModel,
        inputs: PromptInputs,
        cache: Cache,
        *,
        group_size: int,
        positions: Int64[Tensor, "3 P T"],
    ) -> Step:
        """See `StepBuilder`."""
        if self._build is None:
            self._build = choose_step(
                language_model,
                inputs,
                cache,
                positions=positions,
                finish=self._finish,
                is_compiling=self._is_compiling,
            )
        return self._build(
            language_model, inputs, cache, group_size=group_size, positions=positions
        )
