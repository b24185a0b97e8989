from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from glm_grpo.compare.comparison import (
    ComparedPicture,
    ComparedPrompt,
    ComparedRun,
    Comparison,
    Gain,
)
from glm_grpo.compare.page import spread, write_comparison

ReadPage = Callable[[Path], Any]
HOSTILE = '<script>alert(1)</script> " onload=x {{ 7 * 7 }}'


def make_run(name: str) -> ComparedRun:
    return ComparedRun(name, {}, (0, 1), (0.0, 1.0), Gain(1.0, 1.0, 1.0), None, {"ocr": 1.0})


def make_prompt(
    folder: Path, prompt_id: str, *totals: tuple[float, ...], **changes: Any
) -> ComparedPrompt:
    """`totals`: for each sample that of the untrained model, then that of every run."""
    samples = tuple(
        tuple(
            ComparedPicture(
                path=folder / f"{prompt_id}-{sample}-{column}.png",
                total=total,
                scores={"ocr": total / 2, "lpips": None},
            )
            for column, total in enumerate(row)
        )
        for sample, row in enumerate(totals)
    )
    for picture in (picture for row in samples for picture in row):
        Image.new("RGB", (16, 8), (0, 128, 255)).save(picture.path)
    values = {"prompt": f"prompt {prompt_id}", "texts": (), "target": None, **changes}
    return ComparedPrompt(prompt_id=prompt_id, samples=samples, **values)


def compare(*prompts: ComparedPrompt) -> Comparison:
    return Comparison(
        weights={"ocr": 1.0},
        prompts=len(prompts),
        samples_per_prompt=1,
        runs=(make_run("a"), make_run("b")),
        untrained={"ocr": 0.0},
        trade_offs=(),
        left_out=(),
        side_by_side=prompts,
    )


def write(comparison: Comparison, tmp_path: Path) -> Path:
    return write_comparison(comparison, tmp_path / "page", has_samples=True)


def test_spread_is_between_the_mean_totals_of_runs(tmp_path: Path) -> None:
    # Means of the runs 0.5 and 0.25; the untrained model does not count.
    prompt = make_prompt(tmp_path, "a", (9.0, 0.25, 0.5), (9.0, 0.75, 0.0))
    assert spread(prompt) == 0.25


def test_page_shows_prompts_on_which_runs_differ_most_first(
    tmp_path: Path, read_page: ReadPage
) -> None:
    same = make_prompt(tmp_path, "same", (0.0, 0.5, 0.5))
    worse = make_prompt(tmp_path, "worse", (0.0, 0.5, 0.25))
    better = make_prompt(tmp_path, "better", (0.0, 0.5, 1.0))
    page = read_page(write(compare(same, worse, better), tmp_path))
    shown = [text for text in page.texts if text.startswith("prompt ")]
    assert shown == ["prompt better", "prompt worse", "prompt same"]


def test_page_holds_every_score_against_that_of_the_first_run(
    tmp_path: Path, read_page: ReadPage
) -> None:
    prompt = make_prompt(tmp_path, "a", (0.25, 0.5, 1.0))
    page = read_page(write(compare(prompt), tmp_path))
    assert page.after("prompt a", 20) == [
        *("total", "0.250", "ocr", "0.125", "lpips", "does not apply"),
        *("total", "0.500", "ocr", "0.250", "lpips", "does not apply"),
        *("total", "1.000", "+0.500", "ocr", "0.500", "+0.250", "lpips", "does not apply"),
    ]
    assert page.texts.count("1: a") == page.texts.count("2: b") == 1


@pytest.mark.parametrize(
    ("total", "expected"), [(1.0, ["better"]), (0.25, ["worse"]), (0.5, []), (0.5001, [])]
)
def test_page_colours_totals_that_differ(
    total: float, expected: list[str], tmp_path: Path, read_page: ReadPage
) -> None:
    page = read_page(write(compare(make_prompt(tmp_path, "a", (0.0, 0.5, total))), tmp_path))
    assert [span["class"] for span in page.all("span") if "class" in span] == expected


def test_page_has_a_row_for_each_sample_and_the_target_once(
    tmp_path: Path, read_page: ReadPage
) -> None:
    target = tmp_path / "target.png"
    Image.new("RGB", (16, 8)).save(target)
    rows = ((0.0, 0.5, 0.5), (0.25, 0.75, 0.75))
    prompt = make_prompt(tmp_path, "a", *rows, target=target, texts=("DOG",))
    path = write(compare(prompt), tmp_path)
    page = read_page(path)
    shown = {name: alt for name, alt in page.alternatives().items() if "pictures/" in str(name)}
    assert shown == {
        "pictures/a-target.webp": "Target of prompt 1",
        "pictures/a-0-0.webp": "Untrained, prompt 1, sample 1",
        "pictures/a-0-1.webp": "Run 1, prompt 1, sample 1",
        "pictures/a-0-2.webp": "Run 2, prompt 1, sample 1",
        "pictures/a-1-0.webp": "Untrained, prompt 1, sample 2",
        "pictures/a-1-1.webp": "Run 1, prompt 1, sample 2",
        "pictures/a-1-2.webp": "Run 2, prompt 1, sample 2",
    }
    assert "DOG" in page.texts
    files = {str(file.relative_to(path.parent)) for file in path.parent.rglob("*.webp")}
    assert files == set(shown)


def test_page_needs_nothing_outside_its_folder(tmp_path: Path, read_page: ReadPage) -> None:
    path = write(compare(make_prompt(tmp_path, "a", (0.0, 0.5, 0.5))), tmp_path)
    for link in read_page(path).linked():
        assert (path.parent / str(link)).resolve().is_relative_to(path.parent.resolve())
        assert (path.parent / str(link)).is_file()
    with Image.open(path.parent / "pictures/a-0-0.webp") as image:
        # Small pictures lose nothing.
        assert (image.size, image.convert("RGB").getpixel((3, 3))) == ((16, 8), (0, 128, 255))


def test_pictures_are_shrunk_to_the_size_of_thumbnails(tmp_path: Path, read_page: ReadPage) -> None:
    prompt = make_prompt(tmp_path, "a", (0.0, 0.5, 0.5))
    Image.new("RGB", (1024, 512)).save(prompt.samples[0][1].path)
    page = read_page(write(compare(prompt), tmp_path))
    (image,) = (image for image in page.all("img") if image["src"] == "pictures/a-0-1.webp")
    assert (image["width"], image["height"]) == ("384", "192")
    assert "class" not in image


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"no picture")])
def test_page_says_where_a_picture_is_missing(
    damage: Callable[[Path], Any], tmp_path: Path, read_page: ReadPage
) -> None:
    prompt = make_prompt(tmp_path, "a", (0.0, 0.5, 0.5), target=tmp_path / "gone.png")
    damage(prompt.samples[0][2].path)
    page = read_page(write(compare(prompt), tmp_path))
    # The target and the second run's.
    assert page.texts.count("Picture missing") == 2
    assert page.after("Picture missing", 2) == ["total", "0.500"]


def test_page_without_samples_copies_no_picture(tmp_path: Path, read_page: ReadPage) -> None:
    comparison = compare(make_prompt(tmp_path, "a", (0.0, 0.5, 0.5)))
    path = write_comparison(comparison, tmp_path / "page", has_samples=False)
    assert "Held-out prompts, side by side" not in read_page(path).texts
    assert not (path.parent / "pictures").exists()


def test_page_keeps_hostile_prompts_as_text(tmp_path: Path, read_page: ReadPage) -> None:
    prompt = make_prompt(tmp_path, "a", (0.0, 0.5, 0.5), prompt=HOSTILE, texts=(HOSTILE,))
    page = read_page(write(compare(prompt), tmp_path))
    assert page.texts.count(HOSTILE) == 2
    assert page.all("script") == []


def test_prompt_ids_that_are_no_file_names_do_not_leave_the_folder(tmp_path: Path) -> None:
    prompt = make_prompt(tmp_path, "a", (0.0, 0.5, 0.5))
    hostile = ComparedPrompt("../../x", prompt.prompt, (), None, prompt.samples)
    path = write(compare(hostile), tmp_path)
    assert len(list((path.parent / "pictures").iterdir())) == 3
