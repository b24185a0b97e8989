"""A term that calls the user's own function."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
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
from rewards.options import FunctionName
from rewards.process_defaults import defaults_kept
from rewards.types import Prompt, RewardError, describe_error

ScoringFunction = Callable[[list[Prompt], Tensor], Any]
"""Takes N prompts and pictures UInt8 [N, 3, H, W]; must return N finite numbers, Float32 [N], or
`rewards.Scores` with them."""


class CustomConfig(TermConfig):
    """A user-defined function."""

    is_users_program = True
    parts = "by function"

    kind: Literal["custom"]
    """Class that scores."""
    function: FunctionName
    """`module:function`, importable from the folder in which the run starts. It gets a list of N
    prompts and images UInt8 [N, 3, H, W], and returns N finite numbers as a Float32 tensor [N], or
    `rewards.Scores(numbers, parts=maps)`, whose maps, Float32 [N, rows, columns], say which part
    of each number each place of the image earned."""
    needs_of_prompt: Annotated[tuple[Need, ...], Field(strict=False)] = ("prompt",)
    """Parts of a prompt that the function uses: some of prompt, text, target, source. It is not
    called for prompts without them."""

    def needs(self) -> tuple[Need, ...]:
        """The needs stated in the config."""
        return self.needs_of_prompt

    def check(self) -> None:
        """See `TermConfig`."""
        _load_scoring_function(self.function)

    def build(self, device: torch.device) -> Reward:
        """See `TermConfig`."""
        del device
        return CustomReward(self.function, needs=self.needs())

    def memory_bytes(self) -> int:
        """0, because it is unknown what the function loads."""
        return 0


class CustomReward:
    """Result of the user's function, higher is better; range, device and memory are up to it.

    The module is searched for in the working directory first, then on Python's path.

    Raises:
        RewardError: The module cannot be imported, or has no such function.
    """

    def __init__(self, function: str, *, needs: Sequence[Need]) -> None:
        self._function = _load_scoring_function(function)
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
    )


_GIVEN: dict[str, ScoringFunction] = {}
"""Functions given from Python, by the names that configs have for them."""


def name_function(function: ScoringFunction, term: str) -> str:
    """Name a function as `module:function`, by which `load_function` finds it in this process.

    Args:
        function: Any callable. Other processes find it only if its module has it under its name.
        term: Takes the place of a name that is not the module's, such as that of a lambda.
    """
    module, own = function.__module__, getattr(function, "__name__", term)
    is_importable = getattr(sys.modules.get(module), own, None) is function
    name = f"{module}:{own if is_importable else term}"
    _GIVEN[name] = function
    return name


def load_function(name: str) -> ScoringFunction:
    """Import `module:function`, unless `name_function` knows it.

    Defaults of the process that the module changes, such as torch's default dtype, are restored.

    The module can import its neighbours in the working directory only while it is imported; imports
    inside its functions find installed and already imported modules.

    Raises:
        RewardError: The module cannot be imported, or has no such function.
    """
    if name in _GIVEN:
        return _GIVEN[name]
    module_name, _, function_name = name.partition(":")
    folder = str(Path.cwd())
    module = _import(module_name, name, folder)
    try:
        function: ScoringFunction = getattr(module, function_name)
    except AttributeError as error:
        functions = sorted(key for key, value in vars(module).items() if callable(value))
        nearest = difflib.get_close_matches(function_name, functions, n=1)
        remedy = f"did you mean {nearest[0]}?" if nearest else f"it has {', '.join(functions)}"
        if module_name == "__main__":
            remedy = "put it in a module of its own, which every process can import"
        # The module of a notebook has no file.
        place = getattr(module, "__file__", module_name)
        raise RewardError(
            f"custom function {name!r}: {place} has no {function_name}; {remedy}"
        ) from error
    return function


def find_source(name: str) -> bytes | None:
    """Source of a custom function: its module, or its own if a script or notebook defines it.

    Only the packages around the module are run.

    Returns:
        None if there is no source, as for a function of a compiled module.
    """
    module_name, function = name.partition(":")[0], _GIVEN.get(name)
    while isinstance(function, functools.partial):
        function = function.func
        module_name = function.__module__
    if module_name == "__main__":
        # A script also holds the settings of the run; a notebook has no file.
        with contextlib.suppress(OSError, TypeError):
            return inspect.getsource(function or load_function(name)).encode()
        return None
    spec = None
    # A user's package may raise anything during import, which is reported elsewhere.
    with _importable(module_name, str(Path.cwd())), contextlib.suppress(Exception):
        spec = importlib.util.find_spec(module_name)
    if spec is None or not str(spec.origin).endswith(".py"):
        return None
    return Path(str(spec.origin)).read_bytes()


def _load_scoring_function(name: str) -> ScoringFunction:
    """Import a function of prompts and pictures.

    Raises:
        RewardError: As for `load_function`, or it is no function of two arguments.
    """
    function = load_function(name)
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


def _import(module_name: str, name: str, folder: str) -> ModuleType:
    try:
        with _importable(module_name, folder):
            return importlib.import_module(module_name)
    # A user's module may raise anything during import.
    except Exception as error:
        raise RewardError(
            f"custom function {name!r}: the module {module_name} cannot be imported "
            f"({describe_error(error)}). It must be in {folder}, where the run was "
            "started, or installed, with all that it imports itself"
        ) from error


@contextlib.contextmanager
def _importable(module_name: str, folder: str) -> Iterator[None]:
    # The glm-grpo script has its own folder on the path where `python` has the working directory.
    sys.path.insert(0, folder)
    # Finders cache a folder's contents; the module may be newer.
    importlib.invalidate_caches()
    try:
        with defaults_kept(f"importing {module_name}"):
            yield
    finally:
        with contextlib.suppress(ValueError):  # the module removed it itself
            sys.path.remove(folder)
