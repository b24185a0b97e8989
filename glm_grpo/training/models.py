"""The models of a run, and the phases of a step that use them.

During a phase, the models that it uses are on the accelerator and its seconds are counted. If
memory runs out, the error names the current sizes and the keys to change.
"""

from __future__ import annotations

import resource
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import psutil
import torch

from glm_grpo.errors import MemoryLimitError, is_expected
from glm_grpo.models.adapted_policy import AdaptedPolicy
from glm_grpo.models.base import Decoder, Policy
from glm_grpo.models.offload import Offload, Phase
from glm_grpo.output import counted, describe_bytes
from glm_grpo.types import PromptBatch
from rewards.out_of_memory import asked_bytes, is_out_of_memory
from rewards.score import Scorer

MemoryPhase = Literal[
    "loading", "sources", "rollout", "decode", "reward", "update", "evaluation", "records"
]
"""Phases with their own remedies; `records` is everything between the others."""

_OFFLOAD = ("offload=modules", "offload=modules_and_optimizer")
_IMAGE_SIZE = ("rollout.height", "rollout.width")


@dataclass(frozen=True)
class _Remedy:
    """Keys to change, those with the smallest effect first.

    Attributes:
        going_on: Keys that a resumed run may change.
        anew: Keys that make it a different run.
    """

    going_on: tuple[str, ...]
    anew: tuple[str, ...]


_REMEDIES: Mapping[MemoryPhase, _Remedy] = {
    "loading": _Remedy(_OFFLOAD, ("model.dtype=bfloat16",)),
    "sources": _Remedy(_OFFLOAD, _IMAGE_SIZE),
    "rollout": _Remedy(
        ("rollout.batch_size", *_OFFLOAD),
        ("rollout.prompts_per_step", "rollout.group_size", *_IMAGE_SIZE),
    ),
    "decode": _Remedy(("decode.batch_size", *_OFFLOAD), ("rollout.group_size", *_IMAGE_SIZE)),
    "reward": _Remedy(
        ("offload=modules", "reward.overlap=false"), ("rollout.group_size", *_IMAGE_SIZE)
    ),
    "update": _Remedy(
        (
            "train.micro_batch_size",
            "model.gradient_checkpointing=true",
            "offload=modules_and_optimizer",
        ),
        ("'model.adapter={rank: 32, alpha: 64.0}'", *_IMAGE_SIZE),
    ),
    "evaluation": _Remedy(
        ("rollout.batch_size", "decode.batch_size", *_OFFLOAD),
        ("eval.samples_per_prompt", "rollout.prompts_per_step", *_IMAGE_SIZE),
    ),
    "records": _Remedy((), ("rollout.prompts_per_step", "rollout.group_size", *_IMAGE_SIZE)),
}


@runtime_checkable
class Display(Protocol):
    """Receives progress notifications; implemented by the terminal."""

    def phase(self, name: str) -> None:
        """Begin a phase."""
        ...

    def count(self, done: int, total: int) -> None:
        """Report the progress of the current phase: tokens, prompts, scores or micro-batches."""
        ...

    def evaluating(self, done: int, total: int) -> None:
        """Report the number of evaluated held-out prompts; later phases belong to the next ones."""
        ...


class NoDisplay:
    """A display that shows nothing."""

    def phase(self, name: str) -> None:
        """Do nothing."""

    def count(self, done: int, total: int) -> None:
        """Do nothing."""

    def evaluating(self, done: int, total: int) -> None:
        """Do nothing."""


class PhaseClock:
    """Add up wall-clock seconds by phase; waits for the accelerator before reading the time.

    Only waits for the current stream, because reward terms work on their own streams meanwhile.

    Args:
        display: Display to notify when a phase begins; None: no display.
    """

    def __init__(self, display: Display | None = None) -> None:
        self._display = display or NoDisplay()
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside."""
        self._display.phase(name)
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def announce(self, name: str) -> None:
        """Notify the display of a phase, without timing it."""
        self._display.phase(name)

    def count(self, done: int, total: int) -> None:
        """Notify the display of the progress in the current phase."""
        self._display.count(done, total)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that a phase took elsewhere; this step need not have waited for them."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, and `step` for the whole time since the clock was created."""
        return {**self._seconds, "step": time.perf_counter() - self._started}


@dataclass(frozen=True)
class Models:
    """The models of a run.

    Attributes:
        decoder: Frozen decoder, with all denoising steps if it has any, as in evaluations.
    """

    policy: AdaptedPolicy
    decoder: Decoder
    scorer: Scorer
    offload: Offload

    def with_decode_steps(self, steps: int | None) -> Models:
        """The same models with another number of denoising steps; None: unchanged."""
        if steps is None:
            return self
        return replace(self, decoder=self.decoder.with_steps(steps))

    @contextmanager
    def phase(
        self,
        phase: Phase,
        work: str,
        clock: PhaseClock | None = None,
        *,
        is_evaluation: bool = False,
    ) -> Iterator[None]:
        """Keep on the accelerator what the phase uses, and nothing else that is offloaded.

        Args:
            work: Description of the work, for the error if memory runs out.
            clock: Records the seconds, without moving models.
            is_evaluation: Whether to give the remedies for evaluations.

        Raises:
            MemoryLimitError: Memory ran out inside.
        """
        with (
            out_of_memory_explained("evaluation" if is_evaluation else phase, work),
            self.offload.phase(phase),
            (clock or PhaseClock()).phase(phase),
        ):
            yield


@contextmanager
def out_of_memory_explained(phase: MemoryPhase, work: str) -> Iterator[None]:
    """Turn any out-of-memory error inside into one that a user can act on.

    Other errors, and those already explained (a term's error names it and the prompt, that of
    another process quotes it), pass through unchanged.

    Args:
        work: Description of the phase's work.

    Raises:
        MemoryLimitError: Memory ran out inside.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_expected(error) or not is_out_of_memory(error):
            raise
        # Free what the failed frames hold: saving the trained weights needs the memory.
        traceback.clear_frames(error.__traceback__)
        asked = asked_bytes(error)
        more = "" if asked is None else f"; {describe_bytes(asked)} more were requested"
        raise MemoryLimitError(
            f"out of memory in the {phase} phase: {work}{more}. {_describe_remedy(phase)}. "
            "`glm-grpo plan` shows what each phase takes, and with --memory which change is enough"
        ) from error


def describe_sampling(batch: PromptBatch, policy: Policy) -> str:
    """Describe the work of a rollout."""
    return (
        f"{counted(len(batch.prompts), 'prompt')} x {counted(batch.group_size, 'image')} of "
        f"{batch.height} x {batch.width} pixels, {policy.tokens_per_image(batch)} tokens each"
    )


def describe_decoding(batch: PromptBatch) -> str:
    """Describe the work of decoding and scoring at a time."""
    images = counted(batch.group_size, "image")
    return f"a group of {images} of {batch.height} x {batch.width} pixels"


def describe_replay(batch: PromptBatch, policy: Policy, rows: int) -> str:
    """Describe the work of replay, backward pass and reference at a time."""
    images = len(batch.prompts) * batch.group_size
    return (
        f"{min(rows, images)} of {counted(images, 'image')} at a time, "
        f"{policy.tokens_per_image(batch)} tokens each and those of the prompt"
    )


def _describe_remedy(phase: MemoryPhase) -> str:
    remedy = _REMEDIES[phase]
    anew = f"in a new run {', then '.join(remedy.anew)}"
    if not remedy.going_on:
        return f"Lower, {anew}"
    return (
        f"Lower or set {', then '.join(remedy.going_on)} (this run can continue with them); {anew}"
    )


def peak_memory_bytes() -> int:
    """Peak accelerator memory since the step began; without one, the process's since its start."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes, but bytes on macOS.
    return peak if sys.platform == "darwin" else peak * 1024


def process_bytes() -> int:
    """Resident memory of this process and its child processes, including scorers.

    It reveals leaks, which a peak that only grows does not. Memory shared by processes counts once
    for each. A process that ends during the query counts 0.
    """
    this = psutil.Process()
    return sum(_resident_bytes(process) for process in (this, *this.children(recursive=True)))


def _resident_bytes(process: psutil.Process) -> int:
    try:
        resident: int = process.memory_info().rss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
    return resident
