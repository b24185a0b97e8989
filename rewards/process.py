"""A term in a process of its own, which a crash or a leak of its libraries cannot harm."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from numpy.typing import NDArray
from torch import Tensor, nn

from rewards.base import Reward, TermConfig, has_needs, score_with_notes
from rewards.build import build_reward
from rewards.secrets import hide_secrets
from rewards.types import Prompt, RewardError, Scores, describe_error

READY_SECONDS = 600.0
"""Longest wait for a child to load its libraries and weights, downloads included."""

_Packed = tuple[
    list[Prompt],
    dict[str, NDArray[np.uint8]],
    dict[str, list[NDArray[np.uint8]]],
    NDArray[np.uint8],
]

_EXIT_SECONDS = 1.0
_POLL_SECONDS = 1.0
_LAST_LINES, _LAST_CHARACTERS = 15, 2000
_LAST_BYTES = 2**16
_MOST_OUTPUT_BYTES = 2**20


class ProcessReward:
    """A term that is built and scored in a child process on this machine.

    The child is spawned by multiprocessing, with this process's interpreter, folder and
    environment, and asked through a pipe. It ends when this process does, however that ends. The
    last of what it prints is held for errors.

    Args:
        device: Where the child puts its networks; they stay there.
        ready_seconds: Longest wait for the child to be ready.

    Raises:
        RewardError: The child ended, or was not ready in time; holds its last words.
    """

    def __init__(
        self,
        config: TermConfig,
        *,
        name: str,
        device: torch.device,
        ready_seconds: float = READY_SECONDS,
    ) -> None:
        self._name = name
        self._config = config
        # A file, not a pipe: a pipe that no one reads stops who writes to it.
        self._output, path = tempfile.mkstemp(prefix=f"scorer-{name}-")
        context = multiprocessing.get_context("spawn")
        self._connection, others = context.Pipe()
        self._process = context.Process(target=_serve, args=(others, config, name, device, path))
        self._process.start()
        others.close()
        # Before multiprocessing waits for its children at the end of the program.
        self._close = Finalize(
            self, _end, (self._process, self._connection, self._output, path), exitpriority=10
        )
        try:
            self._wait_until_ready(ready_seconds)
        except RewardError:
            self.close()
            raise

    @property
    def process_id(self) -> int | None:
        """Of the child."""
        return self._process.pid

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt has what the term uses; the child is not asked."""
        return has_needs(prompt, self._config.needs())

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
        if not self._close.still_active():
            raise self._ended_error()
        seconds = self._config.timeout_seconds
        try:
            self._connection.send(_pack(prompts, pixels))
            if not self._connection.poll(seconds):
                self._process.kill()
                self._process.join()
                raise RewardError(
                    f"the process of {self._name} gave no answer within {seconds:g} seconds and "
                    f"was ended; raise the term's timeout_seconds if it is only slow. "
                    f"{self._last_words()}"
                )
            answer = self._connection.recv()
        except (OSError, EOFError) as error:
            # The pipe closes a moment before the process that held it is gone.
            self._process.join(_EXIT_SECONDS)
            raise self._ended_error() from error
        self._bound_output()
        if isinstance(answer, str):
            raise RewardError(answer)
        values, notes = answer
        return Scores(torch.tensor(values, dtype=torch.float32), notes)

    def modules(self) -> tuple[nn.Module, ...]:
        """None: the networks are the child's."""
        return ()

    def close(self) -> None:
        """End the child; it cannot score any more."""
        self._close()

    def _wait_until_ready(self, seconds: float) -> None:
        if not self._connection.poll(seconds):
            raise RewardError(
                f"the process of {self._name} was not ready within {seconds:g} seconds: it "
                f"downloads weights, or hangs while it starts. {self._last_words()}"
            )
        try:
            self._connection.recv()
        except EOFError as error:
            self._process.join(_EXIT_SECONDS)
            raise self._ended_error() from error

    def _ended_error(self) -> RewardError:
        code = self._process.exitcode or 0
        how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
        return RewardError(
            f"the process of {self._name} has ended with {how}; remove the cause, or the term "
            f"{self._name} from reward.terms. {self._last_words()}"
        )

    def _last_words(self) -> str:
        lines = self._read_output().splitlines()[-_LAST_LINES:]
        words = "\n".join(lines)[-_LAST_CHARACTERS:]
        return f"Its last words:\n{words}" if words else "It said nothing"

    def _read_output(self) -> str:
        if not self._close.still_active():  # the file is gone with the child
            return ""
        start = max(0, os.fstat(self._output).st_size - _LAST_BYTES)
        return os.pread(self._output, _LAST_BYTES, start).decode(errors="replace")

    def _bound_output(self) -> None:
        # A term that prints a line a picture would fill the disk in a long run.
        if os.fstat(self._output).st_size > _MOST_OUTPUT_BYTES:
            os.ftruncate(self._output, 0)


def _end(process: SpawnProcess, connection: Connection, output: int, path: str) -> None:
    connection.close()
    process.join(_EXIT_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    os.close(output)
    with suppress(FileNotFoundError):  # the child removes it, unless it died first
        os.unlink(path)


def _serve(
    connection: Connection, config: TermConfig, name: str, device: torch.device, output: str
) -> None:
    """The child: build the term, and answer until the pipe closes."""
    # A signal to the whole group of processes (Ctrl-C, a scheduler's notice) asks the run to end
    # after its step, for which it needs this scorer; the run says when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.unlink(output)  # it lasts as long as someone has it open, and no longer
    for stream in (1, 2):
        os.dup2(file, stream)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        reward = build_reward(config, device)
    except RewardError as error:
        sys.exit(hide_secrets(f"{name}: {error}"))
    connection.send("ready")
    while True:
        try:
            prompts, pixels = _unpack(*connection.recv())
        except EOFError:
            return
        connection.send(_answer(reward, prompts, pixels))


def _pack(prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> _Packed:
    # As arrays: tensors would go through shared memory, one file descriptor each.
    targets = {
        prompt.prompt_id: prompt.target.numpy(force=True)
        for prompt in prompts
        if prompt.target is not None
    }
    sources = {
        prompt.prompt_id: [source.numpy(force=True) for source in prompt.sources]
        for prompt in prompts
    }
    texts = [replace(prompt, target=None, sources=()) for prompt in prompts]
    return texts, targets, sources, pixels.numpy(force=True)


def _unpack(
    texts: Sequence[Prompt],
    targets: Mapping[str, NDArray[np.uint8]],
    sources: Mapping[str, Sequence[NDArray[np.uint8]]],
    pixels: NDArray[np.uint8],
) -> tuple[list[Prompt], UInt8[Tensor, "N 3 H W"]]:
    tensors = {prompt_id: torch.from_numpy(target) for prompt_id, target in targets.items()}
    read = {prompt_id: tuple(map(torch.from_numpy, each)) for prompt_id, each in sources.items()}
    prompts = [
        replace(prompt, target=tensors.get(prompt.prompt_id), sources=read[prompt.prompt_id])
        for prompt in texts
    ]
    return prompts, torch.from_numpy(pixels)


def _answer(
    reward: Reward, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
) -> tuple[list[float], tuple[str, ...]] | str:
    try:
        for prompt in {prompt.prompt_id: prompt for prompt in prompts}.values():
            reward.applies_to(prompt)  # raises where it could score no picture against it
        scores = score_with_notes(reward, prompts, pixels)
    except RewardError as error:
        return describe_error(error)
    # Terms wrap libraries that raise whatever they like.
    except Exception as error:
        logging.getLogger(__name__).exception("a group could not be scored")
        return describe_error(error)
    return scores.values.tolist(), scores.notes


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    parent_id = os.getppid()
    # The parent is asked for too: what it forked may outlive it, and keeps its pipe open.
    while os.getppid() == parent_id:
        if parent is None or wait([parent.sentinel], _POLL_SECONDS):
            break
    # At once: whoever would have read an answer is gone, and there is nothing to save.
    os._exit(0)
