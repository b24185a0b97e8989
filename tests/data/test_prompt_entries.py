"""Fields of a row: what they mean, and which are refused by their line."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from glm_grpo.data.entries import PromptEntry
from glm_grpo.errors import DataError
from tests.data.prompt_files import lines, load, written


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder with a red image in it, beside a blue one that it does not own."""
    folder = tmp_path / "data"
    folder.mkdir()
    Image.new("RGB", (32, 32), "red").save(folder / "red.png")
    Image.new("RGB", (32, 32), "blue").save(tmp_path / "blue.png")
    return folder


def entry_of(folder: Path, row: dict[str, object]) -> PromptEntry:
    (entry,) = load(written(folder / "a.jsonl", lines({"prompt": 'a sign "UP"', **row}))).entries
    return entry


def test_a_row_is_filled_where_it_leaves_out(folder: Path) -> None:
    prompts = load(written(folder / "a.jsonl", lines({"prompt": "x"}, {"prompt": ' a "UP" \n'})))
    second = prompts[1]
    assert (second.prompt_id, second.prompt, second.texts) == ("00001", 'a "UP"', ("UP",))
    assert second.target is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" TWO\nLINES ", ("TWO\nLINES",)),
        (["DOWN", " IN "], ("DOWN", "IN")),
        # Of a list, both are wanted.
        (["IN", "IN"], ("IN", "IN")),
        # Nothing is said about the text: the quotation stands.
        (None, ("UP",)),
        # Said, and there is none.
        ("", ()),
        ([], ()),
    ],
)
def test_the_text_field_goes_before_the_quotation(
    folder: Path, text: object, expected: tuple[str, ...]
) -> None:
    assert entry_of(folder, {"text": text}).texts == expected


def test_a_list_as_pandas_writes_it_into_a_cell_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "prompt,text\nx,\"['UP', 'A']\"\n")
    with pytest.raises(DataError, match="line 2: 'text' is .*not a list"):
        load(path)


@pytest.mark.parametrize(
    ("cell", "texts"),
    [('"[""DOWN"", ""IN""]"', ("DOWN", "IN")), ("[SALE]", ("[SALE]",)), ("[]", ())],
)
def test_a_cell_may_hold_a_list_of_texts(tmp_path: Path, cell: str, texts: tuple[str, ...]) -> None:
    path = written(tmp_path / "a.csv", f"prompt,text\nx,{cell}\n")
    assert load(path).entries[0].texts == texts


@pytest.mark.parametrize(
    ("given", "expected"), [("sign-1", "sign-1"), (17, "17"), (" a b ", "a b"), ("", "00000")]
)
def test_the_id_names_the_prompt(folder: Path, given: object, expected: str) -> None:
    assert entry_of(folder, {"id": given}).prompt_id == expected


@pytest.mark.parametrize("field", ["target", "target_image", "file_name", "image"])
def test_a_target_is_found_in_the_folder_of_the_file(folder: Path, field: str) -> None:
    assert entry_of(folder, {field: "red.png"}).target == folder / "red.png"


@pytest.mark.parametrize("value", ["ABSOLUTE", {"bytes": None, "path": "red.png"}], ids=str)
def test_a_target_may_be_an_absolute_path_or_an_image_of_datasets(
    folder: Path, value: object
) -> None:
    value = str(folder / "red.png") if value == "ABSOLUTE" else value
    assert entry_of(folder, {"target": value}).target == folder / "red.png"


def test_a_path_beside_the_file_is_found_from_another_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    written(folder / "a.jsonl", lines({"prompt": "x", "target": "red.png"}))
    assert load("a.jsonl").entries[0].target == folder / "red.png"


def test_an_image_column_of_addresses_is_no_target(folder: Path) -> None:
    assert entry_of(folder, {"image": "https://example.org/a.png"}).target is None


NO_IMAGE = "must be the path of an image"


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"promt": "x"}, "'prompt' is missing .*rename 'promt' to 'prompt'"),
        ({"prompt": " \t"}, "'prompt' is missing or blank"),
        ({"prompt": 5}, "'prompt' is 5"),
        ({"prompt": "x", "text": 5}, "'text' is 5"),
        ({"prompt": "x", "text": ["UP", " "]}, "'text' contains a blank"),
        ({"prompt": r'a "\"UP\""'}, r"'prompt' contains \\\"UP\\\"; .*backslashes"),
        ({"prompt": r'a "GRAND\nOPENING"'}, r"GRAND\\n, with a backslash.* write a space"),
        ({"prompt": "a \ud800"}, r"'prompt' contains '\\ud800', .*whole character"),
        ({"prompt": "x", "text": ["A", "\ud800"]}, "'text' contains"),
        ({"prompt": "x", "id": "\ud800"}, "'id' contains"),
        ({"prompt": "x", "file_name": "\ud800.png"}, "'file_name' contains"),
        ({"prompt": "x", "level": ["\ud800"]}, "'level' contains"),
        ({"prompt": "x", "text": ["A", r"DON\'T"]}, r"'text' contains \\'"),
        ({"prompt": "x", "id": 1.5}, "'id' is 1.5; it must be text"),
        ({"prompt": "x", "id": "../x"}, "id '../x' is used in file names"),
        ({"prompt": "x", "id": ".hidden"}, "is used in file names"),
        ({"prompt": "x", "id": "i" * 101}, "is used in file names"),
        (
            {"prompt": "x", "id": "first"},
            "id 'first' is already used by .*line 1",
        ),
        ({"prompt": "x", "target": "red.png", "file_name": "red.png"}, "target and file_name both"),
        ({"prompt": "x", "target": 3}, f"'target' is 3; it {NO_IMAGE}"),
        ({"prompt": "x", "image": {"bytes": None, "path": None}}, NO_IMAGE),
        ({"prompt": "x", "target": "no.png"}, "no.png does not exist; paths are relative to"),
        ({"prompt": "x", "target": "https://x.org/a.png"}, "URLs are not read: download the image"),
        ({"prompt": "x", "target": "."}, "Is a directory"),
        ({"prompt": "x", "target": "torn.png"}, "torn.png cannot be used"),
    ],
    ids=ascii,
)
def test_a_row_that_cannot_be_used_is_refused_by_its_line(
    folder: Path, row: dict[str, object], named: str
) -> None:
    (folder / "torn.png").write_bytes((folder / "red.png").read_bytes()[:60])
    path = written(folder / "a.jsonl", lines({"prompt": "fine", "id": "first"}, row))
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: .*{named}"):
        load(path)


def test_an_id_that_is_the_position_of_another_row_is_refused(folder: Path) -> None:
    path = written(folder / "a.jsonl", lines({"prompt": "x", "id": "00001"}, {"prompt": "y"}))
    with pytest.raises(DataError, match="line 2: id '00001' "):
        load(path)
