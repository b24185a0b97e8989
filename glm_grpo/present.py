"""How a command ends: expected errors as a few lines on stderr, everything else as a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from glm_grpo.config import COMPOSITION_ERRORS, override_error
from glm_grpo.errors import ConfigError, GlmGrpoError
from rewards.types import RewardError

EXPECTED_ERRORS = (GlmGrpoError, RewardError, *COMPOSITION_ERRORS)
"""What a user can act on; any other exception is a defect and keeps its traceback."""

_INTERRUPTED = 128 + 2
"""Exit code of a program that SIGINT ended, by the convention of POSIX shells."""


def exit_code(error: Exception) -> int:
    """Exit code of an expected error: 2 where the user's input is at fault, else 1."""
    if isinstance(error, COMPOSITION_ERRORS):
        return ConfigError.exit_code
    return error.exit_code if isinstance(error, GlmGrpoError) else GlmGrpoError.exit_code


def explain(error: Exception) -> str:
    """The lines to print for an expected error."""
    if isinstance(error, COMPOSITION_ERRORS):
        error = override_error(error)
    return f"{type(error).__name__}: {error}"


@contextmanager
def expected_errors_explained() -> Iterator[None]:
    """End the program with a message and an exit code, without a traceback, on expected errors.

    Raises:
        SystemExit: An expected error was raised inside, or Ctrl-C was pressed where no run was
            under way to be saved.
    """
    try:
        yield
    except EXPECTED_ERRORS as error:
        sys.stderr.write(f"{explain(error)}\n")
        raise SystemExit(exit_code(error)) from None
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        raise SystemExit(_INTERRUPTED) from None


@contextmanager
def job_errors_explained() -> Iterator[None]:
    """`expected_errors_explained` for the inside of a function decorated by `hydra.main`.

    In a sweep the errors go on to Hydra: it names the run that failed, and runs the others.

    Raises:
        SystemExit: As `expected_errors_explained`, where there is one run.
    """
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        yield
        return
    # Here, because Hydra heads whatever leaves its function with a line of its own.
    with expected_errors_explained():
        yield


def run_hydra_application(application: Callable[[], None]) -> None:
    """Run a function decorated by `hydra.main` so that its errors are explained here.

    Raises:
        SystemExit: As `expected_errors_explained`.
    """
    # Hydra's own report ends every error alike with exit code 1 and a shortened traceback; this
    # switch makes it hand the exception on.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    with expected_errors_explained():
        application()
