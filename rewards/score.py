"""Run every term over groups of images and reject invalid scores.

Each term works in its own thread, so that images can be scored while others are still being
decoded, and a hanging term does not hang the run.
"""

from __future__ import annotations

import os
import queue
import sysconfig
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Bool, Float32, UInt8
from torch import Tensor, nn

from rewards.base import InvalidScoresError, Reward, score_checked
from rewards.out_of_memory import is_out_of_memory
from rewards.process_defaults import ProcessDefaults
from rewards.score_map import Grid, ScoreBoxes, like_with_like, map_on_grid, without_kind
from rewards.types import Prompt, RewardError, RewardTable, describe_error
from rewards.unfinished import finished_before_exit
from rewards.weighting import is_left_out

_NOT_USERS = (
    str(Path(__file__).parent) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    "<frozen ",
)
"""Beginnings of the names of files that users did not write."""
_SIGNS_OF_THREADS = ("main thread", "event loop in thread", "different thread", "same thread")
"""Errors of what works only in the main thread, or in the one that made it."""

_GRACE_SECONDS = 2.0
"""Added to a term's time limit, because terms that keep the limit themselves can explain more."""


@dataclass(frozen=True)
class Term:
    """One term of a reward.

    Attributes:
        name: Name of its column in the table, unique.
        std_floor: See `RewardTable.std_floors`.
        timeout_seconds: Longest time to score one group.
        prompt_ids: Glob over the ids of prompts to which it applies.
        is_trained_on: Whether it scores training images, too, or only those of evaluations.
    """

    name: str
    reward: Reward
    weight: float
    std_floor: float = 1e-4
    timeout_seconds: float = 600.0
    prompt_ids: str = "*"
    is_trained_on: bool = True

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether `prompt_ids` matches the prompt, and it has what the term compares with.

        Raises:
            RewardError: It has, but the term could not score any image against it.
        """
        return fnmatchcase(prompt.prompt_id, self.prompt_ids) and self.reward.applies_to(prompt)


class Scorer:
    """The terms of a reward with their weights.

    Args:
        terms: Terms in the order of the R axis, with unique names.
        is_overlapping: Whether groups may be scored while others are being decoded.
    """

    def __init__(self, terms: Sequence[Term], *, is_overlapping: bool = True) -> None:
        self.terms = tuple(terms)
        self._workers = tuple(_Worker(term.name) for term in terms)
        self.is_overlapping = is_overlapping

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the terms, in the order of the R axis."""
        return tuple(term.name for term in self.terms)

    def modules(self) -> tuple[nn.Module, ...]:
        """Networks of all terms, to be moved between devices."""
        return tuple(module for term in self.terms for module in term.reward.modules())

    def score(self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "P G 3 H W"]) -> RewardTable:
        """Score every image by every term that applies to its prompt.

        Each term sees one prompt's group at a time: that limits memory, and a group is large enough
        to keep an accelerator busy.

        Returns:
            The table of raw scores, on the CPU.

        Raises:
            RewardError: A term raised, took too long, or returned something other than one finite
                float32 number, or None, per image. The message names term, prompt and image.
        """
        with self.begin(prompts) as scoring:
            for group in pixels:
                scoring.add(group)
            return scoring.finish()

    def begin(
        self,
        prompts: Sequence[Prompt],
        *,
        is_resident: bool = True,
        is_training: bool = False,
        grid: Grid | None = None,
    ) -> Scoring:
        """Begin to score groups that are added one by one, in the order of the prompts.

        Args:
            is_resident: Whether the terms' networks are on their device. If not, terms that have
                networks wait until `Scoring.finish`.
            is_training: Whether the images are trained on: terms with `when: evaluation` then
                apply to no prompt.
            grid: Places for which the table says what they earned, by terms that can; None: none.
        """
        return Scoring(
            self.terms,
            self._workers,
            prompts,
            is_resident=is_resident,
            is_training=is_training,
            grid=grid,
        )


class Scoring:
    """Groups being scored; created by `Scorer.begin`.

    At the end of its `with` block, whatever ended it, the terms get no further groups, and what
    they changed for the whole process is undone.
    """

    def __init__(
        self,
        terms: Sequence[Term],
        workers: Sequence[_Worker],
        prompts: Sequence[Prompt],
        *,
        is_resident: bool,
        is_training: bool,
        grid: Grid | None,
    ) -> None:
        self._grid = grid
        self._terms = terms
        self._workers = workers
        self._prompts = prompts
        self._is_early = [is_resident or not term.reward.modules() for term in terms]
        rows = [
            [(term.is_trained_on or not is_training) and term.applies_to(prompt) for term in terms]
            for prompt in prompts
        ]
        self._is_applicable: Bool[Tensor, "P R"] = torch.tensor(rows, dtype=torch.bool)
        self._groups: list[UInt8[Tensor, "G 3 H W"]] = []
        self._futures: dict[tuple[int, int], Future[_GroupScores]] = {}
        self._defaults = ProcessDefaults()

    def __enter__(self) -> Scoring:
        return self

    def __exit__(self, *_: object) -> None:
        # Those left if a term or the caller failed.
        for future in self._futures.values():
            future.cancel()
        # While terms run, one of them may be about to undo it itself.
        self._defaults.restore("a reward term")

    def add(self, group: UInt8[Tensor, "G 3 H W"]) -> None:
        """Pass the images of the next prompt to the terms that can begin; does not wait."""
        self._groups.append(group)
        for column, is_early in enumerate(self._is_early):
            if is_early:
                self._submit(len(self._groups) - 1, column)

    def finish(self, on_progress: Callable[[int, int], object] = lambda *_: None) -> RewardTable:
        """Let the other terms begin, and wait for all.

        Args:
            on_progress: Called with the number of finished scores of a group by a term, and the
                total.

        Raises:
            RewardError: As for `Scorer.score`.
        """
        if not 0 < len(self._groups) == len(self._prompts):
            raise ValueError(
                f"{len(self._prompts)} prompts, {len(self._groups)} groups of images; add one "
                "group for each prompt, in their order"
            )
        for row in range(len(self._groups)):
            for column, is_early in enumerate(self._is_early):
                if not is_early:
                    self._submit(row, column)
        shape = (len(self._groups), self._groups[0].shape[0], len(self._terms))
        raw = torch.zeros(shape, dtype=torch.float32)
        notes: dict[str, list[tuple[str, ...]]] = {}
        score_maps: dict[str, Float32[Tensor, "P G h w"]] = {}
        boxes: dict[str, list[ScoreBoxes]] = {}
        objects: dict[str, list[tuple[tuple[str, ...], ...]]] = {}
        for done, ((row, column), future) in enumerate(self._futures.items(), start=1):
            found = self._wait(row, column, future)
            on_progress(done, len(self._futures))
            name = self._terms[column].name
            raw[row, :, column] = found.values
            if found.notes:
                notes.setdefault(name, [()] * len(self._groups))[row] = found.notes
            if found.score_map is not None:
                shape = (len(self._groups), *found.score_map.shape)
                empty = torch.zeros(shape, dtype=torch.float32)
                score_maps.setdefault(name, empty)[row] = found.score_map
            if found.score_boxes:
                boxes.setdefault(name, [()] * len(self._groups))[row] = found.score_boxes
            if found.objects:
                objects.setdefault(name, [()] * len(self._groups))[row] = found.objects
        table = RewardTable(
            names=tuple(term.name for term in self._terms),
            raw=raw,
            is_applicable=self._is_applicable,
            weights=torch.tensor([term.weight for term in self._terms], dtype=torch.float32),
            std_floors=torch.tensor([term.std_floor for term in self._terms], dtype=torch.float32),
            notes={name: tuple(groups) for name, groups in notes.items()},
            score_map=score_maps,
            score_boxes={name: tuple(groups) for name, groups in boxes.items()},
            objects={name: tuple(groups) for name, groups in objects.items()},
        )
        return replace(table, kind_map=self._kind_map(table))

    def _kind_map(self, table: RewardTable) -> dict[str, Float32[Tensor, "P G h w"]]:
        """Draw the boxes that have a kind; an image that any term refused is in no mean."""
        if self._grid is None:
            return {}
        is_scored = (~is_left_out(table)).tolist()
        height, width = self._groups[0].shape[-2:]
        maps = {}
        for name, groups in table.score_boxes.items():
            if any(box.kind for group in groups for boxes in group for box in boxes):
                maps[name] = torch.stack(
                    [
                        map_on_grid(
                            like_with_like(boxes or ((),) * len(kept), kept),
                            self._grid,
                            height=height,
                            width=width,
                        )
                        for boxes, kept in zip(groups, is_scored, strict=True)
                    ]
                )
        return maps

    def _submit(self, row: int, column: int) -> None:
        if self._is_applicable[row, column]:
            term, prompt, group = self._terms[column], self._prompts[row], self._groups[row]
            score = partial(_score_group, term, prompt, group, self._grid)
            self._futures[row, column] = self._workers[column].submit(score)

    def _wait(self, row: int, column: int, future: Future[_GroupScores]) -> _GroupScores:
        term, prompt = self._terms[column], self._prompts[row]
        try:
            # A term scores its groups in order, so this one began before the wait for it did, or as
            # soon as the previous one was done.
            return future.result(timeout=term.timeout_seconds + _GRACE_SECONDS)
        except TimeoutError as error:
            raise RewardError(
                f"term {term.name}, prompt {prompt.prompt_id}: not scored within "
                f"{term.timeout_seconds:g} seconds; the term hangs, or needs a higher "
                f"reward.terms.{term.name}.timeout_seconds",
                images=self._groups[row],
            ) from error


@dataclass(frozen=True)
class _GroupScores:
    """Scores of one group by one term, with what each place of a grid earned, if it says so."""

    values: Float32[Tensor, " G"]
    notes: tuple[str, ...]
    score_map: Float32[Tensor, "G h w"] | None
    score_boxes: ScoreBoxes
    objects: tuple[tuple[str, ...], ...]


_Job = tuple[Future[_GroupScores], Callable[[], _GroupScores], torch.cuda.Event | None]
"""Scores to come, what computes them, and the event on the device to wait for first."""


class _Worker:
    """Thread of one term; ends when nothing refers to this object any more.

    A daemon, so that a hanging term does not keep the process from ending: Python waits for the
    threads of a ThreadPoolExecutor. As Python itself ends, it waits on, because waking it then can
    abort the process; so can work at that time (`finished_before_exit`).

    On CUDA it uses its own stream, so that it waits only for its own work, not for the decoder's. A
    job first waits for the work that the submitting stream had at submission, such as moving
    weights, and is done when the device has finished it.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), daemon=True, name=name).start()
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def submit(self, score: Callable[[], _GroupScores]) -> Future[_GroupScores]:
        future: Future[_GroupScores] = Future()
        # Only if the device is in use already, because this takes memory.
        is_on_device = torch.cuda.is_initialized()
        ready = torch.cuda.current_stream().record_event() if is_on_device else None
        self._jobs.put((future, score, ready))
        return future


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    stream: torch.cuda.Stream | None = None
    while (job := jobs.get()) is not None:
        stream = _do(*job, stream)
        # It holds the term and images, and the wait for the next one may be long.
        del job


def _do(
    future: Future[_GroupScores],
    score: Callable[[], _GroupScores],
    ready: torch.cuda.Event | None,
    stream: torch.cuda.Stream | None,
) -> torch.cuda.Stream | None:
    """Do a job in this thread, and return the thread's stream."""
    if not future.set_running_or_notify_cancel():
        return stream
    try:
        with finished_before_exit():
            if ready is not None:
                if stream is None:
                    stream = torch.cuda.Stream(ready.device)
                    torch.cuda.set_stream(stream)
                stream.wait_event(ready)
            scores = score()
            if stream is not None:
                stream.synchronize()
        future.set_result(scores)
    # Passed to the thread that waits for the group.
    except Exception as error:
        future.set_exception(error)
    finally:
        # The error's traceback holds this frame: together they would be a reference cycle.
        del future
    return stream


def _score_group(
    term: Term, prompt: Prompt, pixels: UInt8[Tensor, "G 3 H W"], grid: Grid | None
) -> _GroupScores:
    where = f"term {term.name}, prompt {prompt.prompt_id}"
    size, _, height, width = pixels.shape
    try:
        scores = score_checked(term.reward, [prompt] * size, pixels, with_map=grid is not None)
        found = scores.score_map
        score_map = None
        if grid is not None and found is not None:
            # Now, because maps of all groups at the resolution of images can take gigabytes.
            by_place = without_kind(found) if isinstance(found, tuple) else found
            score_map = map_on_grid(by_place, grid, height=height, width=width)
        boxes = found if isinstance(found, tuple) else ()
        return _GroupScores(scores.values, scores.notes, score_map, boxes, scores.objects)
    except InvalidScoresError as error:
        raise RewardError(f"{where}, {error}", images=pixels) from error
    except RewardError as error:
        # The error already explains the failure; asking again per image can cost minutes, or
        # money.
        raise RewardError(f"{where}: {describe_error(error)}", images=pixels) from error
    # Terms wrap libraries that raise anything, and each such failure ends the step. An exit would
    # silently end only this thread. Ctrl-C reaches only the main thread: a KeyboardInterrupt here
    # was raised by a library.
    except BaseException as error:
        image = _find_failing_image(term, prompt, pixels)
        raise RewardError(
            f"{where}, {image}: scoring failed with {describe_error(error)}{_users_line(error)}. A "
            f"failure is never counted as a score; {_describe_remedy(term, error, pixels)}",
            images=pixels,
        ) from error


def _users_line(error: BaseException) -> str:
    """Last line of a user's program that led to an error; empty if only libraries did."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and not frame.filename.startswith(_NOT_USERS)
    ]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _describe_remedy(term: Term, error: BaseException, pixels: UInt8[Tensor, "G 3 H W"]) -> str:
    if any(sign in str(error) for sign in _SIGNS_OF_THREADS):
        return (
            "every term runs in a thread of its own, which has no signals and no event loop: limit "
            f"its time by reward.terms.{term.name}.timeout_seconds instead of signal.alarm, run "
            "coroutines with asyncio.run, and create in the call what belongs to one thread"
        )
    if not is_out_of_memory(error):
        return f"fix the cause, or remove the term {term.name} from reward.terms"
    size, _, height, width = pixels.shape
    return (
        f"memory ran out over a group of {size} images of {height} x {width} pixels: set "
        "reward.overlap=false, then offload=modules, which give the term more room (a run can "
        "continue with them), or in a new run lower rollout.group_size"
    )


@torch.no_grad()
def _find_failing_image(term: Term, prompt: Prompt, pixels: UInt8[Tensor, "G 3 H W"]) -> str:
    # A term that scores a whole group at once cannot tell which image failed.
    for index in range(pixels.shape[0]):
        try:
            term.reward.score([prompt], pixels[index : index + 1])
        except BaseException:  # as above; only the first failure is reported
            return f"image {index}"
    if pixels.shape[0] == 1:
        return "image 0 (a second attempt succeeded)"
    return f"images 0 to {pixels.shape[0] - 1} together (each can be scored by itself)"
