"""Write a page of tables and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from glm_grpo.run.figures import Table
from glm_grpo.run.folder import write_atomically
from glm_grpo.studio.gallery.pages import render_page
from glm_grpo.studio.gallery.readings import Mark
from glm_grpo.studio.gallery.thumbnails import shrink

SMALL_WIDTH = 256
"""Narrower pictures (pixels) are enlarged on a page with sharp edges."""


@dataclass(frozen=True)
class Tile:
    """A picture with what is said about it.

    Attributes:
        label: What it is.
        source: Its address, relative to the page; None when the picture is gone.
        link: Where it leads to; None for the picture itself.
        is_small: Enlarged with sharp edges.
        scores: Name and figure of each line.
        texts: That were to appear.
        readings: What OCR terms read, by name, in pieces that are right or wrong.
    """

    label: str
    source: str | None
    link: str | None = None
    is_small: bool = False
    scores: tuple[tuple[str, str], ...] = ()
    texts: tuple[str, ...] = ()
    readings: Mapping[str, tuple[Mark, ...]] = field(default_factory=dict)


def copy_tile(
    path: Path,
    page_dir: Path,
    name: str,
    label: str,
    scores: tuple[tuple[str, str], ...] = (),
) -> Tile:
    """A tile of a small copy of a picture, `pictures/NAME.webp` beside the page.

    Raises:
        StorageError: The copy cannot be written.
    """
    thumbnail = shrink(path)
    if thumbnail is None:
        return Tile(label, None, scores=scores)
    source = f"pictures/{name}.webp"
    write_atomically(page_dir / source, thumbnail.content)
    return Tile(label, source, is_small=thumbnail.width < SMALL_WIDTH, scores=scores)


@dataclass(frozen=True)
class Pictures:
    """The pictures of one prompt, or of another subject.

    Attributes:
        texts: That should appear.
    """

    prompt: str
    tiles: tuple[Tile, ...]
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What a page shows, from top to bottom.

    Attributes:
        title: Title of the page.
        summary: Its first paragraphs.
        pictures: None or more.
        about_pictures: Above them.
    """

    title: str
    summary: tuple[str, ...]
    tables: Sequence[Table]
    pictures: Sequence[Pictures] = ()
    about_pictures: str = ""


def write_report(report: Report, directory: Path) -> Path:
    """Write `index.html` of a report, which needs no network, no server and no script.

    Args:
        directory: Made where it does not exist.

    Returns:
        The path of the page.

    Raises:
        StorageError: The page cannot be written.
    """
    path = directory / "index.html"
    write_atomically(path, render_page("report.html.j2", report=report))
    return path
