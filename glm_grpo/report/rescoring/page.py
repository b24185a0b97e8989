"""The change by other weights, for the terminal and as a contact sheet."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.table import Table
from rich.text import Text

from glm_grpo.errors import StorageError
from glm_grpo.output import printable
from glm_grpo.report.rescoring.rescore import SHOWN_DECIMALS, MovedImage, Rescoring
from glm_grpo.run.folder import RunFolder, is_read_only, read_picture, write_atomically

_ELSEWHERE = Path("outputs/rescore")
_TILE = 160
"""Width of a picture on the sheet, in pixels."""
_LINE = 18
"""Height of a line of text on the sheet, in pixels."""
_GAP = 6
"""Pixels between what is on the sheet."""
_BESIDE_PROMPT = 44
"""Characters of a table of images that its prompts do not have."""
_NARROWEST = 12
"""Characters of a prompt, in a terminal that has no room."""
_INK, _GROUND, _NO_PICTURE = "#1c1d21", "#ffffff", "#d5d6db"


def print_rescoring(console: Console, folder: RunFolder, rescoring: Rescoring) -> None:
    """Print what there is to say of a rescoring: groups, terms and images.

    Args:
        console: Where to.
        folder: The run.
    """
    console.print(_groups_table(rescoring))
    console.print(_terms_table(rescoring))
    for line in rescoring.rare_terms:
        console.print(Text(printable(line)), soft_wrap=True)
    for title, images in (
        ("images that gain most advantage", rescoring.gaining),
        ("images that lose most advantage", rescoring.losing),
    ):
        if not images:
            continue
        console.print(_images_table(title, images, width=console.width))
        # Beside the table, and whole however narrow the terminal: a path is there to be copied.
        for number, image in enumerate(images, start=1):
            line = printable(f"{number}  {folder.path / image.image}")
            console.print(Text(line), soft_wrap=True)
    if not rescoring.gaining and not rescoring.losing:
        console.print(f"no image changes its advantage by {10**-SHOWN_DECIMALS:g} or more")


def write_rescoring_sheet(folder: RunFolder, rescoring: Rescoring) -> Path | None:
    """Write `rescore/sheet.png`: the images that gain and those that lose most, numbered.

    A picture whose file is gone is drawn as a grey field. The sheet of a run that cannot be written
    to goes to `outputs/rescore/<name of the run>/`.

    Args:
        folder: The run.

    Returns:
        The path of the sheet; None where no image gains or loses, and nothing is written.

    Raises:
        StorageError: A picture cannot be read, or the sheet cannot be written.
    """
    rows = [
        (title, images)
        for title, images in (
            ("gain most advantage", rescoring.gaining),
            ("lose most advantage", rescoring.losing),
        )
        if images
    ]
    if not rows:
        return None
    drawn = [
        (title, [_draw_tile(folder, *pair) for pair in enumerate(images, start=1)])
        for title, images in rows
    ]
    content = io.BytesIO()
    _draw_sheet(drawn).save(content, format="PNG", optimize=True)
    path = folder.path / "rescore/sheet.png"
    try:
        write_atomically(path, content.getvalue())
    except StorageError as error:
        if not is_read_only(error):
            raise
        path = _ELSEWHERE / folder.path.resolve().name / path.name
        write_atomically(path, content.getvalue())
    return path


def _groups_table(rescoring: Rescoring) -> Table:
    table = Table(
        title=f"images {rescoring.images}, groups {rescoring.groups}, steps {rescoring.steps}",
        show_header=False,
    )
    table.add_column()
    table.add_column(justify="right")
    # `rescore` raises where this is not so.
    table.add_row("totals and advantages by the run's own weights", "as stored, to the bit")
    for change in rescoring.changes:
        table.add_row(Text(change.key), Text(f"{change.before} to {change.after}"))
    winners, groups = rescoring.changed_winners, rescoring.groups
    table.add_row("groups that change their winner", f"{winners} ({winners / groups:.1%})")
    tau = rescoring.rank_correlation
    counted = f"mean over {rescoring.ranked_groups} groups that are not flat"
    table.add_row(f"Kendall's tau-b inside groups, {counted}", "-" if tau is None else f"{tau:.3f}")
    table.add_row("flat groups", f"{rescoring.flat_before} to {rescoring.flat_after}")
    return table


def _terms_table(rescoring: Rescoring) -> Table:
    table = Table(title="share of the advantage's variance")
    table.add_column("term")
    for name in ("weight", "new weight", "share", "new share"):
        table.add_column(name, justify="right")
    for term in rescoring.terms:
        table.add_row(
            term.name,
            f"{term.weight_before:g}",
            f"{term.weight_after:g}",
            f"{term.share_before:.3f}",
            f"{term.share_after:.3f}",
        )
    return table


def _images_table(title: str, images: Sequence[MovedImage], *, width: int) -> Table:
    table = Table(title=title)
    for name in ("", "step", "advantage", "new advantage"):
        table.add_column(name, justify="right")
    table.add_column("prompt")
    for number, image in enumerate(images, start=1):
        table.add_row(
            str(number),
            str(image.step),
            _signed(image.advantage_before),
            _signed(image.advantage_after),
            # Text, not str: what a user wrote is no markup.
            Text(
                _without_middle(printable(image.prompt), max(_NARROWEST, width - _BESIDE_PROMPT)),
                overflow="ellipsis",
                no_wrap=True,
            ),
        )
    return table


def _without_middle(text: str, length: int) -> str:
    """Prompts of a set often begin alike, and differ at their ends."""
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


def _signed(advantage: float) -> str:
    return f"{advantage:+z.{SHOWN_DECIMALS}f}"


def _draw_tile(folder: RunFolder, number: int, image: MovedImage) -> Image.Image:
    path = folder.picture(image.image)
    # Not Path.is_file, which raises where a name is too long.
    if os.path.isfile(path):
        picture = _fit(read_picture(path))
    else:
        picture = Image.new("RGB", (_TILE, _TILE), _NO_PICTURE)
    tile = Image.new("RGB", (_TILE, picture.height + 2 * _LINE), _GROUND)
    tile.paste(picture)
    lines = (
        f"{number}  step {image.step}",
        f"{_signed(image.advantage_before)} to {_signed(image.advantage_after)}",
    )
    for index, line in enumerate(lines):
        _write(tile, (2, picture.height + index * _LINE), line)
    return tile


def _fit(picture: Image.Image) -> Image.Image:
    """Bring a picture to the width of a tile; the pixels of a small one stay sharp."""
    size = (_TILE, max(1, round(picture.height * _TILE / picture.width)))
    is_small = picture.width < _TILE
    resampling = Image.Resampling.NEAREST if is_small else Image.Resampling.LANCZOS
    return picture.resize(size, resampling)


def _draw_sheet(rows: Sequence[tuple[str, Sequence[Image.Image]]]) -> Image.Image:
    columns = max(len(tiles) for _, tiles in rows)
    heights = [_LINE + 2 * _GAP + max(tile.height for tile in tiles) for _, tiles in rows]
    sheet = Image.new("RGB", (_GAP + columns * (_TILE + _GAP), sum(heights)), _GROUND)
    top = 0
    for (title, tiles), height in zip(rows, heights, strict=True):
        _write(sheet, (_GAP, top + _GAP), title)
        for column, tile in enumerate(tiles):
            sheet.paste(tile, (_GAP + column * (_TILE + _GAP), top + _GAP + _LINE))
        top += height
    return sheet


def _write(image: Image.Image, place: tuple[int, int], line: str) -> None:
    ImageDraw.Draw(image).text(place, line, fill=_INK, font=ImageFont.load_default(size=13))
