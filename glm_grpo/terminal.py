"""Exit of a program: errors as a few lines on stderr.

The traceback of a defect goes to a file; HYDRA_FULL_ERROR=1 prints it in its place. What takes
seconds to import is imported where there is an error: the first line of a run does not wait for it.
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

from hydra.core.utils import env_override
from omegaconf import DictConfig, OmegaConf

from glm_grpo.composition import COMPOSITION_ERRORS, is_sweep
from glm_grpo.errors import ConfigError, GlmGrpoError
from glm_grpo.output import printable

logger = logging.getLogger(__name__)

_FULL_ERROR = "HYDRA_FULL_ERROR"
_IS_TRACEBACK_PRINTED = os.environ.get(_FULL_ERROR) == "1"
"""Hydra's switch, read before `run_hydra_application` sets it."""

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
    """The lines to print for an error and its notes, without control characters.

    It may quote prompts, answers of servers and the command line.
    """
    if isinstance(error, COMPOSITION_ERRORS):
        error = _named(error)
    said = ". ".join([str(error), *getattr(error, "__notes__", ())])
    return printable(f"{type(error).__name__}: {said}")


def is_expected(error: Exception) -> bool:
    """Whether a user can act on it; any other exception is a defect."""
    from rewards.types import RewardError  # noqa: PLC0415

    return isinstance(error, (GlmGrpoError, RewardError, *COMPOSITION_ERRORS))


def _named(error: Exception) -> ConfigError:
    """An error of Hydra's as one of ours."""
    from glm_grpo.config import composition_error  # noqa: PLC0415

    return composition_error(error)


@contextmanager
def errors_explained(doing: str) -> Iterator[None]:
    """End the program with a message and an exit code on errors, without a traceback.

    Args:
        doing: What is being done inside, for the message of a defect.

    Raises:
        SystemExit: An error was raised inside, or Ctrl-C was pressed where no run was under way to
            be saved.
        Exception: A defect, where the environment asks for tracebacks.
    """
    try:
        _refuse_folder()
        yield
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        raise SystemExit(_INTERRUPTED) from None
    # The last line of defence besides: whatever nobody foresaw.
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
        # Not in the run folder, which may be what is damaged. Nobody else may read it.
        with tempfile.NamedTemporaryFile(prefix="glm-grpo-", suffix=".txt", delete=False) as file:
            file.write(trace)
        where = f"the traceback in {file.name}"
    except OSError as unwritable:
        where = f"this traceback, which no file takes ({unwritable}):\n{trace.decode()}"
    return (
        f"Unexpected error in {doing}: {printable(summary)}\n"
        f"This is a defect of glm-grpo; please report it with {where}\n"
    )


def _refuse_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError(
            "the current folder does not exist any more; change to another one"
        ) from None


def announce_loading(composed: DictConfig) -> None:
    """Say what a run is about to load: libraries alone take seconds.

    Args:
        composed: Not validated yet; what it lacks is left out.
    """
    # torchrun's number of the process.
    if os.environ.get("RANK", "0") != "0":
        return
    keys = {"run": "run.name", "model": "model.path", "prompts": "data.path"}
    named = {
        what: OmegaConf.select(
            composed, key, throw_on_resolution_failure=False, throw_on_missing=False
        )
        for what, key in keys.items()
    }
    terms = OmegaConf.select(composed, "reward.terms", throw_on_resolution_failure=False)
    options = OmegaConf.to_container(terms, resolve=False) if OmegaConf.is_dict(terms) else None
    if isinstance(options, dict):
        named["terms"] = " ".join(str(name) for name in options if options[name] is not None)
    said = ", ".join(f"{what} {value}" for what, value in named.items() if value is not None)
    logger.info("loading: %s", printable(said))


@contextmanager
def job_errors_explained() -> Iterator[None]:
    """`errors_explained` for the inside of a function decorated by `hydra.main`.

    In a sweep the errors go on to Hydra: it names the run that failed, and runs the others.

    Raises:
        SystemExit: As `errors_explained`, where there is one run.
    """
    if is_sweep():
        yield
        return
    # Here, because Hydra heads whatever leaves its function with a line of its own.
    with errors_explained("the run"):
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
        SystemExit: As `errors_explained`.
    """
    # Hydra's own report ends every error alike with exit code 1 and a shortened traceback; this
    # switch makes it hand the exception on.
    with errors_explained("glm-grpo train"), env_override({_FULL_ERROR: "1"}):
        application()
