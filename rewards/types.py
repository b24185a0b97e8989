"""The data that travels through the reward side, in the order it travels.

Axes: P prompts, G images per prompt, R reward terms, H W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Bool, Float32, UInt8
from torch import Tensor


class RewardError(RuntimeError):
    """A term could not score: names term, prompt and image. Never turned into a number.

    Attributes:
        pictures: What it could not score; None where nothing was drawn.
    """

    def __init__(self, message: str, *, pictures: UInt8[Tensor, "G 3 H W"] | None = None) -> None:
        super().__init__(message)
        self.pictures = pictures


def describe_error(error: BaseException) -> str:
    """What an error says, with its type unless it is a `RewardError`; never nothing.

    Of an error without words, what it was raised from says more.
    """
    said, kind = str(error), type(error).__name__
    if said:
        return said if isinstance(error, RewardError) else f"{kind}: {said}"
    return kind if error.__cause__ is None else f"{kind} from {describe_error(error.__cause__)}"


@dataclass(frozen=True)
class Prompt:
    """One prompt with all that a reward may need of it.

    Attributes:
        prompt_id: Unique and stable within a data set; names the prompt in tables and galleries.
        prompt: The caption the policy is conditioned on.
        texts: The texts that should appear in the picture, in any order; empty where none is asked
            for.
        target: The picture to be matched, already at the size of the rollout, or None.
        sources: The pictures to be edited, at the size of the rollout; none for text-to-image.
    """

    prompt_id: str
    prompt: str
    texts: tuple[str, ...] = ()
    target: UInt8[Tensor, "3 H W"] | None = None
    sources: tuple[UInt8[Tensor, "3 H W"], ...] = ()


@dataclass(frozen=True)
class Scores:
    """What a term says of N pictures.

    Attributes:
        values: Higher is better.
        notes: What the term found in each picture, for people to look at: the text that OCR read,
            the answer of a judge. Empty where it has nothing to say.
    """

    values: Float32[Tensor, " N"]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RewardTable:
    """Raw scores of every term; weights stay beside them, so that weighing can be redone offline.

    Attributes:
        names: One name per term, the order of the R axis.
        raw: Scores as the terms return them, higher is better; 0 where a term does not apply
            (null in stored tables).
        is_applicable: True where a term applies to a prompt.
        weights: One weight per term.
        std_floors: Smallest divisor of each term under `normalize_then_sum`, in units of its
            score, > 0.
        notes: What a term found in each picture, by its name: a tuple for each prompt, with one
            note a picture, or empty where the term does not apply. Terms that say nothing have no
            entry.
    """

    names: tuple[str, ...]
    raw: Float32[Tensor, "P G R"]
    is_applicable: Bool[Tensor, "P R"]
    weights: Float32[Tensor, " R"]
    std_floors: Float32[Tensor, " R"]
    notes: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
