from __future__ import annotations

import re

import jinja2
import pytest

from glm_grpo.gallery.pages import render_page
from glm_grpo.report.compare.comparison import ComparedRun, Comparison, Gain

RUN = ComparedRun("a", {}, (0, 1), (0.0, 1.0), Gain(1.0, 1.0, 1.0), None, {"ocr": 1.0})
VALUES = {
    "comparison": Comparison({"ocr": 1.0}, 1, 1, (RUN, RUN), {"ocr": 0.0}, (), (), ()),
    "pictures": [],
    "labels": ("1: a", "2: a"),
    "side_by_side": (),
}


def test_render_keeps_markup_among_the_values_as_text() -> None:
    page = render_page("compare.html.j2", weights="<b> & {{ 7 * 7 }}", **VALUES).decode()
    assert "<strong>&lt;b&gt; &amp; {{ 7 * 7 }}</strong>" in page


def test_render_refuses_a_value_that_is_missing() -> None:
    with pytest.raises(jinja2.UndefinedError, match="'weights' is undefined"):
        render_page("compare.html.j2", **VALUES)


def test_render_leaves_no_lines_of_blocks_and_defines_every_colour_for_both_grounds() -> None:
    page = render_page("compare.html.j2", weights="ocr 1", **VALUES).decode()
    assert page.startswith("<!DOCTYPE html>\n<html")
    # The rows of a table follow each other without the lines that the loop stood on.
    assert '<tbody>\n<tr><th scope="row">1</th>' in page
    used = set(re.findall(r"var\((--\w+)\)", page))
    light, dark = re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    for definitions in (light, dark):
        assert used <= set(re.findall(r"(--\w+):", definitions))
