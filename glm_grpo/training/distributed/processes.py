"""Let the processes of one run agree, without any of them waiting for one that failed.

They communicate through their own group on the CPU, separate from the one that carries gradients. A
process that fails while it samples or scores can therefore still notify the others, which are not
in a collective of the model at that time. The launcher notices a process that is killed or fails in
an update, and ends the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed
from accelerate import PartialState
from torch.distributed import ProcessGroup

from glm_grpo.errors import Aftermath, PeerError, aftermath_of

_IS_GONE = re.compile(r"gloo.*Connection (closed|reset) by peer", re.DOTALL)
"""Message from gloo in a collective of gradients or weights."""

_LONGEST_WORK = timedelta(hours=6)
"""Longest that one process works while the others wait, for instance writing a checkpoint of 107 GB
to a slow disk. A process that dies is noticed at once, by its closed connection."""

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """Failure of the first process that failed.

    Attributes:
        aftermath: What it leaves of the run.
    """

    rank: int
    message: str
    aftermath: Aftermath


class Processes:
    """The processes that train one policy together; with a single one, nothing here waits.

    Attributes:
        rank: Rank of this process, from 0.
        failure: Last failure of any of them, once all know of it; it stays, so that all end alike.
    """

    def __init__(self, rank: int = 0, count: int = 1, group: ProcessGroup | None = None) -> None:
        """Create a single process by default; `current_processes` finds those of a launch.

        Args:
            group: Group through which they communicate; None for a single one.
        """
        self.rank = rank
        self.count = count
        self.failure: Failure | None = None
        self._group = group

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run folder and prints to the terminal."""
        return self.rank == 0

    def part(self, count: int) -> range:
        """This process's part of `count` ordered things; the first ones take the remainder."""
        quotient, rest = divmod(count, self.count)
        start = self.rank * quotient + min(self.rank, rest)
        return range(start, start + quotient + (self.rank < rest))

    def gather(self, value: T) -> list[T]:
        """Every process's value, in rank order, in every process."""
        if self._group is None:
            return [value]
        values: list[T] = [value] * self.count
        with self._others_needed():
            torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def gather_on_main(self, value: T) -> list[T]:
        """Every process's value in the main one; only its own in the others."""
        if self._group is None:
            return [value]
        values: list[T] | None = [value] * self.count if self.is_main else None
        with self._others_needed():
            torch.distributed.gather_object(value, values, dst=0, group=self._group)
        return [value] if values is None else values

    def any(self, is_true: bool) -> bool:
        """Whether it is true in any process."""
        return any(self.gather(is_true))

    @contextmanager
    def together(self) -> Iterator[None]:
        """End in all processes alike: if the inside fails in one, all of them stop here.

        Nothing inside may wait for another process.

        Raises:
            PeerError: The inside failed in another process; the message names it and quotes its
                error.
        """
        if self._group is None:
            yield
            return
        try:
            yield
        # Whatever the error is, the others must be notified, or they would wait forever.
        except Exception as error:
            # That another process is gone as well would be less informative.
            with suppress(PeerError):
                message = f"{type(error).__name__}: {error}"
                self._note(Failure(self.rank, message, aftermath_of(error)))
            raise
        failure = self._note(None)
        if failure is not None:
            raise PeerError(f"process {failure.rank} of {self.count} failed: {failure.message}")

    def on_main(self, work: Callable[[], T]) -> T:
        """Run a function only in the main process; returns its result in every process.

        Raises:
            PeerError: It failed in the main process, and this is another one.
        """
        results: list[T] = []
        with self.together():
            if self.is_main:
                results.append(work())
        if self._group is None:
            return results[0]
        box: list[T | None] = [results[0] if results else None]
        with self._others_needed():
            torch.distributed.broadcast_object_list(box, src=0, group=self._group)
        (result,) = box
        return result  # type: ignore[return-value]

    def _note(self, own: Failure | None) -> Failure | None:
        first = next((each for each in self.gather(own) if each is not None), None)
        self.failure = first or self.failure
        return first

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Wrap code that communicates by other means, such as an update.

        On accelerators nothing is noticed here: the process waits until the launcher ends it.

        Raises:
            PeerError: Another process was gone during the code.
        """
        try:
            yield
        except RuntimeError as error:
            # Terms and servers lose connections too, but their errors have their own classes.
            if type(error) is not RuntimeError or _IS_GONE.search(str(error)) is None:
                raise
            raise self._lost(error) from error

    @contextmanager
    def _others_needed(self) -> Iterator[None]:
        try:
            yield
        # gloo only reports that a connection was closed, or that nothing arrived in time.
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> PeerError:
        return PeerError(
            f"process {self.rank} of {self.count} lost the connection to another one ({error}); "
            "the launcher's last lines name the rank that failed first. Continue with "
            "train.resume=auto"
        )


ALONE = Processes()
"""A single process."""


def current_processes() -> Processes:
    """Return the processes of the current launch, as started by accelerate or torchrun.

    Call it after the accelerator is created, which decides whether they work on CPUs.
    """
    state = PartialState()
    if state.num_processes == 1:
        return Processes()
    # Objects go through CPU memory, whatever carries the gradients.
    group = torch.distributed.new_group(backend="gloo", timeout=_LONGEST_WORK)
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"a group of all processes is {group!r}: this one is not in it")
    return Processes(state.process_index, state.num_processes, group)
