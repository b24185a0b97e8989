"""Runs Python programs without importing their libraries every time: a process that forks.

Each program is a process of its own, with its own arguments, folder, environment, output and exit
code, as `python ...` would start it. `tests/programs.py` asks for them.

Requests and answers are lines of JSON, see `main`. Libraries are imported before a fork, and
nothing is run that starts threads.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.005

PRELOADED = (
    "glm_grpo.api",
    "glm_grpo.cli",
    "glm_grpo.commands.check",
    "glm_grpo.commands.export",
    "glm_grpo.commands.gallery",
    "glm_grpo.commands.init",
    "glm_grpo.commands.serve_reward",
    "glm_grpo.commands.train",
    "glm_grpo.studio.compare.tables",
    "glm_grpo.commands.plan",
    "glm_grpo.commands.probe",
    "glm_grpo.commands.rescore",
    "rewards.terms.aesthetic",
    "rewards.terms.lpips",
    "rewards.terms.ocr",
    "rewards.terms.ssim",
)


def become_program(request: dict[str, Any]) -> None:
    """Turns this process into `python ARGUMENTS`, where they are a file, `-m NAME` or `-c CODE`."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for name, target in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), target)
    sys.stdout.reconfigure(line_buffering=True)
    # A shell that starts the tests in the background, or `nohup`, has them ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.chdir(request["folder"])
    os.environ.update(request["env"])
    if request["prepare"]:
        module, name = request["prepare"].split(":")
        getattr(importlib.import_module(module), name)(**request["options"])
    kind, *arguments = request["arguments"]
    if kind == "-m":
        sys.path[0] = ""
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *arguments[1:]]
        program = {"__name__": "__main__"}
        exec(compile(arguments[0], "<string>", "exec"), program)
    else:
        sys.path[0] = str(Path(kind).resolve().parent)
        sys.argv = [kind, *arguments]
        runpy.run_path(kind, run_name="__main__")


def run_program(request: dict[str, Any]) -> NoReturn:
    """Becomes a program; ends without tearing down its memory, which takes seconds."""
    code = 0
    try:
        become_program(request)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)  # noqa: T201
    except BaseException as error:
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def preload() -> None:
    """Imports what programs import, also what they import late."""
    for name in PRELOADED:
        importlib.import_module(name)
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)


def wait(pid: int, seconds: float) -> int | None:
    """Exit code, negative for a signal; None where the process still runs after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return None
        time.sleep(POLL_SECONDS)


def main() -> dict[str, Any] | None:
    """Answers requests until there are no more; in a process that is to be a program, its request.

    `{"start": request of become_program}` is answered by the process id, `{"wait": [process id,
    seconds]}` by the exit code or null.
    """
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    preload()
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            pid = os.fork()
            if pid == 0:
                return request["start"]
            answer: int | None = pid
        else:
            answer = wait(*request["wait"])
        os.write(answers, f"{json.dumps(answer)}\n".encode())
    return None


if __name__ == "__main__":
    # Outside the loop that reads requests: nothing of it is left on the program's stack.
    asked = main()
    if asked is not None:
        run_program(asked)
