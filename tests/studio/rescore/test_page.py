from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from glm_grpo.run.folder import RunFolder
from glm_grpo.studio.rescore.page import print_rescoring, write_rescoring
from glm_grpo.studio.rescore.rescore import MovedImage, Rescoring, SettingChange, TermChange

PROMPT = "[red]a sign[/red] that says CAT"


def moved(sample: int, before: float, after: float) -> MovedImage:
    image = f"images/step-000003/p0-{sample}.png"
    return MovedImage(3, "p0", PROMPT, sample, image, before, after)


RESCORING = Rescoring(
    changes=(SettingChange("reward.terms.ocr.weight", 0.3, 0.5),),
    steps=1,
    groups=8,
    images=32,
    changed_winners=2,
    rank_correlation=0.3333,
    ranked_groups=7,
    flat_before=1,
    flat_after=0,
    terms=(TermChange("ocr", 0.3, 0.5, 0.625, 0.75), TermChange("lpips", 0.4, 0.4, 0.375, 0.25)),
    gaining=(moved(1, -0.5, 1.25), moved(2, 0.0, 0.5)),
    losing=(moved(3, 1.5, -0.25),),
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run whose picture of sample s is grey of brightness 40 s, and half as high as wide."""
    folder = RunFolder(tmp_path / "run")
    folder.image_dir(3).mkdir(parents=True)
    for sample in range(1, 4):
        picture = Image.new("RGB", (64, 32), (40 * sample,) * 3)
        picture.save(folder.path / moved(sample, 0.0, 0.0).image)
    return folder


def printed(rescoring: Rescoring, folder: RunFolder, width: int = 140) -> str:
    console = Console(width=width, file=io.StringIO())
    print_rescoring(console, folder, rescoring)
    return console.file.getvalue()


def test_the_page_of_a_run_that_cannot_be_written_to_goes_elsewhere(
    folder: RunFolder, make_read_only: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_read_only(folder.path)
    monkeypatch.chdir(folder.path.parent)
    path = write_rescoring(folder, RESCORING)
    assert path == Path("outputs/rescore/run/index.html")
    assert (path.parent / "pictures/gain-1.webp").is_file()


def test_page_shows_what_changed_and_the_images_that_gain_and_lose(
    folder: RunFolder, read_page: Callable[[Path], Any]
) -> None:
    (folder.path / RESCORING.losing[0].image).unlink()
    path = write_rescoring(folder, RESCORING)
    page = read_page(path)
    assert path == folder.path / "rescore" / "index.html"
    assert page.after("reward.terms.ocr.weight", 1) == ["0.3 to 0.5"]
    assert page.alternatives() == {
        "pictures/gain-1.webp": f"1, step 3: {PROMPT}: gain most advantage",
        "pictures/gain-2.webp": f"2, step 3: {PROMPT}: gain most advantage",
    }
    assert page.after(f"2, step 3: {PROMPT}", 4) == ["before", "+0.00", "after", "+0.50"]
    assert page.after("Image missing", 5)[1:] == ["before", "+1.50", "after", "-0.25"]


def test_print_rescoring_says_what_was_found(folder: RunFolder) -> None:
    rare = "lpips (40% of the weight) applies to none of the 12 prompts that the run sampled"
    text = printed(replace(RESCORING, rare_terms=(rare,)), folder)
    for words in (
        "images 32, groups 8, steps 1",
        "as stored, to the bit",
        "0.3 to 0.5",
        "2 (25.0%)",
        "mean over 7 groups that are not flat",
        "0.333",
        "1 to 0",
        "0.625",
        "images that gain most advantage",
        "images that lose most advantage",
        "-0.50",
        "+1.25",
        # A user's text is no markup.
        PROMPT,
        rare,
    ):
        # Without the breaks of captions.
        assert words in " ".join(text.split()), words


def test_print_rescoring_leaves_out_what_is_not_there(folder: RunFolder) -> None:
    unranked = replace(RESCORING, gaining=(), losing=(), rank_correlation=None, ranked_groups=0)
    text = printed(unranked, folder)
    assert "most advantage" not in text
    assert "no advantage changes by 0.01 or more" in text
    assert "no advantage changes" not in printed(RESCORING, folder)
    (line,) = [line for line in text.splitlines() if "tau-b" in line]
    assert line.split("│")[2].strip() == "-"


def test_paths_are_whole_on_a_line_of_a_narrow_terminal(folder: RunFolder) -> None:
    long = replace(
        moved(4, 0.0, 1.0), prompt=9 * "word " + "OPEN", image=f"images/{30 * 'a '}p-[red].png"
    )
    lines = printed(replace(RESCORING, gaining=(long,)), folder, width=80).splitlines()
    assert f"images on the page: 2; the first: {folder.path / long.image}" in lines
    # Figures stay beside their prompt, whose middle is left out.
    (row,) = [line for line in lines if "+1.00" in line]
    assert row.startswith("│ 1  word word word wor…ord ")
    assert row.endswith("word OPEN │    3 │      4 │  +0.00 │ +1.00 │")
    assert len(row) <= 80


@pytest.mark.parametrize(("share", "shown"), [(-0.0004, "0.000"), (-0.0006, "-0.001")])
def test_a_share_is_below_0_where_it_is_shown_so(
    share: float, shown: str, folder: RunFolder
) -> None:
    terms = (TermChange("ocr", 0.3, 0.5, share, 1.0),)
    text = printed(replace(RESCORING, terms=terms), folder)
    (line,) = [line for line in text.splitlines() if line.startswith("│ ocr ")]
    assert line.split("│")[4].strip() == shown
    assert ("pulls against the total" in text) is (shown != "0.000")
