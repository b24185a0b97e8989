"""A term that calls the user's own function."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from jaxtyping import UInt8
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from rewards.base import Need, Reward, TermConfig, has_needs
from rewards.options import FunctionName, MayChange, PathText
from rewards.types import Prompt, RewardError
from rewards.user_functions import NamedFunction, load_function

ScoringFunction = Callable[[list[Prompt], Tensor], Any]
"""Takes N prompts and images UInt8 [N, 3, H, W]; must return N finite numbers, Float32 [N], or a
list of them with None for images that it cannot score, or `rewards.Scores` with either."""


class CustomConfig(TermConfig):
    """A user-defined function."""

    score_map = "by function"

    kind: Literal["custom"]
    """Class that scores."""
    function: FunctionName
    """`file.py:function`, in `folder`, or `module:function`, in `folder` or installed. It gets a
    list of N prompts and images UInt8 [N, 3, H, W], and returns N finite numbers as a Float32
    tensor [N], or `rewards.Scores(numbers, score_map=maps)`, where maps, Float32 [N, rows,
    columns], say which part of each number each place of the image earned. In a list of numbers,
    None leaves an image that the function cannot score out of its group."""
    folder: MayChange[PathText | None] = None
    """Folder of the file or module. null: the folder of the config if it is there, otherwise the
    working folder; a run stores what it found."""
    needs_of_prompt: Annotated[tuple[Need, ...], Field(strict=False)] = ("prompt",)
    """Parts of a prompt that the function uses: some of prompt, text, target, source, objects
    (`include` in its metadata). It is not called for prompts without them."""

    @override
    def needs(self) -> tuple[Need, ...]:
        """The needs stated in the config."""
        return self.needs_of_prompt

    @override
    def users_function(self) -> NamedFunction:
        return NamedFunction("function", self.function, self.folder)

    @override
    def check(self) -> None:
        _load_scoring_function(self.function, self.folder)

    @override
    def build(self, device: torch.device) -> Reward:
        del device
        return CustomReward(self.function, needs=self.needs(), folder=self.folder)

    @override
    def memory_bytes(self) -> int:
        """0, because it is unknown what the function loads."""
        return 0


class CustomReward:
    """Result of the user's function, higher is better; range, device and memory are up to it.

    Raises:
        RewardError: The module cannot be imported, or has no such function.
    """

    def __init__(self, function: str, *, needs: Sequence[Need], folder: str | None = None) -> None:
        self._function = _load_scoring_function(function, folder)
        self._needs = tuple(needs)

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt has what the function uses."""
        return has_needs(prompt, self._needs)

    @torch.no_grad()
    def score(self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> Any:
        """Call the function; `rewards.base.score_checked` checks the result."""
        # Copies, because a function that works in place must not change the input of other terms.
        copies = {id(prompt): _copy(prompt) for prompt in prompts}
        return self._function([copies[id(prompt)] for prompt in prompts], pixels.clone())

    def modules(self) -> tuple[nn.Module, ...]:
        """Empty: networks that the function uses stay where it puts them."""
        return ()


def _copy(prompt: Prompt) -> Prompt:
    return replace(
        prompt,
        target=None if prompt.target is None else prompt.target.clone(),
        sources=tuple(source.clone() for source in prompt.sources),
        metadata=copy.deepcopy(dict(prompt.metadata)),
    )


def _load_scoring_function(name: str, folder: str | None) -> ScoringFunction:
    function = load_function(name, folder)
    # Some callables of C have no signature, which is a ValueError.
    with contextlib.suppress(ValueError):
        try:
            inspect.signature(function).bind([], None)
        except TypeError as error:
            raise RewardError(
                f"custom function {name!r} ({error}) must be called with two arguments: "
                f"def {name.partition(':')[2]}(prompts, images)"
            ) from error
    return function
