"""Starts `train.py` many times without importing its libraries every time: a process that forks.

Each run is a process of its own, with its own arguments, folder, output and exit code. It can be
told to send itself signals before its n-th change of a folder, and to be quick: to take what was
sampled before from the same weights and prompts, and not to ask whether the run fits into memory.

Requests and answers are lines of JSON, see `main`. Nothing that starts threads is run before a
fork; libraries are only imported.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
POLL_SECONDS = 0.005


class Changes:
    """Counts the changes of a folder, just before each, and sends this process signals at a count.

    Seen are the audit events of Python, which libraries in other languages do not raise: what they
    write, such as safetensors files, falls between the events before and after. Syncing is left
    out, for the system outlives the process and keeps what it was given.

    Args:
        folder: Only what happens in it counts.
        signals: Number of the change, from 0 -> signal.
        log: Where every change is written, a line each.
    """

    def __init__(self, folder: str, signals: dict[int, int], log: str) -> None:
        self._folder = folder
        self._signals = signals
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        self._count = 0
        os.fsync = lambda _: None
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self._note(event, path)
        elif event in ("os.rename", "os.truncate"):
            self._note(event, arguments[0])
        elif event in ("os.remove", "os.rmdir", "os.mkdir"):
            path, folder = arguments[0], arguments[-1]
            if folder != -1:
                path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
            # Code that asks for forgiveness makes folders that are there, and removes what is not.
            if os.path.lexists(path) == (event != "os.mkdir"):
                self._note(event, path)

    def _note(self, event: str, path: Any) -> None:
        # Trackers and locks may open files by their descriptors.
        if isinstance(path, int) or not os.fspath(path).startswith(self._folder):
            return
        count = self._count
        self._count += 1
        os.write(self._log, f"{event} {os.path.relpath(path, self._folder)}\n".encode())
        if count in self._signals:
            os.kill(os.getpid(), self._signals[count])


def be_quick(store: Path) -> None:
    """Leaves out what takes time and writes nothing."""
    from glm_grpo.commands import train  # noqa: PLC0415
    from glm_grpo.models.glm_image.policy import GlmImagePolicy  # noqa: PLC0415
    from tests.cached_rollouts import cached_sampling  # noqa: PLC0415

    train.check_fit = lambda *_: ""
    GlmImagePolicy.sample = cached_sampling(store)


def become_train(request: dict[str, Any]) -> None:
    """Turns this process into `python train.py ...`."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.stdout.reconfigure(line_buffering=True)
    # A shell that starts the tests in the background has them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    sys.path[0] = str(ROOT)
    if request["store"]:
        be_quick(Path(request["store"]))
    if request["changes"]:
        signals = {int(count): number for count, number in request["signals"].items()}
        Changes(request["run_dir"], signals, request["changes"])
    script = str(ROOT / "train.py")
    sys.argv = [script, *request["arguments"]]
    runpy.run_path(script, run_name="__main__")


def preload() -> None:
    """Imports what a run imports, also what it imports late."""
    import torch  # noqa: PLC0415

    import rewards.terms.ssim  # noqa: F401, PLC0415
    from glm_grpo.commands import train  # noqa: F401, PLC0415

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


def main() -> Callable[[], None]:
    """Answers requests until there are no more; returns what is left to do, in a run.

    `{"start": request of become_train}` is answered by the process id, `{"wait": [process id,
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
                return lambda: become_train(request["start"])
            answer: int | None = pid
        else:
            answer = wait(*request["wait"])
        os.write(answers, f"{json.dumps(answer)}\n".encode())
    return lambda: None


if __name__ == "__main__":
    # Outside the loop that reads requests: a run ends as a program does.
    main()()
