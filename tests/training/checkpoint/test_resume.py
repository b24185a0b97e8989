"""Which folder a run begins in or goes on with, and what it may not touch."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from glm_grpo.config import Config, compose_config, to_yaml
from glm_grpo.errors import CheckpointError, ConfigError, GlmGrpoError, StorageError
from glm_grpo.run.config import read_config
from glm_grpo.run.folder import RunFolder
from glm_grpo.training.checkpoint.files import load_checkpoint, save_checkpoint
from glm_grpo.training.checkpoint.resume import find_checkpoint, open_run
from glm_grpo.training.distributed.processes import Processes
from glm_grpo.training.recording.recorder import Recorder

CONFIGS = Path(__file__).parents[3] / "configs"
STATE = {
    "optimizer": {"state": {}, "groups": []},
    "updates": 3,
    "best_step": None,
    "best_total": None,
    "skipped_in_a_row": 0,
    "full_decode_from": None,
}
TENSORS = {"policy": {"a": torch.ones(2)}, "optimizer": {"state/0/step": torch.ones(1)}}


def compose(run_dir: Path, resume: str = "auto", *overrides: str) -> Config:
    settings = ["train.steps=3", f"train.resume={resume}", f"run_dir={run_dir}", *overrides]
    return compose_config(CONFIGS, "tiny", settings)


def make_run(path: Path, *, lines: int = 3, checkpoints: tuple[int, ...] = (3,)) -> RunFolder:
    """A run that recorded steps 0 to `lines`, with these checkpoints."""
    folder = RunFolder(path)
    folder.path.mkdir(parents=True)
    folder.config_path.write_text(to_yaml(compose(folder.path)))
    rows = [json.dumps({"step": step, "reward/mean": 0.5}) for step in range(lines + 1)]
    folder.metrics_path.write_text("\n".join(rows) + "\n")
    for step in range(1, lines + 1):
        for kept in (folder.rollout_path(step), folder.image_dir(step) / "p-0.png"):
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(b"kept")
    for step in checkpoints:
        save_checkpoint(folder, step=step, tensors=TENSORS, metadata=STATE)
    return folder


def files_of(path: Path) -> dict[str, str]:
    """All there is, but for the lock, which stays when a run ends."""
    return {
        str(each.relative_to(path)): hashlib.sha256(each.read_bytes()).hexdigest()
        for each in path.rglob("*")
        if each.is_file() and each.name != "run.lock"
    }


@pytest.fixture
def last_step_saved(tmp_path: Path) -> RunFolder:
    """A dated run with the checkpoint of its last step, 3, and no evaluation after it."""
    return make_run(tmp_path / "2026-01-01" / "10-00-00")


def test_open_run_goes_on_with_a_run_whose_last_evaluation_is_missing(
    tmp_path: Path, last_step_saved: RunFolder
) -> None:
    opened = open_run(compose(tmp_path / "2026-01-02" / "09-00-00"))
    assert opened.folder.path == last_step_saved.path
    assert opened.checkpoint is not None
    assert opened.checkpoint.step == 3


def test_a_run_that_has_done_more_steps_is_refused(last_step_saved: RunFolder) -> None:
    steady = ("optim.schedule=constant", "optim.warmup_steps=0")
    last_step_saved.config_path.write_text(to_yaml(compose(last_step_saved.path, "auto", *steady)))
    fewer = compose(last_step_saved.path, "auto", *steady, "train.steps=2")
    with pytest.raises(
        CheckpointError, match="train.steps = 2: .* has done 3; set it to 3 or more"
    ):
        open_run(fewer)


def test_open_run_begins_anew_beside_a_finished_run(
    tmp_path: Path, last_step_saved: RunFolder
) -> None:
    evaluation = last_step_saved.evaluation_path(3)
    evaluation.parent.mkdir()
    evaluation.touch()
    opened = open_run(compose(tmp_path / "2026-01-02" / "09-00-00"))
    assert opened.folder.path == tmp_path / "2026-01-02" / "09-00-00"
    assert opened.checkpoint is None


@pytest.mark.parametrize("content", [b"model: {path: '\xed\xa0\x80'}", b"rollout: [", b"", b"\0"])
def test_open_run_begins_anew_beside_a_run_whose_config_is_damaged(
    content: bytes, tmp_path: Path, last_step_saved: RunFolder
) -> None:
    last_step_saved.config_path.write_bytes(content)
    opened = open_run(compose(tmp_path / "2026-01-02" / "09-00-00"))
    assert opened.folder.path == tmp_path / "2026-01-02" / "09-00-00"


def test_a_config_that_is_not_utf8_is_refused_with_its_path(last_step_saved: RunFolder) -> None:
    last_step_saved.config_path.write_bytes(b"model: {path: '\xed\xa0\x80'}")
    with pytest.raises(ConfigError, match=r"config\.yaml is not UTF-8 .*byte 0xed.*restore it"):
        read_config(last_step_saved)


@pytest.mark.parametrize(
    "names",
    [
        ["checkpoints/step-000001/mine.bin", "images/step-000002/holiday.png"],
        ["rollouts/step-000001.parquet"],
        ["notes.tmp"],
        [".draft.7.tmp"],
        ["config.yaml"],
        ["config.yaml", "run.lock"],
        ["metrics.jsonl"],
        ["run.lock", "thesis.tex"],
        [".git/HEAD"],
    ],
)
@pytest.mark.parametrize("resume", ["null", "auto"])
def test_a_run_does_not_begin_in_a_folder_of_others(
    names: list[str], resume: str, tmp_path: Path
) -> None:
    folder = tmp_path / "day" / "theirs"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("theirs")
    before = files_of(folder)

    with pytest.raises(GlmGrpoError) as refusal:
        open_run(compose(folder, resume))

    assert str(folder) in str(refusal.value)
    if resume == "null":
        listed = next(name for name in names if name != "run.lock").partition("/")[0]
        assert isinstance(refusal.value, StorageError)
        assert listed in str(refusal.value)
        assert "nothing is overwritten; choose another folder" in str(refusal.value)
    assert files_of(folder) == before
    assert (folder / "run.lock").exists() == ("run.lock" in names)


@pytest.mark.parametrize(("count", "named"), [(8, "0, 1, 2, 3, 4, 5, 6, 7"), (9, "6, 7, ...")])
def test_a_refusal_names_eight_of_the_files_in_the_way(
    count: int, named: str, tmp_path: Path
) -> None:
    for name in range(count):
        (tmp_path / str(name)).write_text("theirs")
    with pytest.raises(StorageError, match=re.escape(f"{named}): a run begins")):
        open_run(compose(tmp_path, "null"))


def test_a_run_begins_where_hydra_and_a_start_that_failed_have_been(tmp_path: Path) -> None:
    config = compose(tmp_path / "run", "null")
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    (tmp_path / "run" / ".hydra" / "config.yaml").write_text("theirs")
    (tmp_path / "run" / "train.log").write_text("theirs")
    open_run(config).lock.release()
    # Killed while it wrote its config.
    (tmp_path / "run" / ".config.yaml.77.tmp").write_text("model:")

    again = open_run(config)

    assert again.checkpoint is None
    assert read_config(again.folder) == config
    assert (tmp_path / "run" / ".hydra" / "config.yaml").read_text() == "theirs"


def test_recording_removes_nothing_that_no_run_wrote(tmp_path: Path) -> None:
    theirs = [
        *("notes.tmp", ".notes.tmp", "images/.draft.tmp", "images/step-1", "rollouts/step-9.csv"),
        *("checkpoints/step-000009-backup/a", "gallery/data/own.js", "checkpoints/.own.tmp"),
    ]
    folder = RunFolder(tmp_path / "run")
    for name in theirs:
        (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.path / name).write_text("theirs")
    ours = folder.images_dir / ".step-000001.77.tmp"
    ours.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (folder.images_dir / "step-000008").symlink_to(elsewhere)

    Recorder(folder, trackers=(), config={}, combine="weighted_sum").truncate_after(0)

    assert all((folder.path / name).read_text() == "theirs" for name in theirs)
    assert not ours.exists()
    assert (elsewhere / "kept").exists()
    assert not (folder.images_dir / "step-000008").exists()


def lose_metrics(folder: RunFolder) -> None:
    folder.metrics_path.unlink()


def empty_metrics(folder: RunFolder) -> None:
    folder.metrics_path.write_text("")


def cut_metrics(folder: RunFolder) -> None:
    folder.metrics_path.write_text('{"step": 0}\n{"step": 1}\n')


def lose_a_line(folder: RunFolder) -> None:
    folder.metrics_path.write_text('{"step": 0}\n{"step": 3}\n{"step": 2}\n')


@pytest.mark.parametrize("damage", [lose_metrics, empty_metrics, cut_metrics, lose_a_line])
@pytest.mark.parametrize("checkpoints", [(3,), (2, 3)])
@pytest.mark.parametrize("resume", ["null", "auto", "run"])
def test_a_run_that_lost_its_metrics_is_refused_and_keeps_the_rest(
    damage: Any, checkpoints: tuple[int, ...], resume: str, tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "day" / "run", checkpoints=checkpoints)
    damage(folder)
    before = files_of(folder.path)

    message = (
        r"run' holds a run already" if resume == "null" else r"metrics\.jsonl .*copy.* new run"
    )
    with pytest.raises(StorageError, match=message):
        open_run(compose(folder.path, str(folder.path) if resume == "run" else resume))

    assert files_of(folder.path) == before


def test_a_run_that_lost_its_metrics_before_its_first_checkpoint_is_refused(
    tmp_path: Path,
) -> None:
    folder = make_run(tmp_path / "day" / "run", checkpoints=())
    lose_metrics(folder)
    before = files_of(folder.path)
    with pytest.raises(StorageError, match=r"metrics\.jsonl is missing .*step-000003.* is there"):
        open_run(compose(folder.path))
    assert files_of(folder.path) == before


def test_a_run_that_lost_its_checkpoints_is_refused_and_keeps_the_rest(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "day" / "run", lines=5)
    folder.config_path.write_text(to_yaml(compose(folder.path, "auto", "train.checkpoint_every=4")))
    shutil.rmtree(folder.checkpoints_dir)
    before = files_of(folder.path)
    with pytest.raises(CheckpointError, match="no checkpoint, though it recorded 5 steps"):
        open_run(compose(folder.path, "auto", "train.checkpoint_every=4"))
    assert files_of(folder.path) == before
    # As many may be lost by a kill.
    assert open_run(compose(folder.path, "auto", "train.checkpoint_every=5")).checkpoint is None


def test_a_run_killed_in_its_first_evaluation_goes_on(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "day" / "run", lines=0, checkpoints=())
    folder.metrics_path.unlink()
    folder.evaluations_dir.mkdir()
    folder.evaluation_path(0).write_bytes(b"")
    (folder.evaluation_image_dir(0)).mkdir(parents=True)
    assert open_run(compose(folder.path)).checkpoint is None


@pytest.mark.parametrize("resume", ["auto", "link", "checkpoint"])
def test_a_run_is_one_under_all_its_names(
    resume: str, tmp_path: Path, last_step_saved: RunFolder
) -> None:
    link = tmp_path / "links" / "latest"
    link.parent.mkdir()
    link.symlink_to(last_step_saved.path)
    names = {"link": str(link), "checkpoint": str(link / "checkpoints" / "step-000003")}
    config = compose(link, names.get(resume, resume))
    first = open_run(config)
    assert first.folder.path == last_step_saved.path
    with pytest.raises(StorageError, match=f"{last_step_saved.path} is being written to by"):
        open_run(config)
    first.lock.release()
    assert open_run(compose(last_step_saved.path)).checkpoint is not None


class Rank(Processes):
    """One of two processes, whose main one has looked already."""

    def __init__(self, rank: int, found: list[Any]) -> None:
        super().__init__(rank, 2)
        self._found = found

    def on_main(self, work: Any) -> Any:
        if self.is_main:
            self._found.append(work())
        return self._found[0]


@pytest.mark.parametrize("named", [False, True])
def test_every_byte_of_a_checkpoint_is_hashed_once_and_in_one_process(
    named: bool, last_step_saved: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = last_step_saved.checkpoint_dir(3)
    digest, hashed = hashlib.file_digest, []

    def count(file: Any, name: str) -> Any:
        hashed.append(Path(file.name).name)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", count)
    config = compose(last_step_saved.path, str(checkpoint) if named else "auto")
    found: list[Any] = []
    for rank in range(2):
        opened = open_run(config, Rank(rank, found))
        assert opened.checkpoint is not None
        assert opened.checkpoint.tensors["policy"]["a"].tolist() == [1.0, 1.0]
    assert sorted(hashed) == ["optimizer.safetensors", "policy.safetensors"]
    find_checkpoint(checkpoint if named else last_step_saved.path)
    assert len(hashed) == 4


def test_a_checkpoint_without_a_file_of_its_run_is_refused(last_step_saved: RunFolder) -> None:
    tensors = {"policy": TENSORS["policy"]}
    save_checkpoint(last_step_saved, step=3, tensors=tensors, metadata=STATE)
    with pytest.raises(CheckpointError, match=r"checkpoint\.json .*lists no optimizer\.safet"):
        open_run(compose(last_step_saved.path))
    assert find_checkpoint(last_step_saved.path).checkpoint.step == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (key, value)
        for key in sorted(STATE)
        for value in ("absent", "text", [1], -1, 10**400, True, float("nan"))
        # A total may be negative.
        if (key, value) != ("best_total", -1)
    ],
)
def test_a_run_state_of_another_shape_is_refused_with_its_field(
    key: str, value: object, last_step_saved: RunFolder
) -> None:
    state = {name: each for name, each in STATE.items() if name != key}
    metadata = state if value == "absent" else state | {key: value}
    save_checkpoint(last_step_saved, step=3, tensors=TENSORS, metadata=metadata)
    with pytest.raises(CheckpointError, match=rf"step-000003/checkpoint\.json is damaged: .*{key}"):
        open_run(compose(last_step_saved.path))
    # Weights alone are wanted here.
    assert load_checkpoint(last_step_saved.checkpoint_dir(3)).step == 3
