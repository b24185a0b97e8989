"""How a command ends: expected errors as a few lines on stderr, everything else as a traceback."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from glm_grpo.config import COMPOSITION_ERRORS, UNNAMED_COMPOSITION_ERRORS, override_error
from glm_grpo.errors import ConfigError, GlmGrpoError
from rewards.keys import hide_secrets
from rewards.types import RewardError

EXPECTED_ERRORS = (GlmGrpoError, RewardError, *COMPOSITION_ERRORS)
"""What a user can act on; any other exception is a defect and keeps its traceback."""

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What moves the cursor, colours, renames a terminal's window, or turns the direction of a line."""

_INTERRUPTED = 128 + 2
"""Exit code of a program that SIGINT ended, by the convention of POSIX shells."""


_PATIENCE_SECONDS = 10.0
"""Time that threads have to end after the program failed."""


def exit_code(error: Exception) -> int:
    """Exit code of an expected error: 2 where the user's input is at fault, else 1."""
    if isinstance(error, COMPOSITION_ERRORS):
        return ConfigError.exit_code
    return error.exit_code if isinstance(error, GlmGrpoError) else GlmGrpoError.exit_code


def explain(error: Exception) -> str:
    """The lines to print for an expected error, without secrets and control characters.

    It may quote prompts, answers of servers and the command line.
    """
    if isinstance(error, COMPOSITION_ERRORS):
        error = override_error(error)
    return printable(hide_secrets(f"{type(error).__name__}: {error}"))


def printable(text: str) -> str:
    """A text of someone else's for the terminal: characters that steer it are spelt out.

    Line breaks and tabs stay.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


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


def is_sweep() -> bool:
    """Whether Hydra trains several runs one after another in this process."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


@contextmanager
def job_errors_explained() -> Iterator[None]:
    """`expected_errors_explained` for the inside of a function decorated by `hydra.main`.

    In a sweep the errors go on to Hydra: it names the run that failed, and runs the others.

    Raises:
        SystemExit: As `expected_errors_explained`, where there is one run.
    """
    if is_sweep():
        yield
        return
    # Here, because Hydra heads whatever leaves its function with a line of its own.
    with expected_errors_explained():
        yield


@contextmanager
def ended_in_any_case() -> Iterator[None]:
    """End the process after a failure, though a thread goes on that Python waits for.

    A term that hangs may do so in a pool of threads, and would keep the process, and with it the
    accelerator, for ever.
    """
    try:
        yield
    except SystemExit as ended:
        if ended.code:
            code = ended.code if isinstance(ended.code, int) else 1
            threading.Thread(target=_end_after_patience, args=(code,), daemon=True).start()
        raise


def _end_after_patience(code: int) -> None:
    time.sleep(_PATIENCE_SECONDS)
    sys.stdout.flush()
    os._exit(code)


def run_hydra_application(application: Callable[[], None]) -> None:
    """Run a function decorated by `hydra.main` so that its errors are explained here.

    Raises:
        SystemExit: As `expected_errors_explained`.
    """
    # Hydra's own report ends every error alike with exit code 1 and a shortened traceback; this
    # switch makes it hand the exception on.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    with expected_errors_explained():
        try:
            application()
        except EXPECTED_ERRORS:
            raise
        except UNNAMED_COMPOSITION_ERRORS as error:
            # Once the config is composed, such an error is a defect and keeps its traceback.
            if any(frame.name == "run_job" for frame in traceback.extract_tb(error.__traceback__)):
                raise
            raise override_error(error) from None
