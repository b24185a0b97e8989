"""Keep libraries from unpickling, because a pickle is a program and weights may come from anyone.

Our own code loads files only as tensors; this is for files that libraries load.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from rewards.types import RewardError, describe_error

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_FORBID = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""The opposite setting; torch refuses to load anything if both are set."""


@contextmanager
def loads_tensors_alone() -> Iterator[None]:
    """Inside, `torch.load` only builds tensors and plain containers, and refuses anything else.

    This overrides the caller: EasyOCR and torchvision allow arbitrary pickles, even in a folder
    that other programs write to. It affects the whole process, so nothing else should load anything
    meanwhile.
    """
    before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORBID)}
    os.environ[_FORCE] = "1"
    try:
        yield
    except pickle.UnpicklingError as error:
        raise RewardError(
            f"a weights file cannot be loaded: {describe_refusal(error)}. Remove it, so that it is "
            "downloaded again, or get it from its publisher"
        ) from error
    finally:
        del os.environ[_FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def describe_refusal(error: Exception) -> str:
    """Reason why a file of weights was not loaded, without torch's advice to unpickle it anyway."""
    if isinstance(error, pickle.UnpicklingError):
        return "it contains something other than tensors, which may be a program, and was not run"
    return describe_error(error)
