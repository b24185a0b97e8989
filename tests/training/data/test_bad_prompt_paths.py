"""Names and paths that a prompts file gives, and places where none is: refused, or read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from glm_grpo.errors import DataError
from glm_grpo.run.folder import safe_name
from tests.generated import GENERATED
from tests.training.data.prompt_files import lines, load, written

NAMES_FILES = "names files of the run; use at most 100 printable characters, no slash, no dot"
BAD_IDS = [
    *("../x", "a/b", "/etc/passwd", "a\\b", "..\\x", ".", "..", "...", ".hidden", "/", "\\"),
    *("a\nb", "a\tb", "a\x1b[31m", "a\u202eb", "a\u200bb", "a\u2028b", "i" * 101, "猫" * 101),
    *(10**100, -(10**100), "\ufeff"),
]


@pytest.mark.parametrize("given_id", BAD_IDS, ids=lambda value: ascii(value)[:20])
def test_an_id_that_names_no_file_is_refused(tmp_path: Path, given_id: object) -> None:
    path = written(tmp_path / "a.jsonl", lines({"prompt": "x", "id": given_id}))
    with pytest.raises(DataError, match=f"line 1: id .* {NAMES_FILES}"):
        load(path)


@pytest.mark.parametrize(
    ("given_id", "named"),
    [
        ("a\0b", ".*null character .*; remove it"),
        ("a\ud800", ".*half a surrogate pair; remove it"),
        (1.5, "'id' is 1.5; it must be text"),
        (True, "'id' is True; it must be text"),
        (["a"], r"'id' is \['a'\]; it must be text"),
        ({"a": 1}, "'id' is .*; it must be text"),
        ("i" * 30_000, "'id' has 30000 characters; use at most"),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_an_id_that_is_no_text_is_refused(tmp_path: Path, given_id: object, named: str) -> None:
    path = written(tmp_path / "a.jsonl", lines({"prompt": "x", "id": given_id}))
    with pytest.raises(DataError, match=f"line 1: {named}"):
        load(path)


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        (["a", "a"], "line 2: id 'a' is that of .*line 1; ids must be unique"),
        (["a", " a "], "line 2: id 'a' is that of"),
        ([7, "7"], "line 2: id '7' is that of"),
        (["00001", None], "line 2: id '00001' is that of .*named by their position"),
        (["a", "b", "c", "b"], "line 4: id 'b' is that of .*line 2"),
    ],
)
def test_an_id_that_is_taken_is_refused(tmp_path: Path, ids: list[object], named: str) -> None:
    rows = [{"prompt": "x", "id": given_id} for given_id in ids]
    with pytest.raises(DataError, match=named):
        load(written(tmp_path / "a.jsonl", lines(*rows)))


def test_ids_that_only_look_alike_are_two_prompts_with_two_files(tmp_path: Path) -> None:
    # Composed and decomposed, capital and small, Latin and Cyrillic: a file system may take two of
    # them for one name, so none of them names a file as it stands.
    ids = ["caf\u00e9", "cafe\u0301", "CAFE", "cafe", "c\u0430fe", "猫" * 100, "con", "-rf", "a b"]
    rows = [{"prompt": "x", "id": given_id} for given_id in ids]
    prompts = load(written(tmp_path / "a.jsonl", lines(*rows)))
    assert [prompts[index].prompt_id for index in range(len(ids))] == ids
    names = {safe_name(given_id) for given_id in ids}
    assert len(names) == len({name.lower() for name in names}) == len(ids)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,120}", name) for name in names)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with a picture in it, beside one that it does not own."""
    folder = tmp_path / "data"
    (folder / "pictures").mkdir(parents=True)
    Image.new("RGB", (32, 32), "red").save(folder / "pictures" / "red.png")
    Image.new("RGB", (32, 32), "blue").save(tmp_path / "secret.png")
    (tmp_path / "data-2").mkdir()
    Image.new("RGB", (32, 32), "blue").save(tmp_path / "data-2" / "other.png")
    return folder


CLIMBING = [
    *(
        "../secret.png",
        "pictures/../../secret.png",
        "./../secret.png",
        "pictures/../../data-2/other.png",
    ),
    *(
        "../data-2/other.png",
        "..",
        "/",
        "/etc/passwd",
        "//etc/passwd",
        "/dev/zero",
        "/proc/self/mem",
    ),
    *("../" * 50 + "etc/passwd", "pictures/./.././../secret.png", "../data/../secret.png"),
]


@pytest.mark.parametrize("field", ["target", "file_name"])
@pytest.mark.parametrize("path", CLIMBING)
def test_a_picture_outside_the_folder_is_refused(data: Path, field: str, path: str) -> None:
    prompts = written(data / "metadata.jsonl", lines({"prompt": "x", field: path}))
    wanted = f"line 1: '{field}' is '.*', outside .*; put the picture into that folder"
    for place in (prompts, data):
        with pytest.raises(DataError, match=wanted):
            load(place)


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("pictures/none.png", "does not exist; paths are relative to the folder"),
        ("pictures", "a folder, a pipe or a device"),
        (".", "a folder, a pipe or a device"),
        ("pictures/red.png/x.png", "Not a directory"),
        ("~/secret.png", "does not exist"),
        ("$HOME/secret.png", "does not exist"),
        ("file:///etc/passwd", "does not exist"),
        ("https://example.org/a.png", "does not exist"),
        ("..\\secret.png", "does not exist"),
        ("pictures/%2e%2e/secret.png", "does not exist"),
        ("*.png", "does not exist"),
        ("x" * 300, "File name too long"),
        ("x/" * 3000, "must be the path of a picture"),
        ("a\0.png", "must be the path of a picture"),
        ("metadata.jsonl", "cannot be used .*; give a whole PNG"),
    ],
)
def test_a_path_that_leads_to_no_picture_is_refused(data: Path, path: str, named: str) -> None:
    prompts = written(data / "metadata.jsonl", lines({"prompt": "x", "target": path}))
    with pytest.raises(DataError, match=f"line 1: .*{named}"):
        load(prompts)


@pytest.mark.parametrize(
    "path", ["pictures/red.png", "./pictures//red.png", "../data/pictures/red.png", "ABSOLUTE"]
)
def test_a_path_that_stays_in_the_folder_is_read(data: Path, path: str) -> None:
    path = str(data / "pictures" / "red.png") if path == "ABSOLUTE" else path
    prompts = written(data / "metadata.jsonl", lines({"prompt": "x", "target": path}))
    target = load(prompts)[0].target
    assert target is not None
    assert target[:, 0, 0].tolist() == [255, 0, 0]


def test_links_of_the_folders_owner_are_followed(data: Path) -> None:
    # Paths come with the file, from whoever wrote it; links are made by who owns the disk, and
    # large pictures, and the cache of the hub, are commonly kept behind them.
    (data / "link.png").symlink_to(data.parent / "secret.png")
    (data / "elsewhere").symlink_to(data.parent / "data-2")
    rows = [{"prompt": "x", "target": path} for path in ("link.png", "elsewhere/other.png")]
    prompts = load(written(data / "metadata.jsonl", lines(*rows)))
    for index in range(2):
        target = prompts[index].target
        assert target is not None
        assert target[:, 0, 0].tolist() == [0, 0, 255]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("leads_to", "named"),
    [
        ("nowhere.png", "does not exist"),
        ("link.png", "symbolic links"),
        ("/dev/zero", "a folder, a pipe or a device"),
        ("/etc/passwd", "cannot be used"),
        ("pictures", "a folder, a pipe or a device"),
        ("pipe", "a folder, a pipe or a device"),
    ],
)
def test_a_link_that_leads_to_no_picture_is_refused(data: Path, leads_to: str, named: str) -> None:
    os.mkfifo(data / "pipe")
    (data / "link.png").symlink_to(data / leads_to)
    prompts = written(data / "metadata.jsonl", lines({"prompt": "x", "target": "link.png"}))
    with pytest.raises(DataError, match=f"line 1: .*{named}"):
        load(prompts)


def make_pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def make_link(path: Path, leads_to: str) -> Path:
    path.symlink_to(leads_to)
    return path


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


PLACES: list[tuple[str, Callable[[Path], Path | str], str]] = [
    ("a folder", lambda folder: make_folder(folder / "a.txt"), "holds neither metadata.jsonl nor"),
    (
        "a pipe",
        lambda folder: make_pipe(folder / "a.txt"),
        "a pipe, .*; save the prompts to a file",
    ),
    ("a device", lambda _: "/dev/zero", "a pipe, a socket or a device; save the prompts"),
    ("a link in a circle", lambda folder: make_link(folder / "a.txt", "a.txt"), "no such file"),
    ("a link to nothing", lambda folder: make_link(folder / "a.txt", "b.txt"), "no such file"),
    ("a link to a device", lambda folder: make_link(folder / "a.txt", "/dev/zero"), "a device"),
    # A regular file that fails when it is read, as one on a broken disk does.
    (
        "a disk error",
        lambda folder: make_link(folder / "a.txt", "/proc/self/mem"),
        "cannot be read",
    ),
    (
        "a long name",
        lambda _: "x" * 5_000 + ".txt",
        r"cannot be read \(File name too long\); check",
    ),
    ("a null", lambda _: "a\0.txt", r"no such file or folder in .*; give a prompts file"),
    ("nothing", lambda _: "", "holds neither|no such file"),
    ("below a file", lambda folder: written(folder / "a", "x") / "b.txt", "no such file"),
    ("another kind", lambda folder: written(folder / "a.json", "{}"), "use one of .txt, .jsonl"),
    ("no kind", lambda folder: written(folder / "prompts", "x"), "unknown kind of prompts file"),
    ("packed", lambda folder: written(folder / "a.txt.gz", b"\x1f\x8b"), "unknown kind"),
    (
        "an archive under another name",
        lambda f: written(f / "a.txt", b"PK\x03\x04\xff"),
        "is not UTF-8",
    ),
]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("place", "named"), [pytest.param(place, named, id=what) for what, place, named in PLACES]
)
def test_a_place_that_holds_no_prompts_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: Callable[[Path], Path | str],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=named) as caught:
        load(place(tmp_path))
    assert len(str(caught.value)) < 600


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", "x")
    path.chmod(0)
    with pytest.raises(DataError, match=r"cannot be read \(Permission denied\); check the path"):
        load(path)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["0.png", "0.jpg"], r"0.png: of the same number as 0.jpg; keep one picture a line"),
        (["0.png", "00.png"], "of the same number as"),
        (["0.png", "\u0660.png"], "of the same number as"),
        (["1.png"], "line 1: no picture .*0.png; pictures are counted from 0"),
        (["0.png"], "0.png cannot be used .a folder, a pipe or a device"),
    ],
)
def test_numbered_pictures_that_do_not_pair_are_refused(
    tmp_path: Path, names: list[str], named: str
) -> None:
    written(tmp_path / "prompts.txt", "x\n")
    (tmp_path / "target_images").mkdir()
    for name in names:
        os.mkfifo(tmp_path / "target_images" / name)
    with pytest.raises(DataError, match=named):
        load(tmp_path)


@GENERATED
@given(
    parts=st.lists(
        st.sampled_from(
            ["..", ".", "pictures", "red.png", "", "data", "data-2", "secret.png", "~"]
        ),
        min_size=1,
        max_size=7,
    ),
    is_absolute=st.booleans(),
)
def test_no_path_leads_out_of_the_folder(data: Path, parts: list[str], is_absolute: bool) -> None:
    path = "/" * is_absolute + "/".join(parts)
    try:
        prompts = load(written(data / "metadata.jsonl", lines({"prompt": "x", "target": path})))
    except DataError:
        return
    # The only picture inside is red; those outside are blue. A path of nothing names none.
    target = prompts[0].target
    assert path == "" if target is None else target[:, 0, 0].tolist() == [255, 0, 0]
