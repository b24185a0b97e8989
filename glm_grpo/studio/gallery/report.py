"""Write a page of tables and images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from glm_grpo.run.figures import Table
from glm_grpo.run.folder import write_atomically
from glm_grpo.studio.gallery.pages import render_page
from glm_grpo.studio.gallery.readings import Mark

SMALL_WIDTH = 256
"""Narrower images (pixels) are enlarged on a page with sharp edges."""


@dataclass(frozen=True)
class Tile:
    """An image with a caption.

    Attributes:
        source: Address relative to the page; None if the image is missing.
        link: Target of a click; None: the image itself.
        is_small: Enlarged with sharp edges.
        scores: Name and figure of each line.
        texts: Texts that should appear.
        readings: Readings of OCR terms by name, in pieces that are right or wrong.
        asked: Objects that should appear, in words.
        found: Objects that terms found, by name, in pieces that are right or wrong.
    """

    label: str
    source: str | None
    link: str | None = None
    is_small: bool = False
    scores: tuple[tuple[str, str], ...] = ()
    texts: tuple[str, ...] = ()
    readings: Mapping[str, tuple[Mark, ...]] = field(default_factory=dict)
    asked: tuple[str, ...] = ()
    found: Mapping[str, tuple[Mark, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptTiles:
    """Images of one prompt or subject; `texts` are those that should appear in them."""

    prompt: str
    tiles: tuple[Tile, ...]
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """A page: tables, then images below a sentence about them."""

    title: str
    tables: Sequence[Table]
    prompts: Sequence[PromptTiles] = ()
    about_prompts: str = ""


def write_report(report: Report, directory: Path) -> Path:
    """Write `index.html`, which needs no network, no server and no script; returns its path."""
    path = directory / "index.html"
    write_atomically(path, render_page("report.html.j2", report=report))
    return path
