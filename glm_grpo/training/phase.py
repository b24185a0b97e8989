"""The models of a run, and the phases of a step.

During a phase the models that it uses are on the accelerator and its seconds are counted. Out of
memory becomes an error that names the sizes at hand and the keys to change.
"""

from __future__ import annotations

import resource
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import psutil
import torch

from glm_grpo.errors import MemoryLimitError, PeerError
from glm_grpo.models.base import Decoder, Policy
from glm_grpo.models.offload import Offload, Phase
from glm_grpo.output import describe_bytes
from glm_grpo.types import PromptBatch
from rewards.out_of_memory import asked_bytes, is_out_of_memory
from rewards.score import Scorer
from rewards.types import RewardError

MemoryPhase = Literal[
    "loading", "sources", "rollout", "decode", "reward", "update", "evaluation", "records"
]
"""Phases with remedies of their own; `records` is all that happens between the others."""


@dataclass(frozen=True)
class _Remedy:
    """Keys, those that change least first.

    Attributes:
        going_on: A resumed run may have them changed.
        anew: They make another run.
    """

    going_on: tuple[str, ...]
    anew: tuple[str, ...]


_OFFLOAD = ("offload=modules", "offload=modules_and_optimizer")
_PICTURES = ("rollout.height", "rollout.width")

_REMEDIES: Mapping[MemoryPhase, _Remedy] = {
    "loading": _Remedy(_OFFLOAD, ("model.dtype=bfloat16",)),
    "sources": _Remedy(_OFFLOAD, _PICTURES),
    "rollout": _Remedy(_OFFLOAD, ("rollout.prompts_per_step", "rollout.group_size", *_PICTURES)),
    "decode": _Remedy(("decode.batch_size", *_OFFLOAD), ("rollout.group_size", *_PICTURES)),
    "reward": _Remedy(
        ("offload=modules", "reward.overlap=false"), ("rollout.group_size", *_PICTURES)
    ),
    "update": _Remedy(
        (
            "train.micro_batch_size",
            "model.gradient_checkpointing=true",
            "offload=modules_and_optimizer",
        ),
        ("'model.adapter={rank: 32, alpha: 64.0}'", *_PICTURES),
    ),
    "evaluation": _Remedy(
        ("decode.batch_size", *_OFFLOAD),
        ("eval.samples_per_prompt", "rollout.prompts_per_step", *_PICTURES),
    ),
    "records": _Remedy((), ("rollout.prompts_per_step", "rollout.group_size", *_PICTURES)),
}


_EXPLAINED = (MemoryLimitError, PeerError, RewardError)
"""Errors that say themselves where memory ran out, be it in another process."""


@runtime_checkable
class Display(Protocol):
    """Who is told what is being done: the terminal."""

    def phase(self, name: str) -> None:
        """A phase begins."""
        ...

    def count(self, done: int, total: int) -> None:
        """So much of the phase at hand is done: tokens, prompts, scores, micro-batches."""
        ...

    def evaluating(self, done: int, total: int) -> None:
        """So many held-out prompts are evaluated; the phases that follow are for the next ones."""
        ...


class NoDisplay:
    """Nobody is told."""

    def phase(self, name: str) -> None:
        """Passes over it."""

    def count(self, done: int, total: int) -> None:
        """Passes over it."""

    def evaluating(self, done: int, total: int) -> None:
        """Passes over it."""


class PhaseClock:
    """Adds up wall-clock seconds by phase; waits for the accelerator before reading the time.

    For the current stream alone: reward terms work on streams of their own meanwhile.

    Args:
        display: Told of every phase as it begins; None: nobody is.
    """

    def __init__(self, display: Display | None = None) -> None:
        self._display = display or NoDisplay()
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times what runs inside."""
        self._display.phase(name)
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def announce(self, name: str) -> None:
        """Tells what begins, and times nothing."""
        self._display.phase(name)

    def count(self, done: int, total: int) -> None:
        """Tells how much of the phase at hand is done."""
        self._display.count(done, total)

    def add(self, name: str, seconds: float) -> None:
        """Counts seconds that a phase took elsewhere, of which this step may have waited none."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, and `step` for all the time since the clock was made."""
        return {**self._seconds, "step": time.perf_counter() - self._started}


@dataclass(frozen=True)
class Models:
    """The models of a run.

    Attributes:
        policy: Samples and is trained.
        decoder: Frozen; decodes in full, as for evaluations.
        scorer: All reward terms.
        offload: Moves them to the accelerator and back.
    """

    policy: Policy
    decoder: Decoder
    scorer: Scorer
    offload: Offload

    def with_decode_steps(self, steps: int) -> Models:
        """The same models, with so many denoising steps."""
        return replace(self, decoder=self.decoder.with_steps(steps))

    @contextmanager
    def phase(
        self,
        phase: Phase,
        size: str,
        clock: PhaseClock | None = None,
        *,
        timed_as: str | None = None,
        is_evaluation: bool = False,
    ) -> Iterator[None]:
        """What the phase uses is on the accelerator inside, and nothing else that is offloaded.

        Args:
            size: What it works on, for the error where memory runs out.
            clock: Gets the seconds, without those of moving models.
            timed_as: Their name; None: the phase's.
            is_evaluation: Whether remedies are those for evaluations.

        Raises:
            MemoryLimitError: Memory ran out inside.
        """
        with (
            out_of_memory_explained("evaluation" if is_evaluation else phase, size),
            self.offload.phase(phase),
            (clock or PhaseClock()).phase(timed_as or phase),
        ):
            yield


@contextmanager
def out_of_memory_explained(phase: MemoryPhase, size: str) -> Iterator[None]:
    """Turns whatever says that memory ran out inside into an error a user can act on.

    Other errors, and those that were explained further inside (a term's names it, with the prompt),
    go through unchanged.

    Args:
        size: What the phase works on.

    Raises:
        MemoryLimitError: Memory ran out inside.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, _EXPLAINED) or not is_out_of_memory(error):
            raise
        # What the failed frames hold is given back: saving what was learned needs the room.
        traceback.clear_frames(error.__traceback__)
        asked = asked_bytes(error)
        more = "" if asked is None else f"; {describe_bytes(asked)} more were asked for"
        raise MemoryLimitError(
            f"out of memory in the {phase} phase: {size}{more}. {_describe_remedy(phase)}. "
            "`glm-grpo plan` says what each phase takes, and with --memory which change suffices"
        ) from error


def sampling_size(batch: PromptBatch, policy: Policy) -> str:
    """What a rollout works on."""
    return (
        f"{len(batch.prompts)} prompts x {batch.group_size} images of {batch.height} x "
        f"{batch.width} pixels, {tokens_per_image(batch, policy)} tokens each"
    )


def decoding_size(batch: PromptBatch) -> str:
    """What decoding and scoring work on at a time."""
    return f"a group of {batch.group_size} images of {batch.height} x {batch.width} pixels"


def replay_size(batch: PromptBatch, policy: Policy, rows: int) -> str:
    """What replay, backward pass and reference work on at a time."""
    images = len(batch.prompts) * batch.group_size
    return (
        f"{min(rows, images)} of {images} images at a time, "
        f"{tokens_per_image(batch, policy)} tokens each and those of the prompt"
    )


def tokens_per_image(batch: PromptBatch, policy: Policy) -> int:
    """T."""
    has_preview = batch.num_sources == 0
    return policy.tokens_per_image(batch.height, batch.width, has_preview=has_preview)


def _describe_remedy(phase: MemoryPhase) -> str:
    remedy = _REMEDIES[phase]
    anew = f"in a new run {', then '.join(remedy.anew)}"
    if not remedy.going_on:
        return f"Lower, {anew}"
    return f"Lower or set {', then '.join(remedy.going_on)} (this run can go on with them); {anew}"


def peak_memory_bytes() -> int:
    """Of the accelerator since the step began; without one, of the process since it began."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def process_bytes() -> int:
    """Resident memory of this process and of all that it started, scorers among them.

    So that a leak is seen where the peak only ever grows. Memory that processes share counts once
    for each. One that ends while it is asked counts 0.
    """
    this = psutil.Process()
    return sum(_resident_bytes(process) for process in (this, *this.children(recursive=True)))


def _resident_bytes(process: psutil.Process) -> int:
    try:
        resident: int = process.memory_info().rss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
    return resident
