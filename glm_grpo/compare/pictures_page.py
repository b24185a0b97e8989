"""Pictures of several runs as rows of a page: the same prompt and seeds along each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from glm_grpo.compare.comparison import ComparedPicture, ComparedPrompt, Comparison
from glm_grpo.gallery.thumbnails import shrink
from glm_grpo.run.folder import safe_name, write_atomically

_FOLDER = "pictures"


@dataclass(frozen=True)
class Copy:
    """A picture that was copied beside the page.

    Attributes:
        name: Path relative to the page.
        width: Pixels.
        height: Pixels.
    """

    name: str
    width: int
    height: int


@dataclass(frozen=True)
class Cell:
    """One picture with its scores.

    Attributes:
        picture: None when the picture is gone.
        scores: The total first, then by term; None where the term does not apply.
        over_first: What the same scores are more than those of the first run; empty for the first
            run itself and for the untrained model.
    """

    picture: Copy | None
    scores: Mapping[str, float | None]
    over_first: Mapping[str, float]


@dataclass(frozen=True)
class Rows:
    """One prompt: a row for each sample.

    Attributes:
        prompt: The caption.
        texts: The texts that should appear.
        has_target: Whether the prompt has a target picture.
        target: None when there is none, or it is gone.
        samples: Cells of each sample: the untrained model, then every run.
    """

    prompt: str
    texts: tuple[str, ...]
    has_target: bool
    target: Copy | None
    samples: tuple[tuple[Cell, ...], ...]


def write_side_by_side(comparison: Comparison, directory: Path) -> tuple[Rows, ...]:
    """Copy the pictures of all runs, in a small size, beside a page that is to show them.

    Args:
        comparison: The runs.
        directory: Of the page; pictures go into a folder in it.

    Returns:
        The prompts on which runs differ most first, see `spread`.

    Raises:
        StorageError: A file cannot be written.
    """
    prompts = sorted(comparison.side_by_side, key=spread, reverse=True)
    return tuple(_write_rows(prompt, directory) for prompt in prompts)


def spread(prompt: ComparedPrompt) -> float:
    """How far runs differ: the largest mean total over the samples less the smallest."""
    _, *runs = zip(*prompt.samples, strict=True)
    means = [fmean(picture.total for picture in pictures) for pictures in runs]
    return max(means) - min(means)


def _write_rows(prompt: ComparedPrompt, directory: Path) -> Rows:
    stem = f"{_FOLDER}/{safe_name(prompt.prompt_id)}"
    target = prompt.target
    return Rows(
        prompt=prompt.prompt,
        texts=prompt.texts,
        has_target=target is not None,
        target=None if target is None else _copy(target, directory, f"{stem}-target.webp"),
        samples=tuple(
            _cells(pictures, directory, f"{stem}-{sample}")
            for sample, pictures in enumerate(prompt.samples)
        ),
    )


def _cells(pictures: Sequence[ComparedPicture], directory: Path, stem: str) -> tuple[Cell, ...]:
    _, first, *others = pictures
    references = (None, None, *(first for _ in others))
    return tuple(
        Cell(
            picture=_copy(picture.path, directory, f"{stem}-{column}.webp"),
            scores=_scores(picture),
            over_first={} if reference is None else _differences(picture, reference),
        )
        for column, (picture, reference) in enumerate(zip(pictures, references, strict=True))
    )


def _differences(picture: ComparedPicture, reference: ComparedPicture) -> dict[str, float]:
    others = _scores(reference)
    return {
        term: score - other
        for term, score in _scores(picture).items()
        if score is not None and (other := others[term]) is not None
    }


def _scores(picture: ComparedPicture) -> dict[str, float | None]:
    return {"total": picture.total, **picture.scores}


def _copy(path: Path, directory: Path, name: str) -> Copy | None:
    """A small copy beside the page; None where there is no whole picture."""
    thumbnail = shrink(path)
    if thumbnail is None:
        return None
    write_atomically(directory / name, thumbnail.content)
    return Copy(name, thumbnail.width, thumbnail.height)
