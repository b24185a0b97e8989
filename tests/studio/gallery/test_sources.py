"""Source images of edits, in everything that is made of a run."""

from __future__ import annotations

import html
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from glm_grpo.config import compose_config, to_yaml
from glm_grpo.run.tables import read_table
from glm_grpo.studio.gallery import write_gallery
from glm_grpo.studio.gallery.contact_sheet import write_contact_sheet


def plain(value: int) -> torch.Tensor:
    return torch.full((3, 8, 8), value, dtype=torch.uint8)


@pytest.fixture
def edits(run: Any) -> Any:
    """Two steps and two evaluations of two edits, each of two sources."""
    run.prompts = tuple(
        replace(prompt, sources=(plain(50 + index), plain(80 + index)), target=plain(9))
        for index, prompt in enumerate(run.prompts)
    )
    for step in (1, 2):
        run.record_step(step)
    for step in (0, 2):
        run.record_evaluation(step)
    return run


def test_data_of_the_gallery_names_the_sources(edits: Any) -> None:
    write_gallery(edits.folder, ())
    evaluated, trained = edits.data("evaluation-000000"), edits.data("steps-000001")
    for groups, folder in (
        (evaluated["groups"], "sources"),
        (trained["steps"][0]["groups"], "train-sources"),
    ):
        assert groups[0]["sources"] == [f"{folder}/kite-0.png", f"{folder}/kite-1.png"]
        assert groups[1]["sources"] == [f"{folder}/b-0.png", f"{folder}/b-1.png"]
    stored = Image.open(edits.folder.path / "images" / "sources" / "b-1.png")
    assert np.array(stored).max() == 81


def test_report_shows_the_sources(edits: Any) -> None:
    write_gallery(edits.folder, ())
    page = (edits.gallery / "report.html").read_text()
    assert page.count("<figcaption>Source") >= 2
    assert "thumbs/sources/kite-0.webp" in page
    assert "sample=0&amp;large=1&amp;first=source" in page


def test_sheet_begins_with_a_row_for_each_source(edits: Any, tmp_path: Path) -> None:
    write_contact_sheet(edits.folder, tmp_path / "sheet.png", columns=2)
    pixels = np.array(Image.open(tmp_path / "sheet.png"))[..., 0]
    # 8 pixels, 4 between and around: two sources, the target, before and after, of both prompts.
    # Names of rows are to the left of them.
    assert pixels.shape[0] == 5 * 12
    names, pixels = pixels[:, : -2 * 12], pixels[:, -2 * 12 :]
    assert all((names[12 * row : 12 * (row + 1)] < 128).any() for row in range(5))
    assert [pixels[12 * row + 4, 4] for row in range(3)] == [50, 80, 9]
    assert pixels[4, 16] == 51


def test_text_to_image_stores_nothing_of_sources(run: Any) -> None:
    run.record_step(1)
    table = read_table(run.folder.rollout_path(1))
    assert not {"sources", "source_token_ids"} & {*table.column_names}
    assert not run.folder.train_sources_dir.exists()


def test_report_says_that_a_term_compares_with_the_source(
    make_run: Any, configs_dir: Path, tmp_path: Path
) -> None:
    run = make_run()
    overrides = ["reward.terms.ssim.against=source"]
    run.folder.config_path.write_text(to_yaml(compose_config(configs_dir, "tiny", overrides)))
    run.record_evaluation(0)
    write_gallery(run.folder, ())
    page = html.unescape((run.gallery / "report.html").read_text())
    assert "Structural similarity to the prompt's source image." in page
    assert "LPIPS to the prompt's target image, as 1 - distance." in page
