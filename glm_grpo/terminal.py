"""End a program with a few lines about its error on stderr, and an exit code.

0: done. 1: something failed. 2: the user's input is at fault. 130: Ctrl-C.
The traceback of a bug goes to a file; HYDRA_FULL_ERROR=1 prints it instead.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from glm_grpo.errors import ConfigError, GlmGrpoError, is_expected
from glm_grpo.output import printable

FULL_ERROR = "HYDRA_FULL_ERROR"
_IS_TRACEBACK_PRINTED = os.environ.get(FULL_ERROR) == "1"
"""Hydra's switch, read before `glm-grpo train` sets it."""

_INTERRUPTED = 128 + 2
"""Exit code of a program ended by SIGINT, by the convention of POSIX shells."""

_PATIENCE_SECONDS = 10.0
"""Time for threads to end after the program failed."""


def exit_code(error: Exception) -> int:
    """Exit code of an expected error: 2 if the user's input is at fault, else 1."""
    return error.exit_code if isinstance(error, GlmGrpoError) else GlmGrpoError.exit_code


def explain(error: Exception) -> str:
    """Format an error and its notes for printing, without control characters.

    The text may quote prompts, answers of servers and the command line.
    """
    said = ". ".join([str(error), *getattr(error, "__notes__", ())])
    return printable(f"{type(error).__name__}: {said}")


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
        if sys.platform == "win32":
            raise ConfigError("Windows is not supported; work in its Linux subsystem (WSL)")
        yield
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        raise SystemExit(_INTERRUPTED) from None
    # Also the last resort for any unforeseen error.
    except Exception as error:
        if is_expected(error):
            # What all processes of a machine refuse alike, the first of them says.
            if not isinstance(error, ConfigError) or os.environ.get("LOCAL_RANK", "0") == "0":
                sys.stderr.write(f"{explain(error)}\n")
            raise SystemExit(exit_code(error)) from None
        if _IS_TRACEBACK_PRINTED:
            raise
        sys.stderr.write(_explain_defect(error, doing))
        raise SystemExit(GlmGrpoError.exit_code) from None


def _explain_defect(error: Exception, doing: str) -> str:
    summary = f"{type(error).__name__}: {error}".splitlines()[0]
    trace = f"{shlex.join(sys.argv)}\n{''.join(traceback.format_exception(error))}"
    # Not in the run folder, which may be the damaged part. Only the user may read it.
    with tempfile.NamedTemporaryFile(prefix="glm-grpo-", suffix=".txt", delete=False) as file:
        file.write(trace.encode(errors="backslashreplace"))
    return (
        f"Unexpected error in {doing}: {printable(summary)}\n"
        f"This is a defect of glm-grpo; please report it with the traceback in {file.name}\n"
    )


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
