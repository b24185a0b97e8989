"""Read one token of every sample: eagerly, or as a CUDA graph that launches all kernels at once.

Both run the stock layers. The graph repeats the same operations on the same memory, so it attends
to room for more tokens than there are, and masks what is not written yet.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from glm_grpo.models.compiling import STEP_TOLERANCES, reason_of
from glm_grpo.models.janus_pro.network import JanusNetwork
from glm_grpo.models.recording import Recording

_WIDTHS = 4
"""Graphs of a rollout, each for a quarter of the tokens: fewer read more memory that is masked, and
more take longer to record."""

_CHECKED_TOKENS = 3
"""Tokens to compare. The first reads only the prompt; the others also generated tokens."""

_Finished = TypeVar("_Finished")
Finish = Callable[[Float[Tensor, "R D"], Float64[Tensor, " N"]], _Finished]
"""Work on the states of all rows, and a uniform number per sample, that follows the step."""

_logger = logging.getLogger(__name__)


@runtime_checkable
class StepBuilder(Protocol):
    """Builds a step that continues prefilled prompts; arguments as in `TokenStep`."""

    def __call__(
        self,
        network: JanusNetwork,
        caches: Sequence[Cache],
        mask: Int64[Tensor, "R L"] | None,
        *,
        group_size: int,
        num_tokens: int,
    ) -> TokenStep:
        """See `TokenStep`."""
        ...


class TokenStep:
    """Reads one token of every sample; returns the state of every row.

    Args:
        caches: Keys and values of the prompts, in parts of the rows.
        mask: 1 on the prompts' tokens; None if there is no padding.
        group_size: G, samples of each row.
        num_tokens: T; the last token is drawn, but not read.
    """

    def __init__(
        self,
        network: JanusNetwork,
        caches: Sequence[Cache],
        mask: Int64[Tensor, "R L"] | None,
        *,
        group_size: int,
        num_tokens: int,
    ) -> None:
        self._network = network
        self._cache = DynamicCache()
        parts = zip(*(cache.layers for cache in caches), strict=True)
        self._layers = [FilledLayer(each, group_size, num_tokens - 1) for each in parts]
        self._cache.layers = [*self._layers]
        self._mask = None if mask is None else mask.repeat_interleave(group_size, dim=0)

    def __call__(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "R D"]:
        """Read one token of each sample."""
        position_ids = None
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=1)
            position_ids = self._mask.sum(dim=1, keepdim=True) - 1
        return self._read(token_ids, self._mask, position_ids)

    def then(self, finish: Finish[_Finished]) -> Callable[[Tensor, Tensor], _Finished]:
        """The step followed by `finish`, as a function of tokens and uniforms."""
        return lambda token_ids, uniforms: finish(self(token_ids), uniforms)

    def _read(
        self, token_ids: Int64[Tensor, " N"], mask: Tensor | None, position_ids: Tensor | None
    ) -> Float[Tensor, "R D"]:
        read = self._network.language_model(
            inputs_embeds=self._network.embed_tokens(token_ids.unsqueeze(1)),
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=self._cache,
            use_cache=True,
        )
        hidden: Tensor = read.last_hidden_state[:, 0]
        return hidden


class FixedShapesStep(TokenStep):
    """Reads tokens with operations that are the same for a quarter of them; arguments as there.

    The number of the current token is kept on the device.
    """

    def __init__(
        self,
        network: JanusNetwork,
        caches: Sequence[Cache],
        mask: Int64[Tensor, "R L"] | None,
        *,
        group_size: int,
        num_tokens: int,
    ) -> None:
        super().__init__(network, caches, mask, group_size=group_size, num_tokens=num_tokens)
        like = self._layers[0].room
        rows, length = like.shape[0], self._layers[0].written
        prompts = torch.ones(rows, length, device=like.device, dtype=torch.long)
        if self._mask is not None:
            prompts = self._mask
        self._position_ids = prompts.sum(dim=1, keepdim=True)
        # Added to the scores of attention: 0 on what is read.
        bias = torch.full((rows, like.shape[2]), -torch.inf, device=like.device, dtype=like.dtype)
        bias[:, :length].masked_fill_(prompts == 1, 0.0)
        self._bias = bias[:, None, None]
        self._at = torch.full((1,), length, device=like.device, dtype=torch.long)
        self._length, self._tokens, self._read_tokens = length, num_tokens - 1, 0
        for layer in self._layers:
            layer.at = self._at

    def __call__(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "R D"]:
        """Read one token of each sample."""
        self._widen()
        return self._read_next(token_ids)

    def _widen(self) -> int:
        """Let layers show room for the next quarter of the tokens; returns the width."""
        quarter = math.ceil(self._tokens / _WIDTHS)
        quarters = self._read_tokens // quarter + 1
        width = self._length + min(self._tokens, quarters * quarter)
        for layer in self._layers:
            layer.width = width
        self._read_tokens += 1
        return width

    def _read_next(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "R D"]:
        self._bias.index_fill_(-1, self._at, 0.0)
        bias = self._bias[..., : self._layers[0].width]
        hidden = self._read(token_ids, bias, self._position_ids)
        self._at += 1
        self._position_ids += 1
        return hidden


class RecordedStep(FixedShapesStep):
    """`FixedShapesStep` as CUDA graphs, which may include the work on its states."""

    _recorded: dict[int, Recording] | None = None

    def __call__(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "R D"]:
        """Read one token of each sample."""
        self._recorded = {} if self._recorded is None else self._recorded
        width = self._widen()
        hidden: Tensor = self._recorded.setdefault(width, Recording(self._read_next))(token_ids)
        return hidden

    def then(self, finish: Finish[_Finished]) -> Callable[[Tensor, Tensor], _Finished]:
        """See `TokenStep`."""
        recorded: dict[int, Recording] = {}

        def work(token_ids: Tensor, uniforms: Tensor) -> _Finished:
            return finish(self._read_next(token_ids), uniforms)

        def read_and_finish(token_ids: Tensor, uniforms: Tensor) -> _Finished:
            finished: _Finished = recorded.setdefault(self._widen(), Recording(work))(
                token_ids, uniforms
            )
            return finished

        return read_and_finish


@torch.no_grad()
def choose_step(
    network: JanusNetwork,
    caches: Sequence[Cache],
    mask: Int64[Tensor, "R L"] | None,
    *,
    num_tokens: int,
    finish: Finish[Any],
) -> StepBuilder:
    """Choose the recorded step if it equals the eager one on these prompts; warn if it does not.

    Args:
        caches: Prefilled with the prompts; not changed.
        finish: Work on the states, which a recorded step must be able to record.
    """
    device = caches[0].layers[0].keys.device
    if num_tokens < 2 or not _records(device):
        return TokenStep
    try:
        recorded, eager, finishing = (
            build(network, caches, mask, group_size=1, num_tokens=num_tokens)
            for build in (RecordedStep, TokenStep, RecordedStep)
        )
        read_and_finish = finishing.then(finish)
        rows = sum(len(cache.layers[0].keys) for cache in caches) // (1 + network.is_guided)
        uniforms = torch.full((rows,), 0.5, dtype=torch.float64, device=device)
        for token in range(min(num_tokens - 1, _CHECKED_TOKENS)):
            token_ids = torch.full((rows,), token, device=device)
            found, expected = recorded(token_ids), eager(token_ids)
            read_and_finish(token_ids, uniforms)
        gap = float((found - expected).abs().max() / expected.abs().max())
        reason = f"hidden states differ by {gap:.1e}"
        if gap <= STEP_TOLERANCES[expected.dtype]:
            return RecordedStep
    # Layers of another version of transformers, or a kernel that cannot be recorded.
    except Exception as error:
        reason = reason_of(error)
    _logger.warning(
        "the recorded token step does not fit this model (%s): a slower one is used; check that "
        "your version of transformers is supported",
        reason,
    )
    return TokenStep


def _records(device: torch.device) -> bool:
    """Whether a device runs CUDA graphs."""
    return device.type == "cuda"


class ChosenStep:
    """Builds the step that `choose_step` finds at the first call; a `StepBuilder`.

    Args:
        finish: As in `choose_step`.
    """

    def __init__(self, finish: Finish[Any]) -> None:
        self._finish = finish
        self._build: StepBuilder | None = None

    def __call__(
        self,
        network: JanusNetwork,
        caches: Sequence[Cache],
        mask: Int64[Tensor, "R L"] | None,
        *,
        group_size: int,
        num_tokens: int,
    ) -> TokenStep:
        """See `StepBuilder`."""
        if self._build is None:
            self._build = choose_step(
                network, caches, mask, num_tokens=num_tokens, finish=self._finish
            )
        return self._build(network, caches, mask, group_size=group_size, num_tokens=num_tokens)


class FilledLayer(DynamicLayer):
    """Keys and values of one layer, in memory that is allocated once for all tokens.

    The stock layer copies all of them at every token.

    Attributes:
        written: Number of tokens that are written.
        at: Index of the next token on the device; None: `written`.
        width: With `at`, the number of tokens that attention reads.

    Args:
        prompts: The stock layer's, in parts of the rows.
        group_size: Samples of each row.
        tokens: Tokens that will be added to each.
    """

    def __init__(self, prompts: tuple[Any, ...], group_size: int, tokens: int) -> None:
        super().__init__()
        self.room, self._values = (
            _with_room([getattr(part, name) for part in prompts], group_size, tokens)
            for name in ("keys", "values")
        )
        self.written = self.width = prompts[0].keys.shape[-2]
        self.at: Tensor | None = None
        self.dtype, self.device = self.room.dtype, self.room.device
        self.is_initialized = True
        self._show(self.written)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `DynamicLayer`; one token of each row."""
        if self.at is not None:
            self.room.index_copy_(2, self.at, key_states)
            self._values.index_copy_(2, self.at, value_states)
            return self._show(self.width)
        self.room[:, :, self.written] = key_states[:, :, 0]
        self._values[:, :, self.written] = value_states[:, :, 0]
        self.written += 1
        return self._show(self.written)

    def _show(self, width: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self.room[:, :, :width], self._values[:, :, :width]
        return self.keys, self.values


def _with_room(parts: list[Tensor], group_size: int, tokens: int) -> Tensor:
    """Keys or values of all rows, repeated for each sample, with room for more tokens."""
    rows, (_, heads, length, size) = sum(map(len, parts)), parts[0].shape
    # Zeros, because masked entries are still multiplied by a weight of 0.
    room = parts[0].new_zeros(rows * group_size, heads, length + tokens, size)
    start = 0
    for part in parts:
        stop = start + len(part) * group_size
        # Sample by sample, without a repeated copy.
        room[start:stop].unflatten(0, (len(part), group_size))[..., :length, :] = part[:, None]
        start = stop
    return room
