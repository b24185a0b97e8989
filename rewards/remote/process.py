"""A term in a process of its own, which a crash or a leak of its libraries cannot harm."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor, nn

from rewards.base import Need
from rewards.keys import TOKEN_VARIABLE
from rewards.remote.term import LostScorerError, RemoteReward
from rewards.types import Prompt, RewardError, Scores

READY_SECONDS = 600.0
"""Longest wait for a child to load its libraries and weights, downloads included."""

_LISTENING = re.compile(r"listening on (http://\S+)\n")
_POLL_SECONDS = 0.05
_EXIT_SECONDS = 1.0
_LAST_LINES, _LAST_CHARACTERS = 15, 2000
_LAST_BYTES = 2**16
_MOST_OUTPUT_BYTES = 2**20


class ProcessReward:
    """A term that is built and scored in a child process on this machine.

    The child is `python -m rewards.remote.serve`, with this process's interpreter, folder and
    environment. It ends when this process does, however that ends. The last of what it prints is
    kept for errors. It answers this process alone, by a token that only the two know.

    Args:
        options: The term's section of the config, as plain values with its `kind`.
        name: Of the term.
        needs: What of a prompt the term looks at.
        device: Where the child puts its networks; they stay there.
        timeout_seconds: Longest wait for the scores of one call.
        ready_seconds: Longest wait for the child to be ready.

    Raises:
        RewardError: The child ended, or was not ready in time; holds its last words.
    """

    def __init__(
        self,
        options: Mapping[str, object],
        *,
        name: str,
        needs: Sequence[Need],
        device: torch.device,
        timeout_seconds: float,
        ready_seconds: float = READY_SECONDS,
    ) -> None:
        self._name = name
        # A file, not a pipe: a pipe that no one reads stops who writes to it.
        self._output, path = tempfile.mkstemp(prefix=f"scorer-{name}-")
        os.unlink(path)  # it lasts as long as someone has it open, and no longer
        token = secrets.token_urlsafe()
        self._process = _start(options, name=name, device=device, output=self._output, token=token)
        self._close = weakref.finalize(self, _end, self._process, self._output)
        try:
            self._remote = RemoteReward(
                self._wait_until_ready(ready_seconds),
                needs=needs,
                retries=0,
                timeout_seconds=timeout_seconds,
                token=token,
            )
        except RewardError:
            self.close()
            raise

    @property
    def process_id(self) -> int:
        """Of the child."""
        return self._process.pid

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt has what the term looks at; the child is not asked."""
        return self._remote.applies_to(prompt)

    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Score in the child; the scores come back on the CPU.

        Raises:
            RewardError: The term failed, with its own words; or the child ended, or gave no answer
                in time and was ended, with its last words.
        """
        return self.score_with_notes(prompts, pixels).values

    def score_with_notes(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Scores:
        """As `score`; the notes are the term's."""
        try:
            scores = self._remote.score_with_notes(prompts, pixels)
        except LostScorerError as error:
            # A connection breaks a moment before the process that held it is gone.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_SECONDS)
                raise self._ended_error() from error
            self._process.kill()
            self._process.wait()
            raise RewardError(
                f"the process of {self._name} gave no answer and was ended ({error}). "
                f"{self._last_words()}"
            ) from error
        self._bound_output()
        return scores

    def modules(self) -> tuple[nn.Module, ...]:
        """None: the networks are the child's."""
        return ()

    def close(self) -> None:
        """End the child; it cannot score any more."""
        self._close()

    def _wait_until_ready(self, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            listening = _LISTENING.search(self._read_output())
            if listening is not None:
                return listening[1]
            if self._process.poll() is not None:
                raise self._ended_error()
            time.sleep(_POLL_SECONDS)
        raise RewardError(
            f"the process of {self._name} was not ready within {seconds:g} seconds: it downloads "
            f"weights, or hangs while it starts. {self._last_words()}"
        )

    def _ended_error(self) -> RewardError:
        code = self._process.returncode
        how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
        return RewardError(
            f"the process of {self._name} has ended with {how}; remove the cause, or the term "
            f"{self._name} from reward.terms. {self._last_words()}"
        )

    def _last_words(self) -> str:
        lines = _LISTENING.sub("", self._read_output()).splitlines()[-_LAST_LINES:]
        words = "\n".join(lines)[-_LAST_CHARACTERS:]
        return f"Its last words:\n{words}" if words else "It said nothing"

    def _read_output(self) -> str:
        if not self._close.alive:  # the file is gone with the child
            return ""
        # pread: the child writes where the descriptor, which it shares, stands.
        start = max(0, os.fstat(self._output).st_size - _LAST_BYTES)
        return os.pread(self._output, _LAST_BYTES, start).decode(errors="replace")

    def _bound_output(self) -> None:
        # A term that prints a line a picture would fill the disk in a long run.
        if os.fstat(self._output).st_size > _MOST_OUTPUT_BYTES:
            os.lseek(self._output, 0, os.SEEK_SET)
            os.ftruncate(self._output, 0)


def _start(
    options: Mapping[str, object], *, name: str, device: torch.device, output: int, token: str
) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "rewards.remote.serve",
        "--name",
        name,
        "--device",
        str(device),
    ]
    command += ["--options-json", json.dumps(dict(options)), "--end-with-stdin"]
    # Nothing is written to the pipe: that it closes, as it does even if this process is killed,
    # tells the child to end.
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        # Not among the arguments, which every user of the machine can list.
        env=os.environ | {TOKEN_VARIABLE: token},
    )


def _end(process: subprocess.Popen[bytes], output: int) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    os.close(output)
