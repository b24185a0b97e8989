"""Keep libraries from unpickling: a pickle is a program, and files of weights come from anyone.

What this package loads itself it loads as tensors alone; this is for what others load for it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from rewards.types import RewardError, describe_error

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_FORBID = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""The opposite; torch refuses to load anything while both are set."""


@contextmanager
def loads_tensors_alone() -> Iterator[None]:
    """Inside, `torch.load` builds tensors and plain containers, and refuses all else in a file.

    Whatever the caller asks for: EasyOCR and torchvision ask for everything that a pickle can
    hold, of a file in a folder that other programs write to as well. It is a matter of the whole
    process, so nothing else should load anything meanwhile.

    Raises:
        RewardError: A file was refused, and the loader did not explain why.
    """
    before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORBID)}
    os.environ[_FORCE] = "1"
    try:
        yield
    except pickle.UnpicklingError as error:
        raise RewardError(
            f"a file of weights cannot be loaded: {describe_refusal(error)}. Remove it, so that it "
            "is downloaded again, or get it from who published it"
        ) from error
    finally:
        del os.environ[_FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def describe_refusal(error: Exception) -> str:
    """Why a file of weights was not loaded, without torch's advice to unpickle it nevertheless."""
    if isinstance(error, pickle.UnpicklingError):
        return "it holds something else than tensors, which may be a program, and was not run"
    return describe_error(error)
