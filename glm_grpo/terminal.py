"""End a program with a few lines about its error on stderr.

The traceback of a bug goes to a file; HYDRA_FULL_ERROR=1 prints it instead. Slow imports happen
only when there is an error, so that errors of Hydra do not wait for them.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hydra.core.utils import env_override

from glm_grpo.composition import COMPOSITION_ERRORS, is_sweep
from glm_grpo.errors import ConfigError, GlmGrpoError
from glm_grpo.output import printable, refuse_undecodable

if TYPE_CHECKING:
    from glm_grpo.config import Config

logger = logging.getLogger(__name__)

_FULL_ERROR = "HYDRA_FULL_ERROR"
_IS_TRACEBACK_PRINTED = os.environ.get(_FULL_ERROR) == "1"
"""Hydra's switch, read before `run_hydra_application` sets it."""

_INTERRUPTED = 128 + 2
"""Exit code of a program ended by SIGINT, by the convention of POSIX shells."""

_PATIENCE_SECONDS = 10.0
"""Time for threads to end after the program failed."""


def exit_code(error: Exception) -> int:
    """Exit code of an expected error: 2 if the user's input is at fault, else 1."""
    if isinstance(error, COMPOSITION_ERRORS):
        return ConfigError.exit_code
    return error.exit_code if isinstance(error, GlmGrpoError) else GlmGrpoError.exit_code


def explain(error: Exception) -> str:
    """Format an error and its notes for printing, without control characters.

    The text may quote prompts, answers of servers and the command line.
    """
    if isinstance(error, COMPOSITION_ERRORS):
        error = _named(error)
    said = ". ".join([str(error), *getattr(error, "__notes__", ())])
    return printable(f"{type(error).__name__}: {said}")


def is_expected(error: Exception) -> bool:
    """Whether a user can act on it; any other exception is a bug."""
    from rewards.types import RewardError  # noqa: PLC0415

    return isinstance(error, (GlmGrpoError, RewardError, *COMPOSITION_ERRORS))


def _named(error: Exception) -> ConfigError:
    """Convert an error of Hydra to one of ours."""
    from glm_grpo.config import composition_error  # noqa: PLC0415

    return composition_error(error)


@contextmanager
def errors_explained(doing: str) -> Iterator[None]:
    """End the program with a message and an exit code on errors, without a traceback.

    Args:
        doing: Description of what runs inside, for the message about a bug.

    Raises:
        SystemExit: An error was raised inside, or Ctrl-C was pressed before there was a run to
            save.
        Exception: A bug, if the environment asks for tracebacks.
    """
    try:
        _refuse_surroundings()
        yield
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        raise SystemExit(_INTERRUPTED) from None
    # Also the last resort for any unforeseen error.
    except Exception as error:
        if is_expected(error):
            sys.stderr.write(f"{explain(error)}\n")
            raise SystemExit(exit_code(error)) from None
        if _IS_TRACEBACK_PRINTED:
            raise
        sys.stderr.write(_explain_defect(error, doing))
        raise SystemExit(GlmGrpoError.exit_code) from None


def _explain_defect(error: Exception, doing: str) -> str:
    summary = f"{type(error).__name__}: {error}".splitlines()[0]
    trace = f"{shlex.join(sys.argv)}\n{''.join(traceback.format_exception(error))}".encode(
        errors="backslashreplace"
    )
    try:
        # Not in the run folder, which may be the damaged part. Only the user may read it.
        with tempfile.NamedTemporaryFile(prefix="glm-grpo-", suffix=".txt", delete=False) as file:
            file.write(trace)
        where = f"the traceback in {file.name}"
    except OSError as unwritable:
        where = (
            f"this traceback, which could not be stored in a file ({unwritable}):\n{trace.decode()}"
        )
    return (
        f"Unexpected error in {doing}: {printable(summary)}\n"
        f"This is a defect of glm-grpo; please report it with {where}\n"
    )


def _refuse_surroundings() -> None:
    """Refuse a system, a current folder or a command line with which nothing works."""
    if sys.platform == "win32":
        raise ConfigError("Windows is not supported; work in its Linux subsystem (WSL)")
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise ConfigError(
            "the current folder does not exist any more; change to another one"
        ) from None
    refuse_undecodable(folder, *sys.argv)


def announce_checks(config: Config) -> None:
    """Announce what a run is about to check, because the models' libraries alone take seconds."""
    # The process number, set by torchrun.
    if os.environ.get("RANK", "0") != "0":
        return
    named = {
        "run": config.run.name,
        "model": config.model.path,
        "prompts": config.data.path,
        "terms": " ".join(config.reward.terms),
    }
    said = ", ".join(f"{what} {value}" for what, value in named.items() if value is not None)
    logger.info("checking: %s", printable(said))


@contextmanager
def job_errors_explained() -> Iterator[None]:
    """Like `errors_explained`, for the inside of a function decorated by `hydra.main`.

    In a sweep the errors pass through to Hydra, which names the failed run and runs the others.

    Raises:
        SystemExit: As for `errors_explained`, outside a sweep.
    """
    if is_sweep():
        yield
        return
    # Here, because Hydra adds its own line above anything that leaves its function.
    with errors_explained("the run"):
        yield


@contextmanager
def ended_in_any_case() -> Iterator[None]:
    """End the process after a failure, even if a thread that Python waits for continues.

    A hanging term may run in a thread pool, and would keep the process and its accelerator forever.
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
        SystemExit: As for `errors_explained`.
    """
    # By default Hydra ends every error with exit code 1 and a shortened traceback; this switch
    # makes it pass the exception on.
    with errors_explained("glm-grpo train"), env_override({_FULL_ERROR: "1"}):
        application()
