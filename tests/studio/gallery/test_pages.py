from __future__ import annotations

import re

import jinja2
import pytest

from glm_grpo.run.figures import Table
from glm_grpo.studio.gallery.pages import render_page
from glm_grpo.studio.gallery.report import Report


def report(title: str) -> Report:
    return Report(title, [Table("a table", ("term",), (("ocr",),))])


def test_render_keeps_markup_among_the_values_as_text() -> None:
    page = render_page("report.html.j2", report=report("<b> & {{ 7 * 7 }}")).decode()
    assert "<h1>&lt;b&gt; &amp; {{ 7 * 7 }}</h1>" in page


def test_render_refuses_a_value_that_is_missing() -> None:
    with pytest.raises(jinja2.UndefinedError, match="'report' is undefined"):
        render_page("report.html.j2")


def test_render_leaves_no_lines_of_blocks_and_defines_every_colour_for_both_grounds() -> None:
    page = render_page("report.html.j2", report=report("a page")).decode()
    assert page.startswith("<!DOCTYPE html>\n<html")
    # The rows of a table follow each other without the lines that the loop stood on.
    assert '<tbody>\n<tr><th scope="row">ocr</th>' in page
    light, dark = re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    used = set(re.findall(r"var\((--\w+)\)", page))
    for definitions in (light, dark):
        assert used <= set(re.findall(r"(--\w+):", definitions))


def test_rows_without_a_name_have_no_empty_heading() -> None:
    table = Table("a table", ("score", "model"), (("ocr", "base"), ("", "step 2")))
    page = render_page("report.html.j2", report=Report("a page", [table])).decode()
    assert "<tr><td></td><td>step 2</td>" in page.replace("\n", "")
    assert page.count('<th scope="row">') == 1
