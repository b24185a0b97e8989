"""Checkpoints that are torn, bit-flipped, incomplete, or of another version or model.

A damaged one is found by its checksum and named, and the one before it is used; where there is no
other, or it is of something else, the run is refused and nothing in its folder is changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm_grpo.errors import CheckpointError
from glm_grpo.run.folder import RunFolder
from glm_grpo.training.checkpoint.files import load_checkpoint

LENGTH = ("train.steps=3", "train.keep_checkpoints=2")
FILES = ("policy.safetensors", "optimizer.safetensors", "checkpoint.json")
ADAPTER = "model.adapter={{rank:{rank},alpha:8}}"

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def two_saved(train_server: Any, tmp_path_factory: Any) -> Path:
    """A killed run with two checkpoints; the undisturbed one is in `watched` beside it."""
    folder = tmp_path_factory.mktemp("saved")
    watched = train_server.finish(folder / "watched" / "day" / "run", *LENGTH)
    number = watched.number_of("images/.step-000003")
    run_dir = folder / "killed" / "day" / "run"
    killed = train_server.start(run_dir, *LENGTH, signals={number: signal.SIGKILL})
    assert killed.wait() == -signal.SIGKILL, killed.said()
    names = sorted(path.name for path in RunFolder(run_dir).checkpoints_dir.iterdir())
    assert names == ["step-000001", "step-000002"]
    return run_dir


@pytest.fixture(scope="module")
def expected(two_saved: Path, record_of: Any) -> dict[str, Any]:
    """What the undisturbed run left."""
    return record_of(two_saved.parents[2] / "watched" / "day" / "run")


@pytest.fixture
def run_dir(two_saved: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(two_saved, tmp_path / "day" / "run"))


def truncate(name: str, part: float) -> Damage:
    def damage(checkpoint: Path) -> None:
        file = checkpoint / name
        os.truncate(file, int(file.stat().st_size * part))

    return damage


def flip(name: str, seed: int) -> Damage:
    def damage(checkpoint: Path) -> None:
        content = bytearray((checkpoint / name).read_bytes())
        place = random.Random(seed).randrange(len(content))
        content[place] ^= 1 << (place % 8)
        (checkpoint / name).write_bytes(content)

    return damage


def remove(name: str) -> Damage:
    return lambda checkpoint: (checkpoint / name).unlink()


def files_of(run_dir: Path) -> dict[str, str]:
    """Content of all files but the lock, which says who came last."""
    return {
        str(path.relative_to(run_dir)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in run_dir.rglob("*")
        if path.is_file() and path.name != "run.lock"
    }


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("policy.safetensors", truncate("policy.safetensors", 0.7)),
        ("optimizer.safetensors", flip("optimizer.safetensors", 1)),
        pytest.param(
            *("checkpoint.json", truncate("checkpoint.json", 0.5)), marks=pytest.mark.long
        ),
        pytest.param(*("policy.safetensors", remove("policy.safetensors")), marks=pytest.mark.long),
        ("checkpoint.json", remove("checkpoint.json")),
    ],
    ids=["torn weights", "flipped bit", "torn manifest", "missing weights", "missing manifest"],
)
def test_damaged_checkpoint_is_named_and_the_one_before_it_used(
    train_server: Any,
    run_dir: Path,
    expected: dict[str, Any],
    record_of: Any,
    name: str,
    damage: Damage,
) -> None:
    newest = RunFolder(run_dir).checkpoint_dir(2)
    damage(newest)

    run = train_server.start(run_dir, *LENGTH)

    assert run.wait() == 0, run.said()
    assert f"Passing over a damaged checkpoint. {newest / name} " in run.said()
    assert f"going on with {run_dir} from step-000001" in run.said()
    assert record_of(run_dir) == expected


@pytest.mark.parametrize("name", FILES)
def test_bit_flipped_at_any_place_is_found(run_dir: Path, name: str) -> None:
    checkpoint = RunFolder(run_dir).checkpoint_dir(2)
    content = (checkpoint / name).read_bytes()
    for seed in range(30):
        flip(name, seed)(checkpoint)
        with pytest.raises(CheckpointError, match=rf"{name} (is damaged|is missing|lists|has)"):
            load_checkpoint(checkpoint)
        (checkpoint / name).write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_file_cut_at_any_place_is_found(run_dir: Path, name: str) -> None:
    checkpoint = RunFolder(run_dir).checkpoint_dir(2)
    content = (checkpoint / name).read_bytes()
    places = random.Random(0)
    for _ in range(30):
        (checkpoint / name).write_bytes(content[: places.randrange(len(content))])
        with pytest.raises(CheckpointError, match=name):
            load_checkpoint(checkpoint)


def assert_refused(train_server: Any, run_dir: Path, *says: str, overrides: Any = ()) -> None:
    before = files_of(run_dir)
    run = train_server.start(run_dir, *LENGTH, *overrides)
    assert run.wait() == 2, run.said()
    last = run.said().splitlines()[-1]
    assert re.match(r"Checkpoint(Format)?Error: ", last)
    for text in says:
        assert text in last
    assert "Traceback" not in run.said()
    assert files_of(run_dir) == before


def test_run_whose_checkpoints_are_all_damaged_is_refused_and_keeps_its_records(
    train_server: Any, run_dir: Path
) -> None:
    folder = RunFolder(run_dir)
    flip("policy.safetensors", 0)(folder.checkpoint_dir(1))
    remove("checkpoint.json")(folder.checkpoint_dir(2))
    assert_refused(train_server, run_dir, "is whole", "restore one from a copy")


def test_checkpoint_that_is_named_and_damaged_is_refused(train_server: Any, run_dir: Path) -> None:
    checkpoint = RunFolder(run_dir).checkpoint_dir(2)
    flip("optimizer.safetensors", 0)(checkpoint)
    assert_refused(
        train_server,
        run_dir,
        "optimizer.safetensors is damaged: its SHA-256 differs",
        "Resume from another checkpoint",
        overrides=[f"train.resume={checkpoint}"],
    )


def change_manifest(checkpoint: Path, **values: Any) -> None:
    """As another version would have written it, checksum included."""
    file = checkpoint / "checkpoint.json"
    manifest = json.loads(file.read_text()) | values
    del manifest["sha256"]
    content = json.dumps(manifest, sort_keys=True).encode()
    file.write_text(json.dumps(manifest | {"sha256": hashlib.sha256(content).hexdigest()}))


@pytest.mark.parametrize("version", [1, 999])
def test_checkpoint_of_another_version_is_refused(
    train_server: Any, run_dir: Path, version: int
) -> None:
    change_manifest(RunFolder(run_dir).checkpoint_dir(2), format=version)
    assert_refused(train_server, run_dir, f"has format {version}", "Use the version of glm-grpo")


def put_in(source: Path, run_dir: Path, *names: str) -> None:
    """Puts files of another run's checkpoint in the place of the newest one's, checksums too."""
    theirs, ours = (RunFolder(each).checkpoint_dir(2) for each in (source, run_dir))
    listed = json.loads((ours / "checkpoint.json").read_text())
    found = json.loads((theirs / "checkpoint.json").read_text())
    for name in names:
        shutil.copy(theirs / name, ours / name)
        listed["files"][name] = found["files"][name]
    change_manifest(ours, files=listed["files"], metadata=found["metadata"])


@pytest.fixture(scope="module")
def others(train_server: Any, two_saved: Path, tmp_path_factory: Any) -> dict[str, Path]:
    """Runs of other models: with adapters of two ranks, and with none."""
    folder = tmp_path_factory.mktemp("others")
    runs = {"no adapter": two_saved}
    for rank in (2, 4):
        runs[f"rank {rank}"] = folder / str(rank) / "day" / "run"
        settings = (*LENGTH, "train.steps=2", ADAPTER.format(rank=rank))
        train_server.finish(runs[f"rank {rank}"], *settings)
    return runs


@pytest.mark.parametrize(
    ("other", "names", "says", "remedy"),
    [
        ("no adapter", FILES[:2], "weights do not fit the model", "settings it was written with"),
        ("rank 4", FILES[:2], "weights do not fit the model", "settings it was written with"),
        # The weights are its own.
        ("no adapter", FILES[1:2], "The optimizer state ", "Resume with the configuration"),
        ("rank 4", FILES[1:2], "has shape", "Resume with the configuration"),
    ],
    ids=["other names", "other shapes", "other optimizer names", "other optimizer shapes"],
)
def test_checkpoint_of_another_model_is_refused(
    train_server: Any,
    others: dict[str, Path],
    tmp_path: Path,
    other: str,
    names: tuple[str, ...],
    says: str,
    remedy: str,
) -> None:
    run_dir = shutil.copytree(others["rank 2"], tmp_path / "adapted" / "day" / "run")
    put_in(others[other], run_dir, *names)
    settings = ("train.steps=2", ADAPTER.format(rank=2))
    assert_refused(train_server, run_dir, says, remedy, overrides=settings)
