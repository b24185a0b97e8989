from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from glm_grpo.gallery.report import Table, change_cell, copy_tile


def test_table_prints_what_users_wrote_as_text() -> None:
    console = Console(width=80, file=io.StringIO())
    table = Table("a [b]title[/b]", ("[red]term", "\x1b[1m"), (("[red]x", "1"),), "note [b]")
    console.print(table)
    text = console.file.getvalue()
    for words in ("a [b]title[/b]", "[red]term", "\\x1b[1m", "[red]x", "note [b]"):
        assert words in text, words


def test_change_is_coloured_where_its_interval_leaves_out_zero() -> None:
    assert str(change_cell(0.5, 0.75, 0.125, 0.375)) == "+0.250"
    # Shown as 0.994 and 0.993, though they differ by less than half a thousandth.
    assert str(change_cell(0.9936, 0.9933, -0.01, 0.01)) == "-0.001"
    tones = [change_cell(0.0, 0.0, *ends).tone for ends in ((0.1, 0.2), (-0.2, -0.1), (0.0, 0.1))]
    assert tones == ["better", "worse", ""]


def test_tile_of_a_damaged_picture_has_no_source(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no picture")
    assert copy_tile(tmp_path / "a.png", tmp_path, "a", "target").source is None
