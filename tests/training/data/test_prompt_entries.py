from __future__ import annotations

from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest
from diffusers import GlmImagePipeline

from glm_grpo.errors import DataError
from glm_grpo.training.data.entries import make_entry
from glm_grpo.training.data.files import Row
from rewards.texts import find_quoted_texts, is_blank

FOLDER = Path("/data/set")


def row(**fields: object) -> Row:
    return Row("list, line 7", fields, FOLDER)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a sign", ()),
        ('a sign that says "STOP"', ("STOP",)),
        ("a sign that says 'STOP'", ("STOP",)),
        ("a sign that says \u201cSTOP\u201d", ("STOP",)),
        ("a sign that says \u300cSTOP\u300d", ("STOP",)),
        ('"UP" over "DOWN"', ("UP", "DOWN")),
        ('"UP" over "UP"', ("UP", "UP")),
        ('a poster that says "GRAND OPENING"', ("GRAND OPENING",)),
        # By kind of mark first, as the pipeline does, then by place.
        ("\"C\" \u201cB\u201d 'A' \u300cD\u300d", ("A", "B", "C", "D")),
        ('empty "" and blank " "', ()),
        ('unclosed "STOP', ()),
        ("a dog's bowl, a cat's bowl", ("s bowl, a cat",)),
        ('" padded "', ("padded",)),
    ],
)
def test_find_quoted_texts_reads_every_kind_of_mark(prompt: str, texts: tuple[str, ...]) -> None:
    assert find_quoted_texts(prompt) == texts


@pytest.mark.parametrize(
    "prompt",
    [
        "plain",
        '"C" \u201cB\u201d \'A\' \u300cD\u300d "E"',
        "a dog's \"WORD\" isn't",
        "\u201cnested \u201cinner\u201d outer\u201d \u300ca\u300cb\u300d",
    ],
)
def test_find_quoted_texts_is_the_rule_of_the_stock_pipeline(prompt: str) -> None:
    (glyphs,) = GlmImagePipeline.get_glyph_texts(None, prompt)
    assert find_quoted_texts(prompt) == tuple(glyph.strip() for glyph in glyphs)


def test_make_entry_fills_what_a_row_leaves_out() -> None:
    entry = make_entry(row(prompt='  a sign "UP" \n', category="signs"), 12)
    assert (entry.prompt_id, entry.prompt) == ("00012", 'a sign "UP"')
    assert entry.texts == ("UP",)
    assert entry.target is None
    assert entry.origin == "list, line 7"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("DOWN", ("DOWN",)),
        (" TWO\nLINES ", ("TWO\nLINES",)),
        (["DOWN", " IN "], ("DOWN", "IN")),
        (("DOWN",), ("DOWN",)),
        # Nothing is said about the text: the quotation stands.
        (None, ("UP",)),
        # Said, and there is none.
        ("", ()),
        ("  ", ()),
        ([], ()),
    ],
)
def test_make_entry_takes_the_text_field_over_the_quotation(
    text: object, expected: tuple[str, ...]
) -> None:
    assert make_entry(row(prompt='a sign "UP"', text=text), 0).texts == expected


@pytest.mark.parametrize(
    ("cell", "texts"),
    [
        ('["DOWN", "IN"]', ("DOWN", "IN")),
        ("[]", ()),
        ("[SALE]", ("[SALE]",)),
        ("DOWN", ("DOWN",)),
    ],
)
def test_a_cell_may_hold_a_list_of_texts(cell: str, texts: tuple[str, ...]) -> None:
    fields: dict[str, object] = {"prompt": 'a sign "UP"', "text": cell}
    assert make_entry(Row("a.csv, line 2", fields, FOLDER, has_cells=True), 0).texts == texts
    # Elsewhere a list is a list.
    assert make_entry(row(**fields), 0).texts == (cell,)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("sign-1", "sign-1"), (17, "17"), (" a b ", "a b"), ("", "00003"), (None, "00003")],
)
def test_make_entry_names_the_prompt(given: object, expected: str) -> None:
    assert make_entry(row(prompt="x", id=given), 3).prompt_id == expected


@pytest.mark.parametrize("field", ["target", "target_image", "file_name", "image"])
def test_make_entry_finds_the_picture_in_the_folder_of_the_file(field: str) -> None:
    entry = make_entry(row(prompt="x", **{field: "pictures/../a b.png"}), 0)
    assert entry.target == FOLDER / "a b.png"


def test_make_entry_takes_absolute_paths_inside_the_folder() -> None:
    assert make_entry(row(prompt="x", target="/data/set/a.png"), 0).target == FOLDER / "a.png"


def test_make_entry_resolves_relative_folders_before_it_compares() -> None:
    inside = make_entry(Row("here", {"prompt": "x", "target": "a.png"}, Path(".")), 0)
    assert inside.target == Path.cwd() / "a.png"
    with pytest.raises(DataError, match="outside"):
        make_entry(Row("here", {"prompt": "x", "target": "../a.png"}, Path(".")), 0)


def test_make_entry_takes_embedded_pictures() -> None:
    assert make_entry(row(prompt="x", image={"bytes": b"abc", "path": None}), 0).target == b"abc"
    by_path = {"bytes": None, "path": "a.png"}
    assert make_entry(row(prompt="x", target=by_path), 0).target == FOLDER / "a.png"


def test_make_entry_takes_pictures_that_were_fetched_from_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    for path in (tmp_path / "hub" / "a.png", tmp_path / "datasets" / "b" / "a.png"):
        row = Row("owner/name, row 1", {"prompt": "x", "image": {"path": str(path)}}, None)
        assert make_entry(row, 0).target == path
    # A table of the hub is to show no picture of this machine's.
    for outside in (str(tmp_path / "a.png"), "/etc/passwd", "../a.png", "../hub2/a.png"):
        row = Row("owner/name, row 1", {"prompt": "x", "target": outside}, None)
        with pytest.raises(DataError, match="row 1: 'target' is '.*', outside what was fetched"):
            make_entry(row, 0)


def test_make_entry_leaves_an_image_column_of_addresses_alone() -> None:
    assert make_entry(row(prompt="x", image="https://example.org/a.png"), 0).target is None
    of_the_hub = Row("owner/name, row 1", {"prompt": "x", "image": "a.png"}, None)
    assert make_entry(of_the_hub, 0).target is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "'prompt' is missing or blank"),
        ({"promt": "x", "id": "a"}, r"every row needs one \(did you mean 'prompt' by 'promt'\?\)$"),
        ({"prompt": None, "id": "a"}, "'prompt' is missing or blank; every row needs one$"),
        ({"prompt": " \t"}, "'prompt' is missing or blank"),
        ({"prompt": "\ufe0f\ufe0f"}, "'prompt' is missing or blank"),
        ({"prompt": "x", "text": ["UP", "\u3164"]}, "'text' holds .*not blank"),
        ({"prompt": 5}, "'prompt' is 5; it must be text"),
        ({"prompt": "x", "text": 5}, "'text' is 5; it must be text"),
        ({"prompt": "x", "text": {"a": "UP"}}, "'text' is .*; it must be text"),
        ({"prompt": "x", "text": ["UP", 5]}, "'text' holds 5; .*remove it"),
        ({"prompt": "x", "text": ["UP", None]}, "'text' holds None; "),
        ({"prompt": "x", "text": [["UP"]]}, r"'text' holds \['UP'\]; "),
        ({"prompt": "x", "text": ["UP", " "]}, "'text' holds ' '; .*not blank"),
        ({"prompt": "x", "text": ["UP", ""]}, "'text' holds ''; "),
        ({"prompt": "x", "text": ["a\0b"]}, "'text' holds .*null characters"),
        ({"prompt": "x", "text": ["a\ud800b"]}, "'text' holds .*surrogate"),
        ({"prompt": "a\0b"}, "null character"),
        ({"prompt": "a\ud800b"}, "surrogate"),
        ({"prompt": "x", "id": 1.5}, "'id' is 1.5"),
        ({"prompt": "x", "id": True}, "'id' is True"),
        ({"prompt": "x", "id": "../x"}, "names files of the run"),
        ({"prompt": "x", "id": "a\\b"}, "names files of the run"),
        ({"prompt": "x", "id": ".."}, "names files of the run"),
        ({"prompt": "x", "id": "a\nb"}, "names files of the run"),
        ({"prompt": "x", "id": "i" * 101}, "at most 100"),
        ({"prompt": "x", "target": "../a.png"}, "'target' is '../a.png', outside /data/set"),
        ({"prompt": "x", "target": "b/../../a.png"}, "outside /data/set"),
        ({"prompt": "x", "target": "/etc/passwd"}, "outside /data/set"),
        ({"prompt": "x", "target": "/data/set2/a.png"}, "outside /data/set"),
        ({"prompt": "x", "target": "a.png", "file_name": "b.png"}, "target and file_name both"),
        ({"prompt": "x", "target": 3}, "it must be the path of a picture"),
        ({"prompt": "x", "target": "a\0.png"}, "it must be the path of a picture"),
        ({"prompt": "x", "image": {"bytes": None, "path": None}}, "must be the path of a picture"),
    ],
)
def test_make_entry_refuses_what_it_cannot_use(fields: dict[str, object], named: str) -> None:
    with pytest.raises(DataError, match=f"^list, line 7: .*{named}"):
        make_entry(row(**fields), 0)


@pytest.mark.parametrize(
    "text",
    [
        *("", " \t\n", "\u3000\u00a0"),  # spaces
        *("\u200b\u200d\ufeff", "\u2060\u00ad", "\x07\x1b"),  # of no width, and controls
        *("\ufe0f", "\ufe00\U000e0100", "\u034f\u180b"),  # selectors and joiners
        *("\u115f\u1160", "\u3164", "\uffa0"),  # Hangul fillers
        *("\u2800\u2800", "\U0001d159", "\u17b4\u17b5"),
        *("\u0301", "\U000e0041", "\ue000", "\ufff9"),  # an accent alone, a tag, private use
    ],
    ids=ascii,
)
def test_text_of_which_nothing_is_seen_is_blank(text: str) -> None:
    assert is_blank(text)


@pytest.mark.parametrize(
    "text",
    [
        "a",
        ".",
        "\u2801",
        "\ud55c\uae00",
        "\u2764\ufe0f",
        "e\u0301",
        "\u0e01",
        "\u3042",
        "\u0967",
        "\u200b!",
    ],
    ids=ascii,
)
def test_text_of_which_something_is_seen_is_not(text: str) -> None:
    assert not is_blank(text)


def test_every_character_that_renderers_leave_out_is_blank() -> None:
    # Default_Ignorable_Code_Point of Unicode 16, DerivedCoreProperties.txt.
    ranges = [
        *((0xAD, 0xAD), (0x34F, 0x34F), (0x61C, 0x61C), (0x115F, 0x1160), (0x17B4, 0x17B5)),
        *((0x180B, 0x180F), (0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F)),
        *((0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0)),
        *((0xFFF0, 0xFFF8), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF)),
    ]
    assert all(is_blank(chr(code)) for low, high in ranges for code in range(low, high + 1))
