from __future__ import annotations

import io

from rich.console import Console

from glm_grpo.run.figures import Table, show_change


def test_table_prints_what_users_wrote_as_text() -> None:
    console = Console(width=80, file=io.StringIO())
    table = Table("a [b]title[/b]", ("[red]term", "\x1b[1m"), (("[red]x", "1"),), "note [b]")
    console.print(table)
    text = console.file.getvalue()
    for words in ("a [b]title[/b]", "[red]term", "\\x1b[1m", "[red]x", "note [b]"):
        assert words in text, words


def test_a_change_is_the_difference_of_what_is_shown() -> None:
    assert show_change(0.5, 0.75) == "+0.250"
    # Shown as 0.994 and 0.993, though they differ by less than half a thousandth.
    assert show_change(0.9936, 0.9933) == "-0.001"
