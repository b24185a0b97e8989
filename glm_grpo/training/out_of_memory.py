"""Out of memory: says in which phase, on which sizes, and which keys to change."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from glm_grpo.errors import MemoryLimitError, PeerError
from glm_grpo.models.glm_image.token_grid import token_layout
from glm_grpo.terminal import describe_bytes
from glm_grpo.types import PromptBatch
from rewards.out_of_memory import asked_bytes, is_out_of_memory
from rewards.types import RewardError

MemoryPhase = Literal["loading", "rollout", "decode", "reward", "update", "evaluation", "records"]
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


@contextmanager
def out_of_memory_explained(phase: MemoryPhase, size: str) -> Iterator[None]:
    """Turns whatever says that memory ran out inside into an error a user can act on.

    Other errors, and those that were explained further inside (a term's names it, with the prompt),
    go through unchanged.

    Args:
        phase: Of the step.
        size: What the phase works on.

    Raises:
        MemoryLimitError: Memory ran out inside.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, _EXPLAINED) or not is_out_of_memory(error):
            raise
        # What the failed frames hold is given back: whoever saves what was learnt needs the room.
        traceback.clear_frames(error.__traceback__)
        asked = asked_bytes(error)
        more = "" if asked is None else f"; {describe_bytes(asked)} more were asked for"
        raise MemoryLimitError(
            f"out of memory in the {phase} phase: {size}{more}. {_describe_remedy(phase)}. "
            "`glm-grpo plan` says what each phase takes, and with --memory which change suffices"
        ) from error


def sampling_size(batch: PromptBatch) -> str:
    """What a rollout works on."""
    tokens = token_layout(batch.height, batch.width).num_tokens
    return (
        f"{len(batch.prompts)} prompts x {batch.group_size} images of {batch.height} x "
        f"{batch.width} pixels, {tokens} tokens each"
    )


def drawing_size(batch: PromptBatch) -> str:
    """What decoding and scoring work on at a time."""
    return f"a group of {batch.group_size} images of {batch.height} x {batch.width} pixels"


def replay_size(batch: PromptBatch, rows: int) -> str:
    """What replay, backward pass and reference work on at a time."""
    images = len(batch.prompts) * batch.group_size
    tokens = token_layout(batch.height, batch.width).num_tokens
    return (
        f"{min(rows, images)} of {images} images at a time, {tokens} tokens each and those of the "
        "prompt"
    )


def _describe_remedy(phase: MemoryPhase) -> str:
    remedy = _REMEDIES[phase]
    anew = f"in a new run {', then '.join(remedy.anew)}"
    if not remedy.going_on:
        return f"Lower, {anew}"
    return f"Lower or set {', then '.join(remedy.going_on)} (this run can go on with them); {anew}"
