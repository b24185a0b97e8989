"""What the pages say of the embedded model's prompts is what it was trained on."""

from __future__ import annotations

import itertools
import re

import pytest

from glm_grpo.tiny.world import COLOUR_PAIRS, SHAPES, Sign, caption
from tests.site.pages import PAGES, ROOT, WrittenFile, blocks, shell

START = (ROOT / "docs/start.md").read_text()


def row(name: str) -> list[str]:
    """The cell beside a name in the table of known words."""
    cell = re.search(rf"^\| {name} \| (.*) \|$", START, flags=re.MULTILINE)
    assert cell is not None
    return cell[1].split(", ")


def test_start_lists_the_colours_and_shapes_of_the_world() -> None:
    assert row("COLOURS") == [" on ".join(pair) for pair in COLOUR_PAIRS]
    assert row("SHAPE") == [*SHAPES]


def known(word: str) -> set[str]:
    """Every caption of a word."""
    choices = itertools.product(SHAPES, range(len(COLOUR_PAIRS)), (True, False))
    return {caption(Sign(word, *choice)) for choice in choices}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "prompts.txt <<" in (ROOT / page).read_text()]
)
def test_prompts_of_a_page_are_captions_of_the_world(page: str) -> None:
    written = [
        step
        for block in blocks(page)
        if block.language == "bash"
        for step in shell(block.text)
        if isinstance(step, WrittenFile)
    ]
    lines = [line for file in written for line in file.text.splitlines()]
    assert lines
    for line in lines:
        word = line.rpartition(' "')[2].removesuffix('"')
        assert line in known(word), line
        assert 3 <= len(word) <= 4
