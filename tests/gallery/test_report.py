from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from glm_grpo.gallery.report import Axis, Plot, Series, Table, change_cell, copy_tile


def test_table_prints_what_users_wrote_as_text() -> None:
    console = Console(width=80, file=io.StringIO())
    table = Table("a [b]title[/b]", ("[red]term", "\x1b[1m"), (("[red]x", "1"),), "note [b]")
    console.print(table)
    text = console.file.getvalue()
    for words in ("a [b]title[/b]", "[red]term", "\\x1b[1m", "[red]x", "note [b]"):
        assert words in text, words


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        # A sixth of the range is 6.67, 0.167, 0.0083 and 0.33.
        (0.0, 40.0, [0, 10, 20, 30, 40]),
        (-0.1, 0.9, [0, 0.2, 0.4, 0.6, 0.8]),
        (0.91, 0.96, [0.91, 0.92, 0.93, 0.94, 0.95, 0.96]),
        (-1.0, 1.0, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_axis_has_a_few_round_ticks(low: float, high: float, ticks: list[float]) -> None:
    assert Axis("", low, high, 0, 1).ticks() == pytest.approx(ticks)


def test_plot_spans_all_its_points() -> None:
    series = (Series("1: a", ((0.0, 0.5), (10.0, 1.0))), Series("2: b", ((5.0, 1.5),)))
    plot = Plot("", "", "step", "total", series, untrained=(0.0, -0.5))
    # Margins of 8 %: 0.8 and 0.16. In units of the drawing, x goes from 44 to 348 and y, which
    # grows upwards, from 216 to 28.
    assert (plot.x.low, plot.x.high) == pytest.approx((-0.8, 10.8))
    assert (plot.y.low, plot.y.high) == pytest.approx((-0.66, 1.66))
    assert (plot.x.at(5.0), plot.y.at(0.5)) == (196.0, 122.0)
    # A single value stands in the middle.
    single = Plot("", "", "", "", (Series("", ((3.0, 7.0),)),))
    assert (single.x.at(3.0), single.y.at(7.0)) == (196.0, 122.0)


def test_change_is_coloured_where_its_interval_leaves_out_zero() -> None:
    assert str(change_cell(0.5, 0.75, 0.125, 0.375)) == "+0.250"
    # Shown as 0.994 and 0.993, though they differ by less than half a thousandth.
    assert str(change_cell(0.9936, 0.9933, -0.01, 0.01)) == "-0.001"
    tones = [change_cell(0.0, 0.0, *ends).tone for ends in ((0.1, 0.2), (-0.2, -0.1), (0.0, 0.1))]
    assert tones == ["better", "worse", ""]


def test_tile_of_a_damaged_picture_has_no_source(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no picture")
    assert copy_tile(tmp_path / "a.png", tmp_path, "a", "target").source is None
