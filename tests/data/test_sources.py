"""Source images of edits: read from every kind of file, or refused by file and line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from glm_grpo.data.prompts import PromptSet, batch_for_step, part_of_batch
from glm_grpo.errors import DataError
from tests.data.prompt_files import lines, load, written

Rows = list[dict[str, object]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Red, green and blue images, long ones and a torn one."""
    for name, colour in (("red", (255, 0, 0)), ("green", (0, 255, 0)), ("blue", (0, 0, 255))):
        Image.new("RGB", (64, 64), colour).save(tmp_path / f"{name}.png")
    Image.new("RGB", (650, 130)).save(tmp_path / "long.png")
    Image.new("RGB", (40, 10), (255, 0, 0)).save(tmp_path / "at_the_limit.png")
    (tmp_path / "torn.png").write_bytes((tmp_path / "red.png").read_bytes()[:60])
    return tmp_path


def colours(prompts: PromptSet, row: int = 0) -> list[list[int]]:
    return [source[:, 0, 0].tolist() for source in prompts[row].sources]


RED, GREEN, BLUE = [255, 0, 0], [0, 255, 0], [0, 0, 255]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"source": "red.png"}, [RED]),
        ({"sources": ["red.png"]}, [RED]),
        ({"sources": "red.png"}, [RED]),
        ({"sources": ["red.png", "blue.png", "blue.png"]}, [RED, BLUE, BLUE]),
        ({"source": {"path": "red.png"}}, [RED]),
        ({"source": "at_the_limit.png"}, [RED]),
    ],
    ids=str,
)
def test_sources_are_read_at_the_size_of_the_rollout(
    folder: Path, row: dict[str, object], expected: list[list[int]]
) -> None:
    path = written(folder / "a.jsonl", lines({"prompt": "make it green", **row}))
    prompts = load(path, sources=len(expected))
    assert colours(prompts) == expected
    assert all(source.shape == (3, 32, 32) for source in prompts[0].sources)


def test_edits_ask_for_the_same_where_text_and_sources_are_the_same(folder: Path) -> None:
    rows = [
        {"prompt": "draw it", "source": "red.png"},
        {"prompt": "draw it", "source": "blue.png"},
        {"prompt": "paint it", "source": "red.png"},
    ]
    path = written(folder / "rows.jsonl", lines(*rows))
    red, blue, other = load(path, sources=1).identities()
    assert len({red, blue, other}) == 3
    again = written(folder / "again.jsonl", lines({"prompt": "draw it", "sources": ["./red.png"]}))
    assert load(again, sources=1).identities() == [red]


def write_csv(path: Path, rows: Rows) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(
            {
                name: json.dumps(cell) if isinstance(cell, list) else cell
                for name, cell in row.items()
            }
            for row in rows
        )


def write_parquet(path: Path, rows: Rows) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.mark.parametrize(
    ("name", "write"), [("a.csv", write_csv), ("a.parquet", write_parquet)], ids=["csv", "parquet"]
)
def test_sources_are_read_from_tables(
    folder: Path, name: str, write: Callable[[Path, Rows], None]
) -> None:
    pair = [{"prompt": "swap", "sources": ["red.png", "blue.png"]}]
    write(folder / name, pair)
    assert colours(load(folder / name, sources=2)) == [RED, BLUE]
    write(folder / name, [{"prompt": "swap", "source": "green.png", "target": "red.png"}])
    prompts = load(folder / name, sources=1)
    assert colours(prompts) == [GREEN]
    assert prompts[0].target[:, 0, 0].tolist() == RED


def test_sources_may_be_embedded_in_a_table(folder: Path) -> None:
    content = (folder / "green.png").read_bytes()
    rows: Rows = [{"prompt": "a", "sources": [{"bytes": content, "path": None}] * 2}]
    write_parquet(folder / "a.parquet", rows)
    assert colours(load(folder / "a.parquet", sources=2)) == [GREEN, GREEN]


def test_an_image_folder_may_name_sources(folder: Path) -> None:
    row = {"prompt": "make it red", "file_name": "red.png", "source": "blue.png"}
    written(folder / "metadata.jsonl", lines(row))
    prompts = load(folder, sources=1)
    assert colours(prompts) == [BLUE]
    assert prompts[0].target[:, 0, 0].tolist() == RED


def test_a_field_of_that_name_is_left_alone_where_no_sources_are_asked_for(folder: Path) -> None:
    row = {"prompt": "a sign", "source": "a web page", "sources": 7}
    path = written(folder / "a.jsonl", lines(row))
    assert load(path)[0].sources == ()


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"source": ""}, "0 source images, but every prompt of both files needs data.sources = 1"),
        (
            {"sources": ["red.png", "blue.png"]},
            "2 source images, but every prompt of both files needs data.sources = 1",
        ),
        ({"source": "red.png", "sources": ["red.png"]}, "source and sources both name images"),
        ({"source": "nowhere.png"}, "nowhere.png does not exist; paths are relative to"),
        ({"source": "torn.png"}, "torn.png cannot be used"),
        ({"source": "long.png"}, "long.png is 650 x 130; the longer side must be at most 4 times"),
        ({"source": 7}, "'source' is 7; it must be the path of an image"),
        ({"sources": "[red.png]"}, "'sources' is .*, not a list .*; write"),
    ],
    ids=ascii,
)
def test_a_source_that_cannot_be_used_is_refused_by_file_and_line(
    folder: Path, row: dict[str, object], named: str
) -> None:
    good = {"prompt": "first", "source": "red.png"}
    path = written(folder / "a.jsonl", lines(good, {"prompt": "second", **row}))
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: .*{named}"):
        load(path, sources=1)


def test_a_batch_and_its_parts_keep_the_sources_of_their_prompts(folder: Path) -> None:
    rows = [{"prompt": name, "source": f"{name}.png"} for name in ("red", "green", "blue")]
    prompts = load(written(folder / "a.jsonl", lines(*rows)), sources=1)
    batch = batch_for_step(prompts, step=1, seed=0, prompts_per_step=3, group_size=2)
    assert batch.num_sources == 1
    expected = {"red": RED, "green": GREEN, "blue": BLUE}
    for prompt in batch.prompts:
        assert prompt.sources[0][:, 0, 0].tolist() == expected[prompt.prompt]
    with_ids = part_of_batch(
        # As the policy would put them there.
        type(batch)(**{**vars(batch), "source_token_ids": torch.arange(3).view(3, 1, 1)}),
        range(1, 3),
    )
    assert with_ids.source_token_ids.flatten().tolist() == [1, 2]
    assert with_ids.prompts == batch.prompts[1:]
