"""Explain out-of-memory errors: what was at work, and the keys to change."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from glm_grpo.errors import MemoryLimitError, is_expected
from glm_grpo.models.adapted_policy import AdaptedPolicy
from glm_grpo.output import counted, describe_bytes
from glm_grpo.types import PromptBatch
from rewards.out_of_memory import asked_bytes, is_out_of_memory

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


def describe_sampling(batch: PromptBatch, policy: AdaptedPolicy) -> str:
    """Describe the work of a rollout."""
    return (
        f"{counted(len(batch.prompts), 'prompt')} x {counted(batch.group_size, 'image')} of "
        f"{batch.height} x {batch.width} pixels, {policy.tokens_per_image(batch)} tokens each"
    )


def describe_decoding(batch: PromptBatch) -> str:
    """Describe the work of decoding and scoring at a time."""
    images = counted(batch.group_size, "image")
    return f"a group of {images} of {batch.height} x {batch.width} pixels"


def describe_replay(batch: PromptBatch, policy: AdaptedPolicy, rows: int) -> str:
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
