"""GRPO fine-tuning of AR-plus-diffusion image models.

The Python API, see `glm_grpo.api`: load_config, train, load_run, rescore, evaluate.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glm_grpo.api import Run, evaluate, load_config, load_run, rescore, train

__all__ = ["Run", "evaluate", "load_config", "load_run", "rescore", "train"]


def _import_own_rewards() -> None:
    """Import the package `rewards` beside this one, whatever stands in the working folder.

    `python -m` and notebooks search there first, and `rewards.py` is a likely name. The package
    turns off what libraries would send by themselves, before any of them is imported.

    Raises:
        ImportError: Another module of that name has been imported already.
    """
    folder = Path(__file__).resolve().parents[1] / "rewards"
    file = folder / "__init__.py"
    present = sys.modules.get("rewards") or find_spec("rewards")
    place = getattr(present, "__file__", None) or getattr(present, "origin", None)
    if place is None or Path(place).resolve() == file:
        import_module("rewards")
        return
    if "rewards" in sys.modules:
        raise ImportError(
            f"{place} has been imported as `rewards`, the name of a package of glm-grpo: import "
            "glm_grpo first, or give the file another name"
        )
    spec = spec_from_file_location("rewards", file, submodule_search_locations=[str(folder)])
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported")
    sys.modules["rewards"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["rewards"])


_import_own_rewards()

# It warns about kernels that only CPUs would use. Here, because peft and others import it at times
# of their own, wherever it is installed.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def __getattr__(name: str) -> object:
    """Import the API on first use, because it takes seconds, which help texts need not wait for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("glm_grpo.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
