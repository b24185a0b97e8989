"""Files, folders and data sets that prompts are read from: each format once, each mistake once."""

from __future__ import annotations

import datetime
import json
import math
from decimal import Decimal
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from glm_grpo.errors import DataError
from tests.data.prompt_files import lines, load, written


def test_text_gives_one_prompt_a_line_and_skips_blank_ones(tmp_path: Path) -> None:
    path = written(tmp_path / "a.TXT", "\ufeffa red sign\r\n\n  \nein Schild für 猫\f")
    prompts = load(path)
    assert prompts.captions() == ["a red sign", "ein Schild für 猫"]
    assert [entry.origin for entry in prompts.entries] == [f"{path}, line 1", f"{path}, line 4"]


@pytest.mark.parametrize(
    ("name", "content", "captions", "lines"),
    [
        ("a.txt", 'a "A"\r\rb "B"\rc', ['a "A"', 'b "B"', "c"], [1, 3, 4]),
        ("a.txt", "a\nb\r\nc\rd", ["a", "b", "c", "d"], [1, 2, 3, 4]),
        ("a.jsonl", '{"prompt": "a"}\r{"prompt": "b\u2028c"}\r', ["a", "b\u2028c"], [1, 2]),
        ("a.csv", 'prompt,id\r"a\rb",x\rc,y\r', ["a\nb", "c"], [3, 4]),
    ],
)
def test_lines_may_end_as_on_any_machine(
    tmp_path: Path, name: str, content: str, captions: list[str], lines: list[int]
) -> None:
    path = written(tmp_path / name, content)
    prompts = load(path)
    assert prompts.captions() == captions
    assert [entry.origin for entry in prompts.entries] == [f"{path}, line {n}" for n in lines]


def test_jsonl_gives_one_prompt_an_object(tmp_path: Path) -> None:
    text = (
        '\ufeff{"prompt": "x", "seed": 3}\r\n\n{"prompt": "\\ud83d\\udc08 \\"UP\\"", "id": "cat"}\n'
    )
    path = written(tmp_path / "a.jsonl", text)
    prompts = load(path)
    assert prompts.captions() == ["x", '\U0001f408 "UP"']
    assert prompts[1].prompt_id == "cat"
    assert prompts.entries[1].origin == f"{path}, line 3"


def test_csv_understands_quotes_and_lines_inside_them(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.csv", 'id, prompt\r\n1,"a sign, ""UP""\r\nand down"\r\n\r\n2,plain\r\n'
    )
    prompts = load(path)
    assert prompts.captions() == ['a sign, "UP"\nand down', "plain"]
    assert prompts[1].prompt_id == "2"
    assert [entry.origin for entry in prompts.entries] == [f"{path}, line 3", f"{path}, line 5"]


def test_an_empty_cell_of_a_csv_is_a_field_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", 'prompt,text\n"a sign ""UP""",\n"a sign ""UP""",DOWN\n')
    assert [entry.texts for entry in load(path).entries] == [("UP",), ("DOWN",)]


INCLUDE = [{"class": "car", "count": 1, "color": "red"}]


def test_further_fields_are_metadata_in_every_format(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a red car", "tag": "colors", "include": INCLUDE, "level": 3},
        {"prompt": "a dog", "tag": None},
    ]
    jsonl = written(tmp_path / "a.jsonl", lines(*rows))
    cells = json.dumps(INCLUDE).replace('"', '""')
    csv = written(tmp_path / "a.csv", f'prompt,tag,include\na red car,colors,"{cells}"\na dog,,\n')
    table = {
        "prompt": ["a red car", "a dog"],
        "tag": ["colors", None],
        "include": [INCLUDE, None],
        # What a judge could not be sent, and of any size.
        "photo": [{"bytes": b"\x89PNG", "path": None}] * 2,
        "raw": [b"\x00"] * 2,
    }
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    known = {"tag": "colors", "include": INCLUDE}
    assert [entry.metadata for entry in load(jsonl).entries] == [known | {"level": 3}, {}]
    assert [entry.metadata for entry in load(csv).entries] == [known, {}]
    of_table = load(tmp_path / "a.parquet")
    assert [entry.metadata for entry in of_table.entries] == [known, {}]
    assert of_table[0].metadata == known


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            lines({"prompt": "a car"}, {"prompt": "a red car", "include": [{"class": "car"}]}),
            r"a\.jsonl, line 2: include\[0\]: count is missing; it must be a whole number",
        ),
        (
            "a.csv",
            'prompt,exclude\na red car,"[{""class"": ""car"", ""count"": 2}]"\n',
            r"a\.csv, line 2: include has no condition, .*; name at least one class",
        ),
        ("a.csv", "prompt,include\na red car,car\n", r"line 2: include = 'car' must be a list"),
        # Not left out as other values that JSON has no word for: the images would count as right.
        (
            "a.jsonl",
            '{"prompt": "two cars", "include": [{"class": "car", "count": NaN}]}',
            r"line 1: include\[0\]: count = nan; it must be a whole number",
        ),
    ],
)
def test_objects_that_no_image_could_show_are_refused(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load(written(tmp_path / name, content))


def test_a_table_may_have_conditions_as_json_but_not_as_bytes(tmp_path: Path) -> None:
    # A column of a table has one type, and a position is a text and a number.
    include = [*INCLUDE, {"class": "dog", "count": 1, "position": ["left of", 0]}]
    for cell in (json.dumps(include), json.dumps(include).encode()):
        table = pyarrow.table({"prompt": ["a dog left of a red car"], "include": [cell]})
        pyarrow.parquet.write_table(table, tmp_path / f"{type(cell).__name__}.parquet")
    assert load(tmp_path / "str.parquet")[0].metadata == {"include": include}
    with pytest.raises(DataError, match=r"row 1: include = b'.* must be a list of conditions"):
        load(tmp_path / "bytes.parquet")


def test_metadata_are_values_that_json_can_hold(tmp_path: Path) -> None:
    table = {
        "prompt": ["a"],
        "day": [datetime.date(2024, 2, 29)],
        "price": [Decimal("1.50")],
        "missing": [math.nan],
        "scores": [[1.0, math.nan]],
    }
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    assert load(tmp_path / "a.parquet")[0].metadata == {"day": "2024-02-29", "price": "1.50"}


def test_another_row_is_another_prompt_to_a_resumed_run(tmp_path: Path) -> None:
    def digest_of(**fields: object) -> str:
        path = written(tmp_path / "a.jsonl", lines({"prompt": "a car", **fields}))
        return load(path).digests()["00000"]

    different = {digest_of(), digest_of(tag="colors"), digest_of(tag="position")}
    assert len(different) == 3
    assert digest_of(tag="colors", level=1) == digest_of(level=1, tag="colors")


def test_parquet_gives_one_prompt_a_row_with_its_texts(tmp_path: Path) -> None:
    table = {
        "prompt": ["a", 'b "UP"', 'c "UP"'],
        "text": [["OPEN", "24 H"], None, []],
        "score": [1.0, 2.0, 3.0],
    }
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    prompts = load(tmp_path / "a.parquet")
    assert [entry.texts for entry in prompts.entries] == [("OPEN", "24 H"), ("UP",), ()]
    assert prompts.entries[1].origin == f"{tmp_path}/a.parquet, row 2"


def test_a_folder_with_metadata_is_read_as_an_image_folder(assets_dir: Path) -> None:
    prompts = load(assets_dir / "images" / "photos")
    assert len(prompts) == 8
    cans = [prompts[index] for index in (2, 3)]
    assert [can.texts for can in cans] == [("TRANSATLANTIC IPA",)] * 2
    assert all(can.target is not None and can.target.shape == (3, 32, 32) for can in cans)


def test_real_prompt_files_are_read_whole(assets_dir: Path) -> None:
    assert len(load(assets_dir / "prompts" / "ocr_prompts.txt")) == 500
    assert len(load(assets_dir / "prompts" / "geneval_metadata.jsonl")) == 553


def numbered_folder(tmp_path: Path, prompts: str, images: list[str]) -> Path:
    """An image each, of a red channel that is 10 times its place in the list."""
    written(tmp_path / "prompts.txt", prompts)
    (tmp_path / "target_images").mkdir()
    for place, name in enumerate(images):
        Image.new("RGB", (32, 32), (10 * place, 0, 0)).save(tmp_path / "target_images" / name)
    return tmp_path


def test_a_folder_with_numbered_images_pairs_them_with_lines(tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(11)]
    names[2] = "2.WEBP"
    folder = numbered_folder(tmp_path, "\n".join("abcdefghijk") + "\n", names)
    (folder / "target_images" / "notes.md").touch()
    prompts = load(folder)
    assert prompts[10].prompt == "k"
    for row, target in enumerate(prompts[index].target for index in range(11)):
        assert target is not None
        assert abs(int(target[0, 0, 0]) - 10 * row) < 5


@pytest.mark.parametrize(
    ("prompts", "images", "named"),
    [
        ("a\nb\n", ["0.png"], r"1 numbered image for 2 prompts .*see \[1\]"),
        ("a\nb\n", ["1.png", "2.png"], r"see \[0\].*counted from 0"),
        ("a\n", ["0.png", "1.png"], r"see \[1\]"),
        ("a\n\nb\n", ["0.png", "2.png"], r"see \[1\]"),
        ("a\n", ["0.png", "0.jpg"], "a number twice"),
    ],
)
def test_a_folder_with_numbered_images_refuses_what_would_shift_the_pairs(
    tmp_path: Path, prompts: str, images: list[str], named: str
) -> None:
    with pytest.raises(DataError, match=named):
        load(numbered_folder(tmp_path, prompts, images))


def test_a_folder_without_the_expected_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither metadata\.jsonl nor prompts\.txt"):
        load(tmp_path)
    written(tmp_path / "prompts.txt", "a\n")
    with pytest.raises(DataError, match=r"prompts\.txt"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.txt", b" \n\n", "contains no prompts"),
        ("a.csv", b"prompt,id\n", "contains no prompts"),
        ("a.txt", "gut\nein Schild für\n".encode("latin-1"), "not UTF-8 .*position 16"),
        ("a.jsonl", b'{"prompt": "a sign "OPEN""}\n', r'write .* \\" for a quotation mark inside'),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": "y\n', "line 2, column 12: not valid JSON"),
        ("a.jsonl", b'[{"prompt": "x"}]', 'line 1: .*is not an object; write {"prompt"'),
        (
            "a.jsonl",
            b'{"prompt": "x"}\n{"prompt": "x", "text": "A", "text": "B"}',
            "line 2: the key 'text'",
        ),
        ("a.csv", b"prompt,text,text\nx,A,B\n", "line 1: the column 'text' occurs 2 times"),
        ("a.csv", b"prompt;id\nx;1\n", "line 2: 'prompt' is missing .*prompt;id"),
        ("a.csv", b"prompt,id\nx,1\na sign, red,2\n", "line 3: another number of cells"),
        ("a.csv", b"prompt,id\nx\n", "line 2: another number of cells"),
        ("a.csv", b'prompt\nx\n"never closed\nz\n', "after line 2: not valid CSV"),
        ("a.parquet", b"PAR1 it is not", "not a readable parquet file .*; write it again"),
        ("a.tsv", b"prompt\n", r"unknown kind of prompts file; use one of \.txt"),
        ("missing.txt", None, "no such file or folder in .*; give a prompts file"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_line_and_a_remedy(
    tmp_path: Path, name: str, content: bytes | None, named: str
) -> None:
    if content is not None:
        written(tmp_path / name, content)
    with pytest.raises(DataError, match=named):
        load(tmp_path / name)


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"caption": ["x"]}, "row 1: 'prompt' is missing or blank"),
        ({"prompt": ["x", None]}, "row 2: 'prompt' is missing or blank"),
        ({"prompt": ["x"], "image": [{"bytes": b"PNG"}]}, "row 1: the embedded image cannot"),
        ({"prompt": ["x"], "image": [b"PNG"]}, "row 1: the embedded image cannot"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_its_row(
    tmp_path: Path, table: dict[str, object], named: str
) -> None:
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=named):
        load(tmp_path / "a.parquet")


@pytest.mark.parametrize("names", [("prompt", "prompt"), ("prompt", "text", "text")])
def test_a_table_with_a_repeated_column_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    columns = [pyarrow.array(["x"]) for _ in names]
    table = pyarrow.Table.from_arrays(columns, names)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"a\.parquet: the column '{names[-1]}' occurs 2 times"):
        load(tmp_path / "a.parquet")


def test_a_table_with_text_that_is_not_utf8_is_refused_with_its_row(tmp_path: Path) -> None:
    offsets = pyarrow.array([0, 1, 2], pyarrow.int32()).buffers()[1]
    text = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, [None, offsets, pyarrow.py_buffer(b"x\xff")]
    )
    table = pyarrow.Table.from_arrays([pyarrow.array(["a", "b"]), text], ["prompt", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 2: .*UTF-8"):
        load(tmp_path / "a.parquet")


def test_a_column_without_a_name_may_be_repeated(tmp_path: Path) -> None:
    assert load(written(tmp_path / "a.csv", "prompt,,\nx,,\n")).captions() == ["x"]


def test_a_hub_data_set_that_cannot_be_loaded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="nobody/nothing"):
        load("nobody/nothing")


def test_a_hub_data_set_is_read_with_its_images(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (32, 32), (255, 0, 0)).save(tmp_path / "red.png")
    image = {"bytes": (tmp_path / "red.png").read_bytes(), "path": None}
    table = datasets.Dataset.from_dict({"prompt": ["a sign"], "image": [image]})

    def load_dataset(name: str, *, split: str) -> datasets.Dataset:
        assert (name, split) == ("owner/embedded", "train")
        return table.cast_column("image", datasets.Image())

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    prompts = load("owner/embedded")
    assert prompts.entries[0].origin == "owner/embedded, row 1"
    target = prompts[0].target
    assert target is not None
    assert target[:, 0, 0].tolist() == [255, 0, 0]
