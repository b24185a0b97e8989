"""The page on before and after, as a browser lays it out."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Locator, Page, expect

from glm_grpo.gallery import write_gallery
from glm_grpo.gallery.data import SummaryRow
from glm_grpo.run.folder import RunFolder
from tests.browser.conftest import OpenGallery

SUMMARY = (SummaryRow("total", before=0.5, after=0.75, difference=0.25, low=0.125, high=0.375),)
WIDTH = 360


@pytest.fixture
def run(gallery_run: RunFolder, tmp_path: Path) -> RunFolder:
    """The common run with a row of scores before and after."""
    shutil.copytree(gallery_run.path, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    write_gallery(folder, SUMMARY)
    return folder


def open_report(open_gallery: OpenGallery, run: RunFolder, scheme: str) -> Page:
    viewport = {"width": WIDTH, "height": 740}
    page = open_gallery(run=run, viewport=viewport, color_scheme=scheme)
    page.get_by_role("navigation").get_by_role("link", name="Before and after").click()
    page.wait_for_url("**/gallery/report.html")
    expect(page.get_by_role("heading", name="What changed")).to_be_visible()
    return page


def edge_colours(region: Locator) -> list[tuple[int, ...]]:
    """The colours at the left and at the right edge, just above the lower one."""
    picture = Image.open(io.BytesIO(region.screenshot())).convert("RGB")
    low = picture.height - 8
    return [picture.getpixel((x, low)) for x in (1, picture.width - 2)]  # type: ignore[misc]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report_shades_the_edge_to_which_a_table_goes_on(
    open_gallery: OpenGallery, run: RunFolder, scheme: str
) -> None:
    page = open_report(open_gallery, run, scheme)
    region = page.get_by_role("region", name="Scores before and after")
    start = edge_colours(region)
    region.evaluate("region => { region.scrollLeft = region.scrollWidth; }")
    end = edge_colours(region)
    ground = start[0]
    assert start[1] != ground
    assert end[0] != ground
    assert end[1] == ground


def test_report_breaks_command_lines(open_gallery: OpenGallery, run: RunFolder) -> None:
    page = open_report(open_gallery, run, "light")
    commands = page.get_by_role("region", name="Commands")
    assert commands.evaluate("pre => pre.scrollWidth === pre.clientWidth")
    # Each stays one line of text.
    assert commands.inner_text().splitlines() == [
        "glm-grpo train --config-dir again run_dir=again/run "
        "hydra.run.dir=. hydra.output_subdir=null",
        "glm-grpo compare RUN again/run",
    ]
    assert page.evaluate("document.documentElement.scrollWidth") == WIDTH


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report_passes_axe(
    open_gallery: OpenGallery,
    run: RunFolder,
    find_violations: Callable[[Page], list[str]],
    scheme: str,
) -> None:
    assert find_violations(open_report(open_gallery, run, scheme)) == []
