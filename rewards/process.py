"""Run a term in a separate process, to isolate crashes and leaks of its libraries."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from numpy.typing import NDArray
from torch import Tensor, nn

from rewards.base import Reward, TermConfig, has_needs, score_with_notes
from rewards.build import build_reward
from rewards.parts import Pieces
from rewards.streams import outlive_readers
from rewards.types import Prompt, RewardError, Scores, describe_error

_POLL_SECONDS = 1.0

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")
_Pictures = Mapping[str, tuple[NDArray[np.uint8] | None, Sequence[NDArray[np.uint8]]]]
"""Target and sources of each prompt, by prompt id."""
_Scores = tuple[NDArray[np.float32], tuple[str, ...], NDArray[np.float32] | Pieces | None]
"""Values, notes and parts of pictures."""

_reward: Reward
"""The term of this process; only set in the child."""


class ProcessReward:
    """A term that is built and scored in a child process on this machine.

    The child has this process's interpreter, folder, environment and output. It ends when this
    process does, however that ends.

    Args:
        config: Options of the term.
        name: Name of the term, for errors.
        device: Device for the child's networks, where they stay.

    Raises:
        RewardError: The term cannot be built, or the child ended.
    """

    def __init__(self, config: TermConfig, *, name: str, device: torch.device) -> None:
        self._name = name
        self._config = config
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=_begin)
        # No time limit, because of downloads.
        process_id = self._ask(None, _build, config, device)
        children = multiprocessing.active_children()
        (self._process,) = (each for each in children if each.pid == process_id)

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt has what the term uses; does not ask the child."""
        return has_needs(prompt, self._config.needs())

    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Score in the child; the scores are returned on the CPU.

        Raises:
            RewardError: The term failed (the message quotes its error), or the child ended, or it
                gave no answer in time and was ended.
        """
        return self.score_with_notes(prompts, pixels).values

    def score_with_notes(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Scores:
        """Like `score`; the notes are the term's."""
        return self._score(prompts, pixels, with_parts=False)

    def score_with_parts(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Scores:
        """Like `score_with_notes`; the parts are the term's, None if it has none."""
        return self._score(prompts, pixels, with_parts=True)

    def modules(self) -> tuple[nn.Module, ...]:
        """Empty, because the networks belong to the child."""
        return ()

    def _score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"], *, with_parts: bool
    ) -> Scores:
        texts, pictures, array = _pack(prompts, pixels)
        seconds = self._config.timeout_seconds
        values, notes, parts = self._ask(seconds, _score, texts, pictures, array, with_parts)
        maps_or_pieces = torch.from_numpy(parts) if isinstance(parts, np.ndarray) else parts
        return Scores(torch.from_numpy(values), notes, maps_or_pieces)

    def _ask(
        self,
        seconds: float | None,
        function: Callable[_Arguments, _Answer],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Answer:
        try:
            return self._pool.submit(function, *args, **kwargs).result(seconds)
        except TimeoutError as error:
            self._process.kill()
            raise RewardError(
                f"the process of {self._name} gave no answer within {seconds:g} seconds and was "
                "stopped; raise the term's timeout_seconds if it is only slow. Its output is above"
            ) from error
        except BrokenProcessPool as error:
            raise RewardError(
                f"the process of {self._name} has ended{self._describe_exit()}; fix the cause, "
                f"or remove the term {self._name} from reward.terms. Its output is above"
            ) from error

    def _describe_exit(self) -> str:
        if not hasattr(self, "_process"):
            return " before its term was built"
        self._pool.shutdown()  # waits for the exit code
        code = self._process.exitcode or 0
        return f" with signal {-code}" if code < 0 else f" with exit code {code}"


def _pack(
    prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
) -> tuple[list[Prompt], _Pictures, NDArray[np.uint8]]:
    # As arrays: tensors would go through shared memory, which is small in containers.
    pictures = {
        prompt.prompt_id: (
            None if prompt.target is None else prompt.target.numpy(force=True),
            [source.numpy(force=True) for source in prompt.sources],
        )
        for prompt in prompts
    }
    texts = [replace(prompt, target=None, sources=()) for prompt in prompts]
    return texts, pictures, pixels.numpy(force=True)


def _begin() -> None:
    # A signal to the whole process group (Ctrl-C, a scheduler's notice, a closed terminal) asks the
    # run to stop after its step, for which it needs this scorer; the run ends the scorer
    # afterwards.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    outlive_readers()
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    # Executors do not notice that the parent was killed, because the child keeps their pipes open.
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)


def _build(config: TermConfig, device: torch.device) -> int:
    global _reward
    with _errors_in_words():
        _reward = build_reward(config, device)
    return os.getpid()


def _score(
    texts: Sequence[Prompt], pictures: _Pictures, pixels: NDArray[np.uint8], with_parts: bool
) -> _Scores:
    prompts = []
    for text in texts:
        array, arrays = pictures[text.prompt_id]
        target = None if array is None else torch.from_numpy(array)
        sources = tuple(map(torch.from_numpy, arrays))
        prompts.append(replace(text, target=target, sources=sources))
    with _errors_in_words():
        for prompt in {prompt.prompt_id: prompt for prompt in prompts}.values():
            _reward.applies_to(prompt)  # raises if it could score no picture against it
        scores = score_with_notes(_reward, prompts, torch.from_numpy(pixels), with_parts=with_parts)
    parts = scores.parts.numpy() if isinstance(scores.parts, Tensor) else scores.parts
    return scores.values.numpy(), scores.notes, parts


@contextmanager
def _errors_in_words() -> Iterator[None]:
    try:
        yield
    # Terms wrap libraries that raise anything, including errors that cannot be pickled.
    except BaseException as error:
        raise RewardError(describe_error(error)) from error
