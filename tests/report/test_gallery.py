from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from glm_grpo.errors import StorageError
from glm_grpo.report.gallery import write_gallery
from glm_grpo.report.summary import SummaryRow
from glm_grpo.storage import RunFolder, write_atomically
from glm_grpo.tables import Weighing, weighing_metadata

VOID = {"meta", "link", "img", "br", "polyline"}
HOSTILE = '"><script>alert(1)</script>\' onerror="x" {{ 7 * 7 }} & שלום 🙂 ' + "w" * 5000
SUMMARY = (
    SummaryRow("ocr", before=0.5, after=0.75, difference=0.25, low=0.125, high=0.375),
    SummaryRow("lpips", before=0.5, after=0.25, difference=-0.25, low=-0.5, high=0.0625),
)


class Page(HTMLParser):
    """A strict reading of the page: every element that is opened is closed, in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(" ".join(data.split()))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def links(self) -> list[str]:
        """Everything the page would load or lead to."""
        return [
            value
            for _, attributes in self.elements
            for name, value in attributes.items()
            if name in {"src", "href", "srcset", "poster", "action", "data"} and value is not None
        ]


def store_picture(folder: RunFolder, path: str, width: int = 16) -> str:
    content = io.BytesIO()
    Image.new("RGB", (width, 8)).save(content, format="PNG")
    write_atomically(folder.path / path, content.getvalue())
    return path


def store_evaluation(
    folder: RunFolder, step: int, totals: dict[str, list[float]], **overrides: Any
) -> None:
    """An evaluation as the recorder stores it; `totals` by prompt id."""
    rows = [
        {
            "prompt_id": prompt_id,
            "prompt": prompt_id,
            "texts": [],
            "sample": sample,
            "raw/ocr": 0.5,
            "raw/lpips": None,
            "total": total,
            "note/ocr": "CAT",
            "target": None,
            "image": store_picture(folder, f"images/eval-{step:06d}/{index}-{sample}.png"),
            **overrides,
        }
        for index, (prompt_id, group) in enumerate(totals.items())
        for sample, total in enumerate(group)
    ]
    path = folder.evaluation_path(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(rows)
    metadata = weighing_metadata(Weighing({}, {}, "weighted_sum"))
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path)


def test_gallery_shows_the_first_and_the_last_samples_with_their_change(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    store_evaluation(folder, 0, {"a": [0.1, 0.3], "b": [0.9]})
    store_evaluation(folder, 5, {"a": [0.123, 0.123], "b": [0.123]})
    store_evaluation(folder, 10, {"a": [0.4, 0.5], "b": [0.7]})
    page = Page(write_gallery(folder, SUMMARY))
    texts = page.texts
    assert texts.count("Before, step 0") == texts.count("After, step 10") == 2
    # 0.45 - 0.2 and 0.7 - 0.9.
    assert "+0.250" in texts
    assert "-0.200" in texts
    # The evaluation in between is not shown.
    assert "0.123" not in texts
    assert len(page.all("img")) == 6
    assert ("Before, step 0, sample 2 of: a") in [image["alt"] for image in page.all("img")]


def test_gallery_shows_scores_text_read_and_what_does_not_apply(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    store_evaluation(folder, 0, {"a": [0.625]}, texts=["DOG"])
    texts = Page(write_gallery(folder, ())).texts
    start = texts.index("total")
    expected = ["total", "0.625", "ocr", "0.500", "lpips", "not scored", "ocr found", "CAT"]
    assert texts[start : start + 8] == expected
    assert texts[texts.index("Text to appear:") + 1] == "DOG"


@pytest.mark.parametrize("wanted", [[], ["DOG"], ["OPEN", "CAFÉ BAR"]])
def test_gallery_quotes_each_text_that_should_appear(wanted: list[str], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    store_evaluation(folder, 0, {"a": [0.5]}, texts=wanted)
    page = Page(write_gallery(folder, ()))
    assert len(page.all("q")) == len(wanted)
    assert page.texts.count("Text to appear:") == min(1, len(wanted))
    if wanted:
        start = page.texts.index("Text to appear:") + 1
        assert page.texts[start : start + len(wanted)] == wanted


@pytest.mark.parametrize(("note", "shown"), [("", ["ocr found", "nothing"]), (None, [])])
def test_gallery_tells_no_text_from_no_ocr(
    note: str | None, shown: list[str], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    store_evaluation(folder, 0, {"a": [0.5]}, **{"note/ocr": note})
    texts = Page(write_gallery(folder, ())).texts
    assert [text for text in texts if text in {"ocr found", "nothing"}] == shown


def test_gallery_shows_the_summary_and_colours_only_what_is_certain(tmp_path: Path) -> None:
    page = Page(write_gallery(RunFolder(tmp_path), SUMMARY))
    start = page.texts.index("ocr")
    assert page.texts[start : start + 10] == [
        *("ocr", "0.500", "0.750", "+0.250", "+0.125 to +0.375"),
        *("lpips", "0.500", "0.250", "-0.250", "-0.500 to +0.062"),
    ]
    assert [cell["class"] for cell in page.all("td") if "class" in cell] == ["better", ""]


def test_gallery_refers_to_existing_files_of_the_run_and_to_nothing_else(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a run #1 50%")
    target = store_picture(folder, "images/targets/a.png")
    store_evaluation(folder, 0, {"a": [0.5]}, target=target)
    path = write_gallery(folder, SUMMARY)
    links = Page(path).links()
    pictures = [link for link in links if link != "data:,"]
    assert len(pictures) == 4  # the target and the sample, each shown and linked
    for link in pictures:
        assert not re.match(r"[a-z]+:|/", link)
        assert (path.parent / link).is_file()
    source = path.read_text()
    assert not re.search(r"https?:|//\w|@import|url\(|<script|<iframe", source)


def test_gallery_keeps_hostile_text_as_text(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    store_evaluation(folder, 0, {HOSTILE: [0.5]}, texts=[HOSTILE], **{"note/ocr": HOSTILE})
    folder.config_path.write_text(f"data: {HOSTILE}")
    page = Page(write_gallery(folder, [SummaryRow(HOSTILE, 0.0, 0.0, 0.0, 0.0, 0.0)]))
    names = {name for _, attributes in page.elements for name in attributes}
    assert page.all("script") == []
    assert not [name for name in names if name.startswith("on")]
    plain = " ".join(HOSTILE.split())
    # Prompt, text to appear, text read and the row of the summary.
    assert page.texts.count(plain) == 4
    assert f"data: {plain}" in page.texts


def test_gallery_lets_text_choose_its_direction(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    store_evaluation(folder, 0, {"שלום": [0.5]}, texts=["שלום"])
    page = Page(write_gallery(folder, ()))
    assert [tag for tag, attributes in page.elements if attributes.get("dir") == "auto"] == [
        *("h3", "p", "q", "dd")
    ]


def test_gallery_pictures_are_lazy_and_described(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    store_evaluation(folder, 0, {"a": [0.5, 0.5]})
    for image in Page(write_gallery(folder, ())).all("img"):
        assert image["loading"] == "lazy"
        assert image["alt"]


@pytest.mark.parametrize(("width", "expected"), [(255, "small"), (256, None)])
def test_gallery_keeps_the_pixels_of_small_pictures_sharp(
    width: int, expected: str | None, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    image = store_picture(folder, "images/eval-000000/x.png", width)
    store_evaluation(folder, 0, {"a": [0.5]}, image=image)
    assert Page(write_gallery(folder, ())).all("body")[0].get("class") == expected


def test_gallery_of_a_run_that_stored_nothing_says_so(tmp_path: Path) -> None:
    page = Page(write_gallery(RunFolder(tmp_path), ()))
    assert "This run has stored no evaluation yet." in page.texts
    assert page.all("img") == page.all("svg") == page.all("table") == []


def test_gallery_of_a_crashed_run_shows_what_there_is(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    store_evaluation(folder, 0, {"a": [0.5, 0.5]})
    (tmp_path / "images" / "eval-000000" / "0-1.png").unlink()
    folder.metrics_path.write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew')
    page = Page(write_gallery(folder, ()))
    assert "Samples, step 0" in page.texts
    assert len(page.all("img")) == 1
    assert "No picture file" in page.texts
    assert page.all("svg") == []  # one value makes no curve


def test_gallery_refuses_a_damaged_table_by_name(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_atomically(folder.evaluation_path(0), b"PAR1 not a table")
    with pytest.raises(StorageError, match=r"step-000000\.parquet is not a whole Parquet file"):
        write_gallery(folder, ())


def test_gallery_draws_curves_of_rewards_kl_and_clipping(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    rows = [
        {"step": 0, "reward/mean": 0.0, "reward/ocr/mean": 0.5, "loss/total": 1.0},
        {"step": 5, "reward/mean": None, "reward/ocr/mean": 0.5, "loss/total": 1.0},
        {"step": 10, "reward/mean": 2.0, "reward/ocr/mean": 0.5, "loss/total": 1.0},
    ]
    folder.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(write_gallery(folder, ()))
    # From the lower left to the upper right of 200 x 48 less a margin of 3; level in the middle.
    assert [line["points"] for line in page.all("polyline")] == [
        "3.0,45.0 197.0,3.0",
        "3.0,24.0 100.0,24.0 197.0,24.0",
    ]
    labels = [svg["aria-label"] for svg in page.all("svg")]
    assert labels == ["reward/mean from 0 to 2", "reward/ocr/mean from 0.5 to 0.5"]
