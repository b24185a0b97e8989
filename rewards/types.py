"""Data types of the reward side, in the order in which they are passed on.

Axes: P prompts, G images per prompt, R reward terms, H W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtyping import Bool, Float32, UInt8
from torch import Tensor

from rewards.score_map import ScoreBoxes, ScoreMap


class RewardError(RuntimeError):
    """A term could not score; the message names term, prompt and image. Never becomes a number.

    Attributes:
        images: Those that it could not score; None if there were none yet.
    """

    def __init__(self, message: str, *, images: UInt8[Tensor, "G 3 H W"] | None = None) -> None:
        super().__init__(message)
        self.images = images


def describe_error(error: BaseException) -> str:
    """Text of an error, with its type unless it is a `RewardError`; never empty.

    For an error without a message, uses the error that caused it.
    """
    said, kind = str(error), type(error).__name__
    if said:
        return said if isinstance(error, RewardError) else f"{kind}: {said}"
    return kind if error.__cause__ is None else f"{kind} from {describe_error(error.__cause__)}"


@dataclass(frozen=True)
class Prompt:
    """One prompt with everything that a reward may need.

    Attributes:
        prompt_id: Unique and stable within a data set; names the prompt in tables and galleries.
        prompt: Caption that the policy is conditioned on.
        texts: Texts that should appear in the image, in any order; may be empty.
        target: Image to match, already at the size of the rollout, or None.
        sources: Images to edit, at the size of the rollout; empty for text-to-image.
        metadata: Further columns of its row, by name, as JSON values, such as the `tag` of a
            benchmark.
    """

    prompt_id: str
    prompt: str
    texts: tuple[str, ...] = ()
    target: UInt8[Tensor, "3 H W"] | None = None
    sources: tuple[UInt8[Tensor, "3 H W"], ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Refuse a text, which would be taken for a tuple of letters, and a row without names."""
        if isinstance(self.texts, str):
            raise ValueError(f"texts must be a tuple; write texts=({self.texts!r},)")
        if not isinstance(self.metadata, Mapping):
            raise ValueError(
                f"metadata is {self.metadata!r:.100}; it must be a mapping, such as "
                "metadata={'include': [{'class': 'dog', 'count': 1}]}, or be left out"
            )


@dataclass(frozen=True)
class Scores:
    """A term's scores of N images.

    Attributes:
        values: Scores; higher is better. A list instead of a tensor may have None for an image
            that the term refuses to score, such as one about which a judge gives no number.
        notes: The term's findings on each image, for people: the text that OCR read, the answer
            of a judge. Empty if the term has none.
        score_map: What each place of each image earned of its score: a map of any resolution, or
            boxes with values. They add up to the score; what is missing belongs to the whole
            image. None: the term does not say.
        objects: Objects that were found in each image, in words, such as `2 red car`, for people.
            Empty if the term looks for none.
    """

    values: Float32[Tensor, " N"] | Sequence[float | None]
    notes: tuple[str, ...] = ()
    score_map: ScoreMap | None = None
    objects: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class RewardTable:
    """Raw scores of every term, with their weights, so that they can be reweighted offline.

    Attributes:
        names: One name per term, in the order of the R axis.
        raw: Scores as returned by the terms, higher is better; 0 if a term does not apply
            (null in stored tables), NaN if it applies but refused the image.
        is_applicable: True where a term applies to a prompt.
        std_floors: Smallest divisor of each term under `normalize_then_sum`, in units of its score,
            > 0.
        notes: Notes on the images by term name: a tuple per prompt, with one note per image, or
            empty if the term does not apply. Terms without notes have no entry.
        score_map: What each place of a grid earned of the raw scores, by term name; 0 for prompts
            to which the term does not apply. The places add up to the score, except for what
            belongs to the whole image or to boxes with a kind. Terms that do not say have no
            entry.
        kind_map: What boxes with a kind earned, less the mean of their kind in the group
            (`like_with_like`), on the same grid. Terms without such boxes have no entry.
        score_boxes: Boxes from which both maps were drawn, by term name: for each prompt those of
            each image, or empty if the term does not apply. Terms without boxes have no entry.
        objects: Objects that were found, in words, by term name: for each prompt those of each
            image, or empty if the term does not apply. Terms that look for none have no entry.
    """

    names: tuple[str, ...]
    raw: Float32[Tensor, "P G R"]
    is_applicable: Bool[Tensor, "P R"]
    weights: Float32[Tensor, " R"]
    std_floors: Float32[Tensor, " R"]
    notes: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    score_map: Mapping[str, Float32[Tensor, "P G h w"]] = field(default_factory=dict)
    kind_map: Mapping[str, Float32[Tensor, "P G h w"]] = field(default_factory=dict)
    score_boxes: Mapping[str, tuple[ScoreBoxes, ...]] = field(default_factory=dict)
    objects: Mapping[str, tuple[tuple[tuple[str, ...], ...], ...]] = field(default_factory=dict)

    def without_places(self) -> RewardTable:
        """The same scores, without what their parts earned."""
        return replace(self, score_map={}, kind_map={}, score_boxes={})

    def is_refused(self) -> Bool[Tensor, "P G R"]:
        """Whether a term that applies to the prompt of an image refused to score it."""
        return self.raw.isnan() & self.is_applicable[:, None, :]
