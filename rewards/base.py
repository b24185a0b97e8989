"""Protocol of a reward term, and helpers that most terms need."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Literal, Protocol, TypeGuard, runtime_checkable

import torch
from jaxtyping import Float32, UInt8
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from rewards.options import LONGEST_WAIT, MayChange, Options
from rewards.score_map import ScoreBox, ScoreBoxes, ScoreMap, is_placed_by_mean
from rewards.types import Prompt, RewardError, Scores
from rewards.user_functions import NamedFunction

Need = Literal["prompt", "text", "target", "source", "objects"]
"""Part of a prompt with which a term compares an image."""

Against = Literal["target", "source"]
"""Images of a prompt with which a term can compare: its target, or its first source."""

FLOAT32_BYTES = 4


class InvalidScoresError(RewardError):
    """A term returned something other than one finite number, or None, per image."""


@runtime_checkable
class Reward(Protocol):
    """A reward term: takes images and returns one score each; higher is better.

    A term that fails raises an error; it never returns a number instead. One that works, but cannot
    score a certain image, may refuse it: the image is then left out of its group.
    """

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt has what the term compares with.

        Raises:
            RewardError: It has, but the term could not score any image against it.
        """
        ...

    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"] | Sequence[float | None] | Scores:
        """Score N images, image i against prompt i; runs on the device of `modules()`.

        Args:
            prompts: N prompts to which the term applies; a prompt may occur several times.
            pixels: RGB, 0..255, on any device.

        Returns:
            One finite score per image, independent of the other images, or a list that has None
            for images that the term refuses; in `Scores` with notes, or with a score map that costs
            nothing.
        """
        ...

    def modules(self) -> tuple[nn.Module, ...]:
        """Networks that may be moved between devices while the term is idle; may be empty."""
        ...


class TermConfig(Options):
    """Options that every term has. A kind of term is a subclass in its own file."""

    compares_with: ClassVar[tuple[Need, ...]]
    """Parts of a prompt that the term uses; empty for a term that uses only the image."""

    files: ClassVar[tuple[str, ...]] = ()
    """Options that may name a local file; other values are names that a library knows."""
    folders: ClassVar[tuple[str, ...]] = ()
    """Options that may name a local folder; other values are hub ids."""
    is_on_cpu: ClassVar[bool] = False
    """Whether it always runs on the CPU, wherever the other terms run."""
    score_map: ClassVar[Literal["always", "never", "by function"]] = "never"
    """Whether it says which part of its score each place earned; a user's function may."""

    weight: float
    """Factor of the term's score in the reward; negative to push the score down. At 0 the score is
    shown but not rewarded; `reward.watch` makes such a term a canary."""
    std_floor: float = Field(default=1e-4, gt=0.0)
    """Smallest divisor when scores are standardised within a group (`normalize_then_sum`), in units
    of the score; a smaller spread counts as noise."""
    timeout_seconds: MayChange[float] = Field(default=600.0, gt=0.0, le=LONGEST_WAIT)
    """Seconds to score one group of images; after that the run stops, with everything saved."""
    prompt_ids: str = Field(default="*", min_length=1, max_length=200)
    """Glob over prompt ids, such as `poster-*`: apply the term only to these prompts, for instance
    to show it separately for each kind of prompt."""
    when: Literal["always", "evaluation"] = "always"
    """`evaluation`: score only the images of evaluations, which are few, to show the score beside
    the reward; the weight must be 0."""

    @model_validator(mode="before")
    @classmethod
    def _without_run_in(cls, values: Any) -> Any:
        """Drop `run_in: thread`, which runs stored when a term could also have its own process."""
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if (key, value) != ("run_in", "thread")}

    def needs(self) -> tuple[Need, ...]:
        """Parts of a prompt that this term uses."""
        return self.compares_with

    def users_function(self) -> NamedFunction | None:
        """Function of the user's that it calls, which may load anything; None: it calls none."""
        return None

    def judges(self) -> Mapping[str, str]:
        """What finds or reads things in images, such as a detector, and the package that runs it.

        An empty name stands for a package that is not known.
        """
        function = self.users_function()
        return {} if function is None else {function.name: ""}

    def has_score_map(self) -> bool:
        """Whether it may say which part of its score each place earned."""
        return self.score_map != "never"

    def check(self) -> None:
        """Check files and functions that it names, before a model is loaded.

        Raises:
            RewardError: One cannot be used.
        """

    def check_metadata(self, rows: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
        """Check what prompts ask for by further columns, before a model is loaded.

        Args:
            rows: Metadata of prompts, by what errors call each: its id, and where it comes from.

        Yields:
            Why the term, which applies to a prompt, could not score any image against it.

        Raises:
            RewardError: Files or functions that tell cannot be used.
        """
        yield from ()

    def scorer(self) -> str | None:
        """Identity of what scores in another process, to notice an exchange; None: nothing does.

        Raises:
            RewardError: It does not answer.
        """
        return None

    @abstractmethod
    def build(self, device: torch.device) -> Reward:
        """Build the term. Its libraries are imported here, since most configs use few terms.

        Raises:
            RewardError: Its weights are missing or do not match.
        """

    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes of its fp32 weights; 0 if they are remote or unknown.

        Raises:
            RewardError: It names a network that does not exist.
        """


class ComparingConfig(TermConfig):
    """Options of a term that compares an image with another one.

    A kind's first line says "target image"; `against` can change that.
    """

    against: Against = "target"
    """Image of the prompt to compare with: `target`, or `source` (the first one), which rewards
    an edit for what it keeps. Give such a term a small weight, because a perfect copy is not an
    edit."""

    @override
    def needs(self) -> tuple[Need, ...]:
        """The image to compare with, as configured."""
        return (self.against,)


class ComparingReward:
    """What terms share that compare an image with one of its prompt, and have no network."""

    def __init__(self, against: Against = "target") -> None:
        self._against: Against = against

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt has the image to compare with."""
        return compared_image(prompt, self._against) is not None

    def modules(self) -> tuple[nn.Module, ...]:
        """Empty."""
        return ()


@runtime_checkable
class PlacedReward(Reward, Protocol):
    """A term that can also say which part of its score each place of an image earned."""

    def score_with_map(self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> Scores:
        """Like `score`, with a score map; see `Scores.score_map`."""
        ...


@dataclass(frozen=True)
class CheckedScores:
    """Scores of N images that were checked; see `Scores`.

    Attributes:
        values: On the CPU, without gradient; NaN for images that the term refused.
    """

    values: Float32[Tensor, " N"]
    notes: tuple[str, ...] = ()
    score_map: ScoreMap | None = None
    objects: tuple[tuple[str, ...], ...] = ()


def score_checked(
    reward: Reward,
    prompts: Sequence[Prompt],
    pixels: UInt8[Tensor, "N 3 H W"],
    *,
    with_map: bool = False,
) -> CheckedScores:
    """Score N images, and check the result.

    Args:
        with_map: Whether to return its score map, if the term has one.

    Raises:
        InvalidScoresError: The result is not one finite float32 number or None, or not one note or
            list of objects, per image; or its score map is not finite, or not those of as many
            images.
    """
    # Gradients are disabled per thread; a user's own function may otherwise keep them.
    with torch.no_grad():
        # Of any type: a user's function may have returned it.
        found: object = (
            reward.score_with_map(prompts, pixels)
            if with_map and isinstance(reward, PlacedReward)
            else reward.score(prompts, pixels)
        )
    count = len(prompts)
    if not isinstance(found, Scores):
        return CheckedScores(_check_values(found, count=count))
    values = _check_values(found.values, count=count)
    notes = _check_notes(found.notes, count=count)
    score_map = _check_score_map(found.score_map, values) if with_map else None
    return CheckedScores(values, notes, score_map, _check_objects(found.objects, count=count))


def has_needs(prompt: Prompt, needs: Iterable[Need]) -> bool:
    """Whether a prompt has all needs of a scorer: a text that is not blank, a target, and so on."""
    has = {
        "prompt": True,
        "text": any(text.strip() for text in prompt.texts),
        "target": prompt.target is not None,
        "source": bool(prompt.sources),
        "objects": asks_for_objects(prompt.metadata),
    }
    return all(has[need] for need in needs)


def asks_for_objects(metadata: Mapping[str, object]) -> bool:
    """Whether a prompt's row says which objects its images should show, or should not."""
    return any(metadata.get(key) is not None for key in ("include", "exclude"))


def compared_image(prompt: Prompt, against: Against) -> UInt8[Tensor, "3 H W"] | None:
    """Image of a prompt to compare others with; None if it has none."""
    if against == "target":
        return prompt.target
    return prompt.sources[0] if prompt.sources else None


def stack_compared(
    prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"], against: Against = "target"
) -> UInt8[Tensor, "N 3 H W"]:
    """Stack the prompts' target images, or their first sources."""
    compared = []
    for prompt in prompts:
        found = compared_image(prompt, against)
        if found is None or found.shape != pixels.shape[1:]:
            raise ValueError(
                f"{against} of prompt {prompt.prompt_id} is "
                f"{'missing' if found is None else _size(found)}, the image {_size(pixels)}: "
                "both must have the same size"
            )
        compared.append(found)
    return torch.stack(compared)


def to_unit_range(
    pixels: UInt8[Tensor, "N 3 H W"], device: torch.device
) -> Float32[Tensor, "N 3 H W"]:
    """Move pixels to a device and scale them from 0..255 to 0..1."""
    return pixels.to(device).float() / 255


def _size(pixels: Tensor) -> str:
    height, width = pixels.shape[-2:]
    return f"{width} x {height}"


def _check_values(values: object, *, count: int) -> Float32[Tensor, " N"]:
    """The scores on the CPU; NaN for images that the term refused."""
    is_refused = torch.zeros(count, dtype=torch.bool)
    if _is_list_of_scores(values, count):
        is_refused = torch.tensor([value is None for value in values])
        numbers = [0.0 if value is None else float(value) for value in values]
        values = torch.tensor(numbers, dtype=torch.float32)
    if not isinstance(values, Tensor) or (values.shape, values.dtype) != ((count,), torch.float32):
        remedy = ", such as torch.tensor(scores, dtype=torch.float32)"
        if isinstance(values, Tensor):
            remedy = "; convert it with .float()" if values.shape == (count,) else ""
        raise InvalidScoresError(
            f"{_images(count)}: returned {_describe(values)}; a term must return torch.float32 of "
            f"shape ({count},), one number per image{remedy}, or a list of {count} numbers with "
            "None for images that it cannot score"
        )
    values = values.detach().cpu()
    for index in (~torch.isfinite(values)).nonzero().flatten().tolist():
        raise InvalidScoresError(
            f"image {index}: returned {values[index].item()}; a score must be a finite number. A "
            "term that fails must raise, and one that only cannot score this image may return a "
            "list with None in its place"
        )
    return values.masked_fill(is_refused, math.nan)


def _is_list_of_scores(values: object, count: int) -> TypeGuard[Sequence[float | None]]:
    return (
        isinstance(values, list | tuple)
        and len(values) == count
        and all(value is None or isinstance(value, Real) for value in values)
    )


def _check_notes(notes: Sequence[object], *, count: int) -> tuple[str, ...]:
    are_texts = not isinstance(notes, str) and all(isinstance(note, str) for note in notes)
    if not are_texts or len(notes) not in (0, count):
        raise InvalidScoresError(
            f"{_images(count)}: {len(notes)} notes are {notes!r:.100}; there must be a string per "
            "image, or none"
        )
    return tuple(map(str, notes))


def _check_objects(
    objects: Sequence[Sequence[object]], *, count: int
) -> tuple[tuple[str, ...], ...]:
    are_lists = all(isinstance(of_image, list | tuple) for of_image in objects)
    if not are_lists or len(objects) not in (0, count):
        raise InvalidScoresError(
            f"{_images(count)}: objects are {objects!r:.100}; there must be a list of strings per "
            "image, or none"
        )
    return tuple(tuple(map(str, of_image)) for of_image in objects)


def _check_score_map(found: object, values: Float32[Tensor, " N"]) -> ScoreMap | None:
    if found is None:
        return None
    # No place of a refused image earned anything.
    is_refused = values.isnan()
    if isinstance(found, Tensor) and found.ndim == 3 and found.dtype == torch.float32:
        if len(found) == len(values) and 0 not in found.shape:
            found = found.detach().cpu().masked_fill(is_refused[:, None, None], 0.0)
            return _check_map(found, values.nan_to_num())
    elif isinstance(found, list | tuple) and len(found) == len(values) and _are_boxes(found):
        refused = is_refused.tolist()
        kept = zip(found, refused, strict=True)
        return _check_boxes([() if is_left_out else each for each, is_left_out in kept])
    is_map = isinstance(found, Tensor) and found.ndim == 3 and found.dtype != torch.float32
    remedy = "; convert the map with .float()" if is_map else ""
    raise InvalidScoresError(
        f"{_images(len(values))}: score_map is {_describe(found)}; it must be a map, torch.float32 "
        f"of shape ({len(values)}, rows, columns), or a tuple of rewards.ScoreBox for each "
        f"image{remedy}"
    )


def _check_map(
    score_map: Float32[Tensor, "N h w"], values: Float32[Tensor, " N"]
) -> Float32[Tensor, "N h w"]:
    for image in (~torch.isfinite(score_map)).flatten(1).any(dim=1).nonzero().flatten().tolist():
        raise InvalidScoresError(
            f"image {image}: a part of its score is not finite; a place that earned nothing has 0"
        )
    if is_placed_by_mean(score_map, values):
        raise InvalidScoresError(
            f"{_images(len(values))}: the mean of the score map is the score, but its sum must be: "
            "divide it by the number of places, rows * columns"
        )
    return score_map


def _are_boxes(found: Sequence[object]) -> bool:
    return all(
        isinstance(boxes, list | tuple) and all(isinstance(each, ScoreBox) for each in boxes)
        for boxes in found
    )


def _check_boxes(found: Sequence[Sequence[ScoreBox]]) -> ScoreBoxes:
    checked = tuple(
        tuple(_check_box(box, image) for box in boxes) for image, boxes in enumerate(found)
    )
    edges = [max(each.right, each.bottom) for boxes in checked for each in boxes]
    if 0 < max(edges, default=0) <= 1:
        raise InvalidScoresError(
            f"{_images(len(found))}: no box ends after pixel 1; boxes are in pixels: "
            "multiply fractions of the image by its width and height"
        )
    return checked


def _check_box(box: ScoreBox, image: int) -> ScoreBox:
    # A user's numbers may be those of numpy or torch.
    value, left, top, right, bottom = (
        float(number) for number in (box.value, box.left, box.top, box.right, box.bottom)
    )
    is_finite = all(map(math.isfinite, (value, left, top, right, bottom)))
    if not is_finite or right < left or bottom < top:
        raise InvalidScoresError(
            f"image {image}: {box} is not finite, or ends before it begins; give pixels from the "
            "upper left corner, and leave out boxes without a value or a place"
        )
    text, kind = ("" if each is None else str(each) for each in (box.text, box.kind))
    return ScoreBox(value, left, top, right, bottom, text, kind)


def _describe(found: object) -> str:
    if isinstance(found, Tensor):
        return f"{found.dtype} of shape {tuple(found.shape)}"
    return f"a {type(found).__name__}, {found!r:.100}"


def _images(count: int) -> str:
    return "image 0" if count == 1 else f"images 0 to {count - 1}"
