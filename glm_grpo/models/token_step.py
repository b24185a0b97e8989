"""Steps that read one token of every sample, as CUDA graphs too, and the choice of the fastest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from typing_extensions import override

from glm_grpo.models.capture import CapturedWork
from glm_grpo.models.compiling import STEP_TOLERANCES, reason_of

_CHECKED_TOKENS = 3
"""Tokens to compare. The first reads only the prompt; the others also generated tokens."""

_Finished = TypeVar("_Finished")
Finish = Callable[[Float[Tensor, "R D"], Float64[Tensor, " N"]], _Finished]
"""Work on the states of all rows, and a uniform number per sample, that follows a step."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadPrompts:
    """Prompts that a model has read; a family adds their keys and values.

    Attributes:
        states: Last state of each row.
        num_prompts: P, of which there may be several rows.
        num_tokens: T, tokens of each image. The last one is drawn, but not read.
    """

    states: Float[Tensor, "R D"]
    num_prompts: int
    num_tokens: int


class Step:
    """Reads one token of every sample; sample i belongs to prompt i // group_size."""

    def __call__(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "R D"]:
        """Read one token of each sample; returns the states that predict the next ones."""
        raise NotImplementedError

    def then(self, finish: Finish[_Finished]) -> Callable[[Tensor, Tensor], _Finished]:
        """The step followed by `finish`, as a function of tokens and uniforms."""
        return lambda token_ids, uniforms: finish(self(token_ids), uniforms)


StepBuilder = Callable[[Any, Any, int], Step]
"""Builds a step of a family's network that continues its `ReadPrompts`, with G samples each."""


class FixedShapes(Step):
    """Reads tokens with the same operations on the same memory, as long as the width is the same.

    Operations read the number of the current token from the device.
    """

    @override
    def __call__(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "R D"]:
        self._widen()
        return self._read_next(token_ids)

    def _widen(self) -> int:
        """Prepare the next token; returns the width of what attention reads."""
        raise NotImplementedError

    def _read_next(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "R D"]:
        raise NotImplementedError


class Captured(FixedShapes):
    """A step of fixed shapes as CUDA graphs, one a width, which may include the work on its states.

    Launching its thousands of small operations one by one takes longer than running them.
    """

    _alone: Callable[..., Any] | None = None

    @override
    def __call__(self, token_ids: Int64[Tensor, " N"]) -> Float[Tensor, "R D"]:
        if self._alone is None:
            self._alone = self._capture(self._read_next)
        states: Tensor = self._alone(token_ids)
        return states

    @override
    def then(self, finish: Finish[_Finished]) -> Callable[[Tensor, Tensor], _Finished]:

        def work(token_ids: Tensor, uniforms: Tensor) -> _Finished:
            return finish(self._read_next(token_ids), uniforms)

        return self._capture(work)

    def _capture(self, work: Callable[..., Any]) -> Callable[..., Any]:
        by_width: dict[int, CapturedWork] = {}

        def run(*inputs: Tensor) -> Any:
            return by_width.setdefault(self._widen(), CapturedWork(work))(*inputs)

        return run


@torch.no_grad()
def choose_equal_step(
    fast: Mapping[str, StepBuilder],
    stock: StepBuilder,
    network: Any,
    prompts: ReadPrompts,
    finish: Finish[Any],
) -> StepBuilder:
    """Choose the first step that equals the stock one on these prompts; warn if one does not.

    Args:
        fast: Steps by name, the fastest first.
        prompts: Not changed.
        finish: Work on the states, which a captured step must be able to capture.
    """
    if prompts.num_tokens < 2:
        return stock
    for name, build in fast.items():
        reason = _difference(build, stock, network, prompts, finish)
        if not reason:
            return build
        _logger.warning(
            "the %s does not fit this model (%s): a slower one is used; check that your version of "
            "transformers is supported",
            name,
            reason,
        )
    return stock


def _difference(
    build: StepBuilder,
    stock: StepBuilder,
    network: Any,
    prompts: ReadPrompts,
    finish: Finish[Any],
) -> str:
    """Reason to fall back from a step to a slower one; empty if there is none."""
    device, samples = prompts.states.device, prompts.num_prompts
    try:
        ours, theirs, finishing = (each(network, prompts, 1) for each in (build, stock, build))
        read_and_finish = finishing.then(finish)
        uniforms = torch.full((samples,), 0.5, dtype=torch.float64, device=device)
        for token in range(min(prompts.num_tokens - 1, _CHECKED_TOKENS)):
            token_ids = torch.full((samples,), token, device=device)
            found, expected = ours(token_ids), theirs(token_ids)
            read_and_finish(token_ids, uniforms)
        gap = float((found - expected).abs().max() / expected.abs().max())
    # Layers of another version of transformers, no compiler, or a kernel that cannot be captured.
    except Exception as error:
        return reason_of(error)
    return "" if gap <= STEP_TOLERANCES[expected.dtype] else f"hidden states differ by {gap:.1e}"
