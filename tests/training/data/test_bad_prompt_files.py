"""Prompts files as strangers write them: each is refused in words, or read as it is meant."""

from __future__ import annotations

import io
import string
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_grpo.errors import DataError
from glm_grpo.run.folder import safe_name
from glm_grpo.training.data.prompts import PromptSet
from tests.generated import GENERATED
from tests.training.data.prompt_files import lines, load, written


def table(**columns: object) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), stream)
    return stream.getvalue()


def repeated_columns() -> bytes:
    stream = io.BytesIO()
    columns = [pyarrow.array(["x"]), pyarrow.array(["y"])]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_arrays(columns, names=["prompt", "prompt"]), stream
    )
    return stream.getvalue()


def claiming_rows(count: int) -> bytes:
    """As many rows as are said to be there, in a few kilobytes."""
    indices = pyarrow.array(np.zeros(count, np.int8))
    return table(prompt=pyarrow.DictionaryArray.from_arrays(indices, ["x"]))


NOT_UTF8 = "is not UTF-8; save the file as UTF-8"
NULL = "holds a null character; save the file as UTF-8 text"
ONE_OBJECT = "not valid JSON .*; write one object a line"
PLAIN_OBJECT = "not usable JSON .*; write a plain object"
NO_PROMPTS = "holds no prompts; it needs at least one"
WRITE_AGAIN = "not a readable parquet file .*; write it again"
MISSING = "'prompt' is missing or blank; every row needs one"
SOUND_TABLE = table(prompt=["a red sign", "a blue sign"] * 50)

REFUSED_TEXT = [
    ("utf-16", "a sign\n".encode("utf-16"), rf"line 1: byte 0xff at column 1 {NOT_UTF8}"),
    ("utf-16 without a mark", "a sign".encode("utf-16-le"), f"line 1: {NULL}"),
    ("utf-16 big-endian", b"\xfe\xff" + "a".encode("utf-16-be"), f"line 1: byte 0xfe .*{NOT_UTF8}"),
    ("utf-32", "a sign".encode("utf-32"), f"byte 0xff .*{NOT_UTF8}"),
    ("utf-32 without a mark", "a sign".encode("utf-32-be"), NULL),
    (
        "latin-1",
        "fine\nein Schild für\n".encode("latin-1"),
        f"line 2: byte 0xfc at column 13 {NOT_UTF8}",
    ),
    ("windows-1252", "a “sign”".encode("cp1252"), f"line 1: byte 0x93 at column 3 {NOT_UTF8}"),
    ("shift-jis", "猫".encode("shift-jis"), f"byte 0x94 .*{NOT_UTF8}"),
    ("gb18030", "猫咪".encode("gb18030"), f"byte 0xdf .*{NOT_UTF8}"),
    ("a lone byte", b"ok\nok\nbad \xff\n", f"line 3: byte 0xff at column 5 {NOT_UTF8}"),
    ("an overlong form", b"a \xc0\xaf b", f"byte 0xc0 at column 3 {NOT_UTF8}"),
    ("half a surrogate pair", b"a \xed\xa0\x80 b", f"byte 0xed at column 3 {NOT_UTF8}"),
    ("past the last code point", b"\xf4\x90\x80\x80", f"byte 0xf4 at column 1 {NOT_UTF8}"),
    ("a torn character", b"a \xe7\x8c", f"byte 0xe7 at column 3 {NOT_UTF8}"),
    ("two marks", b"\xef\xbb\xbf\xef\xbb\xbf\n", MISSING),
    ("null", b"a\0b\n", f"line 1: {NULL}"),
    ("nulls alone", b"\0" * 1000, NULL),
    (
        "line ends of old computers",
        b"a sign\ra house\r",
        "line 1: .*return that ends no line; save",
    ),
    ("empty", b"", NO_PROMPTS),
    ("a mark alone", b"\xef\xbb\xbf", NO_PROMPTS),
    ("blank lines", b" \n\t\n\r\n\n", NO_PROMPTS),
    ("wide blanks", "\u3000\n\u00a0\n".encode(), NO_PROMPTS),
    ("blanks of no width", "a sign\n\u200b\u200d\ufeff\n".encode(), f"line 2: {MISSING}"),
    ("a long prompt", b"a" * 20_001, "'prompt' has 20001 characters; use at most 20000"),
]

REFUSED_JSONL = [
    ("a mark in the middle", b'{"prompt": "x"}\n\xef\xbb\xbf{"prompt": "y"}', "line 2, .*BOM"),
    ("latin-1", b'{"prompt": "caf\xe9"}', f"byte 0xe9 at column 16 {NOT_UTF8}"),
    ("utf-16", '{"prompt": "x"}'.encode("utf-16"), NOT_UTF8),
    ("a null byte", b'{"prompt": "a\0b"}', NULL),
    ("an escaped null", r'{"prompt": "a\u0000b"}', "null character .*; remove it"),
    ("half a surrogate pair", r'{"prompt": "a\ud800b"}', "half a surrogate pair; remove it"),
    ("a line end in a string", '{"prompt": "a\nb"}', f"line 1, column 12: {ONE_OBJECT}"),
    ("a torn line", '{"prompt": "x"}\n{"prompt": "y', f"line 2, column 12: {ONE_OBJECT}"),
    ("no JSON", "a sign", f"line 1, column 1: {ONE_OBJECT}"),
    ("Python", "{'prompt': 'x'}", f"column 2: {ONE_OBJECT}"),
    ("a comma too many", '{"prompt": "x",}', ONE_OBJECT),
    ("a comment", '{"prompt": "x"} // a sign', ONE_OBJECT),
    ("two objects", '{"prompt": "x"} {"prompt": "y"}', f"column 17: {ONE_OBJECT}"),
    ("one list of all", '[{"prompt": "x"}]', 'is not an object; write {"prompt"'),
    ("text", '"a sign"', "'\"a sign\"' is not an object; write"),
    ("null", "null", "'null' is not an object"),
    ("NaN", "NaN", "'NaN' is not an object"),
    ("brackets", b"[" * 1_000_000, f"line 1: {PLAIN_OBJECT}"),
    ("braces", b'{"a":' * 200_000, f"line 1: {PLAIN_OBJECT}"),
    ("a huge number", b'{"prompt": "x", "seed": ' + b"9" * 5_000 + b"}", PLAIN_OBJECT),
    ("a key twice", '{"prompt": "x", "prompt": "y"}', "key 'prompt' stands twice .*every key once"),
    ("a key twice inside", '{"prompt": "x", "a": {"b": 1, "b": 2}}', "key 'b' stands twice"),
    ("no prompt", '{"text": "x"}', f"line 1: {MISSING}"),
    ("another name", '{"Prompt": "x"}', MISSING),
    ("prompt null", '{"prompt": null}', MISSING),
    ("prompt blank", '{"prompt": " \\t"}', MISSING),
    ("prompt NaN", '{"prompt": NaN}', "'prompt' is nan; it must be text"),
    ("prompt infinite", '{"prompt": 1e999}', "'prompt' is inf; it must be text"),
    ("prompt list", '{"prompt": ["x"]}', r"'prompt' is \['x'\]; it must be text"),
    ("prompt true", '{"prompt": true}', "'prompt' is True; it must be text"),
    (
        "text deep",
        '{"prompt": "x", "text": ' + "[" * 900 + "]" * 900 + "}",
        "'text' holds .*remove",
    ),
    ("text number", '{"prompt": "x", "text": 5}', "'text' is 5; it must be text"),
    ("texts long", lines({"prompt": "x", "text": ["y" * 9_999] * 3}), "'text' has more than 20000"),
    ("target number", lines({"prompt": "x", "target": 5}), "'target' is 5; it must be the path"),
    (
        "two pictures",
        lines({"prompt": "x", "target": "a", "file_name": "b"}),
        "both name .*; keep one",
    ),
]

REFUSED_CSV = [
    ("no header", "a red sign\na blue sign\n", "the header .* has no column 'prompt'; name the"),
    ("semicolons", "prompt;id\nx;1\n", r"the header \['prompt;id'\] has no column"),
    ("tabs", "id\tprompt\n1\tx\n", "has no column 'prompt'"),
    ("a name twice", "prompt,id,id\nx,1,2\n", "names a column twice; rename one"),
    ("a cell too many", "prompt,id\na sign, red,1\n", "line 2: 3 cells under a header of 2; put"),
    ("a cell too few", "prompt,id\nx\n", "line 2: 1 cells under a header of 2"),
    ("a quote left open", 'prompt\nx\n"open\ny\n', "line 3: not valid CSV .*; separate cells"),
    ("a quote inside", 'prompt\n"a "red" sign"\n', "line 2: not valid CSV .*double the quotes"),
    ("a huge cell", "prompt\n" + "x" * 200_000, "line 2: not valid CSV .*field limit"),
    ("a header alone", "prompt,id\n", NO_PROMPTS),
    ("blank cell", "prompt,id\n ,1\n", f"line 2: {MISSING}"),
    ("latin-1", "prompt\nfür\n".encode("latin-1"), f"line 2: byte 0xfc .*{NOT_UTF8}"),
    (
        "a thousand columns",
        ",".join(f"c{n}" for n in range(1000)),
        r"\['c0', 'c1'.*\.\.\.\] has no",
    ),
]

REFUSED_PARQUET = [
    ("empty", b"", WRITE_AGAIN),
    ("text", b"prompt\nx\n", WRITE_AGAIN),
    ("magic alone", b"PAR1PAR1", WRITE_AGAIN),
    ("torn", SOUND_TABLE[: len(SOUND_TABLE) // 2], WRITE_AGAIN),
    ("without an end", SOUND_TABLE[:-4], WRITE_AGAIN),
    ("without a start", SOUND_TABLE[200:], WRITE_AGAIN),
    ("wrong columns", table(caption=["x"]), r"\['caption'\] has no column 'prompt'; name"),
    ("a column twice", repeated_columns(), "names a column twice; rename one"),
    ("no rows", table(prompt=pyarrow.array([], pyarrow.string())), NO_PROMPTS),
    ("numbers", table(prompt=[1, 2]), "row 1: 'prompt' is 1; it must be text"),
    ("bytes", table(prompt=[b"x" * 1000]), "row 1: 'prompt' is b'x+'; it must be text"),
    ("null", table(prompt=["x", None]), f"row 2: {MISSING}"),
    ("lists", table(prompt=[["x"]]), "'prompt' is .*; it must be text"),
    (
        "bytes said to be text",
        table(prompt=pyarrow.array([b"\xff\xfe"], pyarrow.binary()).view(pyarrow.utf8())),
        WRITE_AGAIN,
    ),
    (
        "dates past the last year",
        table(prompt=["x"], id=pyarrow.array([2**31 - 1], pyarrow.int32()).view(pyarrow.date32())),
        WRITE_AGAIN,
    ),
    ("fractions for ids", table(prompt=["x"], id=[1.5]), "'id' is 1.5; it must be text"),
    ("ten million rows", claiming_rows(10_000_001), "more than 10000000 rows; split it"),
    ("a torn picture", table(prompt=["x"], image=[{"bytes": b"PNG"}]), "embedded picture cannot"),
]

REFUSED = [
    pytest.param(f"prompts.{suffix}", content, named, id=f"{suffix}: {name}")
    for suffix, cases in (
        ("txt", REFUSED_TEXT),
        ("jsonl", REFUSED_JSONL),
        ("csv", REFUSED_CSV),
        ("parquet", REFUSED_PARQUET),
    )
    for name, content, named in cases
]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("name", "content", "named"), REFUSED)
def test_a_bad_file_is_refused_with_its_line_and_a_remedy(
    tmp_path: Path, name: str, content: str | bytes, named: str
) -> None:
    path = written(tmp_path / name, content)
    with pytest.raises(DataError, match=named) as caught:
        load(path)
    assert str(caught.value).startswith(str(tmp_path))
    # Whatever the file holds, the message fits on a screen.
    assert len(str(caught.value)) - len(str(path)) < 500


READ = [
    ("a mark", "a.txt", b"\xef\xbb\xbfa sign\n", ["a sign"]),
    ("line ends of Windows", "a.txt", b"a\r\nb\r\n", ["a", "b"]),
    ("no last line end", "a.txt", b"a\nb", ["a", "b"]),
    ("other line ends", "a.txt", "a\u2028b\u0085c\x0bd\n".encode(), ["a\u2028b\u0085c\x0bd"]),
    (
        "beyond the first plane",
        "a.txt",
        "\U0001f408 \U00020000\n".encode(),
        ["\U0001f408 \U00020000"],
    ),
    ("right to left", "a.txt", "\u202e\u05e9\u05dc\u05d8\n".encode(), ["\u202e\u05e9\u05dc\u05d8"]),
    ("the longest prompt", "a.txt", b"a" * 20_000, ["a" * 20_000]),
    (
        "markup",
        "a.txt",
        b"<script>alert(1)</script> $(rm -rf /)",
        ["<script>alert(1)</script> $(rm -rf /)"],
    ),
    ("capital suffix", "A.TXT", b"a\n", ["a"]),
    ("a mark", "a.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\r\n', ["a"]),
    ("escapes", "a.jsonl", rb'{"prompt": "\ud83d\udc08 \"\n"}', ['\U0001f408 "']),
    ("numbers nobody reads", "a.jsonl", b'{"prompt": "a", "x": [NaN, 1e999, -0]}', ["a"]),
    ("line ends in cells", "a.csv", b'prompt,x\r\n"a\r\nb",1\r\n', ["a\nb"]),
    ("a mark", "a.csv", b"\xef\xbb\xbfprompt\na\n", ["a"]),
    ("quotes", "a.csv", b'prompt\n"a ""b"", c"\n', ['a "b", c']),
    ("dictionary", "a.parquet", claiming_rows(3), ["x", "x", "x"]),
    (
        "columns nobody reads",
        "a.parquet",
        table(prompt=["a"], day=pyarrow.array([2**31 - 1], pyarrow.int32()).view(pyarrow.date32())),
        ["a"],
    ),
    (
        "large strings",
        "a.parquet",
        table(prompt=pyarrow.array(["a"], pyarrow.large_string())),
        ["a"],
    ),
]


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [pytest.param(*case, id=f"{case[0]}: {what}") for what, *case in READ],
)
def test_an_odd_file_is_read_as_it_is_meant(
    tmp_path: Path, name: str, content: bytes, prompts: list[str]
) -> None:
    assert load(written(tmp_path / name, content)).captions() == prompts


def load_or_refuse(path: Path) -> PromptSet | None:
    """Whatever is neither DataError nor a set of usable prompts fails the test that called."""
    try:
        prompts = load(path)
    except DataError:
        return None
    ids = [entry.prompt_id for entry in prompts.entries]
    assert len(set(ids)) == len(ids) > 0
    assert all(safe_name(prompt_id) for prompt_id in ids)
    assert all(prompt.strip() == prompt != "" for prompt in prompts.captions())
    assert not any("\0" in prompt for prompt in prompts.captions())
    return prompts


@GENERATED
@given(suffix=st.sampled_from(["txt", "jsonl", "csv", "parquet"]), content=st.binary(max_size=300))
def test_bytes_of_any_kind_are_read_or_refused(tmp_path: Path, suffix: str, content: bytes) -> None:
    load_or_refuse(written(tmp_path / f"a.{suffix}", content))


@GENERATED
@given(
    content=st.text(
        st.sampled_from("ab \n\r\t\"',;{}[]:\\\0\ufeff\u2028\u200b猫")
        | st.sampled_from(string.digits)
    ),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "cp932"]),
    suffix=st.sampled_from(["txt", "jsonl", "csv"]),
)
def test_text_in_any_encoding_is_read_or_refused(
    tmp_path: Path, content: str, encoding: str, suffix: str
) -> None:
    load_or_refuse(written(tmp_path / f"a.{suffix}", content.encode(encoding, "replace")))


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=20)
    | st.sampled_from(["../a.png", "/etc/passwd", "a.png", "..", ".", "\0", " "]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
ROWS = st.lists(
    st.dictionaries(
        st.sampled_from(["prompt", "id", "text", "target", "file_name", "image", "x"]),
        JSON_VALUES,
        max_size=5,
    ),
    max_size=4,
)


@settings(GENERATED, max_examples=150)
@given(rows=ROWS, is_prompt_added=st.booleans())
def test_rows_of_any_values_are_read_or_refused(
    tmp_path: Path, rows: list[dict[str, object]], is_prompt_added: bool
) -> None:
    if is_prompt_added:
        rows = [{**row, "prompt": "a sign"} for row in rows]
    prompts = load_or_refuse(written(tmp_path / "a.jsonl", lines(*rows)))
    if prompts is not None:
        assert len(prompts) == len(rows)


def flipped(content: bytes, places: Iterable[tuple[int, int]]) -> bytes:
    changed = bytearray(content)
    for place, value in places:
        changed[place % len(changed)] = value
    return bytes(changed)


@GENERATED
@given(
    places=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_a_parquet_file_with_changed_bytes_is_read_or_refused(
    tmp_path: Path, places: list[tuple[int, int]]
) -> None:
    load_or_refuse(written(tmp_path / "a.parquet", flipped(SOUND_TABLE, places)))
