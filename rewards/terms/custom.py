"""A term that is a function of the user's own."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import torch
from jaxtyping import UInt8
from pydantic import Field
from torch import Tensor, nn

from rewards.base import Need, Reward, TermConfig, has_needs
from rewards.types import Prompt, RewardError, describe_error


class CustomConfig(TermConfig):
    """A function of the user's own."""

    is_users_program = True

    kind: Literal["custom"]
    """Class that scores."""
    function: str = Field(min_length=3, max_length=500, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`module:function`, importable from the folder the run starts in. It gets a list of N prompts
    and pictures UInt8 [N, 3, H, W], and returns N finite numbers as a Float32 tensor [N]."""
    needs_of_prompt: Annotated[tuple[Need, ...], Field(strict=False)] = ("prompt",)
    """What of a prompt the function uses: some of prompt, text, target, source. It is not
    called for prompts that lack it."""

    def needs(self) -> tuple[Need, ...]:
        """As the user stated."""
        return self.needs_of_prompt

    def build(self, device: torch.device) -> Reward:
        """See `TermConfig`."""
        del device
        return CustomReward(self.function, needs=self.needs())

    def memory_bytes(self) -> int:
        """Nothing: no one can know what the function loads."""
        return 0


ScoringFunction = Callable[[list[Prompt], Tensor], Any]
"""Gets N prompts and pictures UInt8 [N, 3, H, W]; must return N finite numbers, Float32 [N]."""


class CustomReward:
    """What the user's function returns, higher is better; range, device and memory are its own.

    Args:
        function: `module:function`. The module is searched for in the current folder first, then
            where Python finds modules.
        needs: What of a prompt the function uses; it is not called for prompts that lack it.

    Raises:
        RewardError: The module cannot be imported, or has no such function.
    """

    def __init__(self, function: str, *, needs: Sequence[Need]) -> None:
        self._function = load_function(function)
        self._needs = tuple(needs)

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt has what the function uses."""
        return has_needs(prompt, self._needs)

    @torch.no_grad()
    def score(self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> Any:
        """Call the function; what it returns is handed on, for `rewards.score` to judge.

        Raises:
            Exception: Whatever the function raises.
        """
        # Copies: a function that works in place must not change what other terms see.
        copies = {id(prompt): _copy(prompt) for prompt in prompts}
        return self._function([copies[id(prompt)] for prompt in prompts], pixels.clone())

    def modules(self) -> tuple[nn.Module, ...]:
        """None: networks that the function uses stay where it puts them."""
        return ()


def _copy(prompt: Prompt) -> Prompt:
    return replace(
        prompt,
        target=None if prompt.target is None else prompt.target.clone(),
        sources=tuple(source.clone() for source in prompt.sources),
    )


def load_function(name: str) -> ScoringFunction:
    """Import `module:function`.

    Only while the module is imported can it import its neighbours in the current folder; imports
    inside its functions find what is installed, and what was imported before.

    Raises:
        RewardError: The module cannot be imported, or has no such function.
    """
    module_name, _, function_name = name.partition(":")
    folder = str(Path.cwd())
    module = _import(module_name, name, folder)
    try:
        function: ScoringFunction = getattr(module, function_name)
    except AttributeError as error:
        functions = sorted(key for key, value in vars(module).items() if callable(value))
        nearest = difflib.get_close_matches(function_name, functions, n=1)
        names = ", ".join(functions) or "nothing that can be called"
        remedy = f"did you mean {nearest[0]}?" if nearest else f"it has {names}"
        raise RewardError(
            f"custom function {name!r}: {module.__file__} has no {function_name}; {remedy}"
        ) from error
    if not callable(function):
        raise RewardError(
            f"custom function {name!r} is a {type(function).__name__}; it must be a function of "
            "prompts and pictures"
        )
    return function


def _import(module_name: str, name: str, folder: str) -> ModuleType:
    try:
        with _importable(folder):
            return importlib.import_module(module_name)
    # A module of the user's may raise whatever it likes while it is imported.
    except Exception as error:
        raise RewardError(
            f"custom function {name!r}: the module {module_name} cannot be imported "
            f"({describe_error(error)}). It must be in {folder}, where the run was "
            "started, or installed, with all that it imports itself"
        ) from error


@contextlib.contextmanager
def _importable(folder: str) -> Iterator[None]:
    # The glm-grpo script has its own folder on the path where `python` has the current one.
    sys.path.insert(0, folder)
    # Finders remember what a folder held; the module may be younger than that.
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the module took it out itself
            sys.path.remove(folder)
