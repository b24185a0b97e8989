"""Starts Python programs as processes, from a server that has imported their libraries."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

PATIENCE = 200.0
"""Seconds after which a program that should have ended is taken to hang."""


@dataclass
class Program:
    """A process that was started.

    Attributes:
        pid: Process id.
        stdout: File that it writes to.
        stderr: File that it writes to; may be the same.
        code: Exit code, negative for a signal; None while it runs.
    """

    server: Programs
    pid: int
    stdout: Path
    stderr: Path
    code: int | None = None

    def wait(self, seconds: float = PATIENCE) -> int | None:
        """Exit code, negative for a signal; None where it still runs after so many seconds."""
        if self.code is None:
            self.code = self.server.ask({"wait": [self.pid, seconds]})
        return self.code

    def kill(self) -> None:
        """As `kill -9`."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            assert self.wait() is not None

    def said(self) -> str:
        """What it wrote to stdout so far."""
        return self.stdout.read_text()


@dataclass
class Programs:
    """Starts programs by `fork_server.py`.

    Args:
        folder: Has what they write.
    """

    folder: Path
    started: list[Program] = field(default_factory=list)
    _server: subprocess.Popen[str] | None = None
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Sends a request to the server, which is started by the first."""
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("fork_server.py")],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(f"{json.dumps(request)}\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def start(
        self,
        folder: Path,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        is_one_stream: bool = False,
        prepare: str | None = None,
        **options: Any,
    ) -> Program:
        """Starts `python ARGUMENTS`.

        Args:
            folder: Working directory.
            arguments: A file, `-m NAME` or `-c CODE`, and the program's own.
            env: Added to the environment. Libraries that read it when they are imported do not
                notice.
            is_one_stream: Whether stderr goes where stdout goes.
            prepare: `module:function` to be called before, in the process.
            options: Keywords of that function.
        """
        number = next(self._numbers)
        stdout = self.folder / f"{number}-stdout.txt"
        stderr = stdout if is_one_stream else self.folder / f"{number}-stderr.txt"
        for path in (stdout, stderr):
            path.touch()
        request = {
            "arguments": list(arguments),
            "folder": str(folder),
            "env": dict(env or {}),
            "stdout": str(stdout),
            "stderr": str(stderr),
            "prepare": prepare,
            "options": options,
        }
        self.started.append(Program(self, self.ask({"start": request}), stdout, stderr))
        return self.started[-1]

    def start_team(
        self,
        count: int,
        folder: Path,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        prepare: str | None = None,
    ) -> list[Program]:
        """Starts processes of one run on the CPU, as torchrun does, see `start`."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
        shared = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", **(env or {})}
        if count > 1:
            shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return [
            self.start(
                folder,
                *arguments,
                env=shared | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {}),
                is_one_stream=True,
                prepare=prepare,
            )
            for rank in range(count)
        ]

    def run(
        self,
        folder: Path,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        prepare: str | None = None,
        seconds: float = PATIENCE,
    ) -> subprocess.CompletedProcess[str]:
        """Runs `python ARGUMENTS` to its end, see `start`."""
        program = self.start(folder, *arguments, env=env, prepare=prepare)
        code = program.wait(seconds)
        if code is None:
            program.kill()
            raise subprocess.TimeoutExpired(arguments, seconds)
        said, errors = program.stdout.read_text(), program.stderr.read_text()
        return subprocess.CompletedProcess(arguments, code, said, errors)

    def close(self) -> None:
        """Kills what still runs, and ends the server."""
        for program in self.started:
            program.kill()
        if self._server is not None:
            # To tear its libraries down takes seconds.
            self._server.kill()
            self._server.communicate()
