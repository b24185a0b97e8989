from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from glm_grpo.errors import DataError
from glm_grpo.training.data.files import Row, read_rows


def written(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def rows_of(path: str) -> list[Row]:
    return list(read_rows(path))


def prompts_of(path: str) -> list[object]:
    return [row.fields["prompt"] for row in rows_of(path)]


def test_text_gives_one_prompt_a_line_and_skips_blank_ones(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", "\ufeffa red sign\r\n\n  \nein Schild für 猫")
    rows = rows_of(path)
    assert [row.fields for row in rows] == [
        {"prompt": "a red sign"},
        {"prompt": "ein Schild für 猫"},
    ]
    assert [row.origin for row in rows] == [f"{path}, line 1", f"{path}, line 4"]
    assert rows[0].folder == tmp_path


def test_jsonl_keeps_all_fields(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"prompt": "x", "seed": 3}\n\n{"prompt": "y"}\n')
    rows = rows_of(path)
    assert [row.fields for row in rows] == [{"prompt": "x", "seed": 3}, {"prompt": "y"}]
    assert rows[1].origin == f"{path}, line 3"


def test_csv_understands_quotes_and_counts_lines_inside_them(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.csv", 'id, prompt\r\n1,"a sign, ""UP""\r\nand down"\r\n\r\n2,plain\r\n'
    )
    rows = rows_of(path)
    assert [row.fields for row in rows] == [
        {"id": "1", "prompt": 'a sign, "UP"\nand down'},
        {"id": "2", "prompt": "plain"},
    ]
    assert [row.origin for row in rows] == [f"{path}, line 2", f"{path}, line 5"]


def test_an_empty_cell_of_a_csv_is_a_field_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", 'prompt,text\n"a sign ""UP""",\n"a sign ""UP""",DOWN\n')
    assert [row.fields.get("text") for row in rows_of(path)] == [None, "DOWN"]


def test_parquet_gives_rows_with_nulls(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    table = pyarrow.table({"prompt": ["x", "y"], "text": [None, "Y"]})
    pyarrow.parquet.write_table(table, path)
    rows = rows_of(path)
    assert [row.fields for row in rows] == [
        {"prompt": "x", "text": None},
        {"prompt": "y", "text": "Y"},
    ]
    assert rows[1].origin == f"{path}, row 2"


def test_folder_with_metadata_is_read_as_an_image_folder(assets_dir: Path) -> None:
    rows = rows_of(str(assets_dir / "images" / "photos"))
    assert len(rows) == 8
    assert rows[0].fields["file_name"] == "backpack_00.jpg"
    assert rows[0].folder == assets_dir / "images" / "photos"


def test_real_prompt_files_are_read_whole(assets_dir: Path) -> None:
    assert len(rows_of(str(assets_dir / "prompts" / "ocr_prompts.txt"))) == 500
    assert len(rows_of(str(assets_dir / "prompts" / "geneval_metadata.jsonl"))) == 553


def numbered_folder(tmp_path: Path, prompts: str, pictures: list[str]) -> str:
    written(tmp_path / "prompts.txt", prompts)
    (tmp_path / "target_images").mkdir()
    for name in pictures:
        (tmp_path / "target_images" / name).touch()
    return str(tmp_path)


def test_folder_with_numbered_pictures_pairs_them_with_lines(tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(11)]
    names[2] = "2.JPG"
    path = numbered_folder(tmp_path, "\n".join("abcdefghijk") + "\n", [*names, "notes.md"])
    rows = rows_of(path)
    assert [row.fields["target"] for row in rows] == [f"target_images/{name}" for name in names]
    assert rows[10].fields["prompt"] == "k"


@pytest.mark.parametrize(
    ("prompts", "pictures", "named"),
    [
        ("a\nb\n", ["0.png"], r"prompts\.txt, line 2: no picture .*1\.png"),
        ("a\nb\n", ["1.png", "2.png"], r"line 1: no picture .*0\.png; .*counted from 0"),
        ("a\n", ["0.png", "1.png"], r"1\.png: has no line in prompts\.txt, which has 1"),
        ("a\n\nb\n", ["0.png", "1.png"], r"prompts\.txt, line 2: blank"),
    ],
)
def test_folder_with_numbered_pictures_refuses_what_would_shift_the_pairs(
    tmp_path: Path, prompts: str, pictures: list[str], named: str
) -> None:
    with pytest.raises(DataError, match=named):
        rows_of(numbered_folder(tmp_path, prompts, pictures))


def test_folder_without_the_expected_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither metadata\.jsonl nor prompts\.txt"):
        rows_of(str(tmp_path))
    written(tmp_path / "prompts.txt", "a\n")
    with pytest.raises(DataError, match="target_images: no such folder"):
        rows_of(str(tmp_path))
    written(tmp_path / "metadata.jsonl", '{"prompt": "a"}')
    with pytest.raises(DataError, match=r"holds metadata\.jsonl and prompts\.txt"):
        rows_of(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.txt", b"", "holds no prompts"),
        ("a.txt", b" \n\n", "holds no prompts"),
        ("a.jsonl", b"\n", "holds no prompts"),
        ("a.csv", b"prompt\n", "holds no prompts"),
        ("a.csv", b"", "holds no prompts"),
        ("a.txt", b"good\nbad \xff\n", "line 2: byte 0xff at column 5 is not UTF-8"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": "\xe4"}', "line 2: byte 0xe4 at column 13"),
        ("a.txt", "not UTF-8".encode("utf-16"), "line 1: byte 0xff"),
        ("a.txt", b"a\nb\0c\n", "line 2: holds a null character"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": }\n', "line 2, column 12: not valid JSON"),
        ("a.jsonl", b'{"prompt": "x"}\n["x"]\n', "line 2: .* is not an object"),
        ("a.jsonl", b"[" * 100_000, "line 1: not usable JSON"),
        ("a.jsonl", b'{"id": ' + b"9" * 5000 + b"}", "line 1: not usable JSON"),
        ("a.csv", b"caption\nx\n", "line 1: the header .* has no column 'prompt'"),
        ("a.csv", b"prompt,prompt\nx,y\n", "line 1: the header .* names a column twice"),
        ("a.csv", b"prompt,id\nx,1\na sign, red,2\n", "line 3: 3 cells under a header of 2"),
        ("a.csv", b'prompt\nx\n"never closed\nz\n', "line 3: not valid CSV"),
        ("a.parquet", b"PAR1 it is not", "not a readable parquet file"),
        ("a.tsv", b"prompt\n", r"unknown kind of prompts file; use one of \.txt"),
    ],
)
def test_files_that_cannot_be_used_are_refused_with_their_line(
    tmp_path: Path, name: str, content: bytes, named: str
) -> None:
    with pytest.raises(DataError, match=named):
        rows_of(written(tmp_path / name, content))


@pytest.mark.parametrize("path", ["missing.txt", "no/such/folder", "missing", "owner/missing.csv"])
def test_missing_files_are_refused_without_asking_a_hub(path: str) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        rows_of(path)


def test_hub_data_set_that_cannot_be_loaded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="nobody/nothing: neither a file or folder here nor"):
        rows_of("nobody/nothing")


def test_hub_data_set_is_read_with_embedded_pictures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, assets_dir: Path
) -> None:
    # A data set in the hub's own layout, in a folder whose relative path reads as owner/name.
    monkeypatch.chdir(tmp_path)
    photo = (assets_dir / "images" / "photos" / "can_01.jpg").read_bytes()
    table = datasets.Dataset.from_dict(
        {"prompt": ["a can"], "image": [{"bytes": photo, "path": None}]}
    ).cast_column("image", datasets.Image())

    def load_dataset(name: str, *, split: str) -> datasets.Dataset:
        assert (name, split) == ("owner/cans", "train")
        return table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (row,) = rows_of("owner/cans")
    assert row.fields["prompt"] == "a can"
    assert row.fields["image"] == {"bytes": photo, "path": None}
    assert (row.origin, row.folder) == ("owner/cans, row 1", None)


def test_json_text_with_escapes_survives(tmp_path: Path) -> None:
    prompt = 'a "sign" \u2028 with \t tab'
    path = written(tmp_path / "a.jsonl", json.dumps({"prompt": prompt}, ensure_ascii=False))
    assert prompts_of(path) == [prompt]
