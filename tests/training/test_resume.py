"""Which folder a run begins in or goes on with, and what it may not touch."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from glm_grpo.config import Config, compose_config, to_yaml
from glm_grpo.errors import CheckpointError, ConfigError, StorageError
from glm_grpo.run.checkpoints import load_checkpoint, save_checkpoint
from glm_grpo.run.config import read_config
from glm_grpo.run.finding import resume_command
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.writing import truncate_after
from tests.opened import open_run

CONFIGS = Path(__file__).parents[2] / "configs"
STATE = {
    "optimizer": {"state": {}, "groups": []},
    "updates": 3,
    "best_step": None,
    "best_total": None,
    "skipped_in_a_row": 0,
}
TENSORS = {"policy": {"a": torch.ones(2)}, "optimizer": {"state/0/step": torch.ones(1)}}


@functools.cache
def composed(*overrides: str) -> Config:
    return compose_config(CONFIGS, "tiny", ["train.steps=3", *overrides])


def compose(run_dir: Path, resume: str | None = "auto", *overrides: str) -> Config:
    """As by `train.resume=RESUME run_dir=RUN_DIR ...`."""
    config = composed(*overrides)
    train = config.train.model_copy(update={"resume": resume})
    return config.model_copy(update={"train": train, "run_dir": str(run_dir)})


def make_run(
    path: Path,
    *,
    lines: int = 3,
    checkpoints: tuple[int, ...] = (3,),
    settings: tuple[str, ...] = (),
) -> RunFolder:
    """A run that recorded steps 0 to `lines`, with these checkpoints."""
    folder = RunFolder(path)
    folder.path.mkdir(parents=True)
    folder.config_path.write_text(to_yaml(compose(folder.path, None, *settings)))
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


def test_runs_that_start_in_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dated = compose_config(CONFIGS, "tiny")
    opened = [open_run(dated) for _ in range(3)]
    first = tmp_path / dated.run_dir
    assert [run.folder.path for run in opened] == [
        first,
        Path(f"{first}-2"),
        Path(f"{first}-3"),
    ]
    # A name that someone gave stays as it is, though it is that of a time.
    with pytest.raises(StorageError, match=f"{first} "):
        open_run(compose(first, None))


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


@pytest.mark.parametrize(
    ("unfinished", "given"),
    [
        ("slurm/2", "slurm/3"),
        ("2026-01-01/10-00-00", "slurm/3"),
        ("slurm/2", "2026-01-01/10-00-00"),
    ],
)
def test_a_folder_of_ones_own_is_neither_left_for_another_run_nor_taken_for_one(
    unfinished: str, given: str, tmp_path: Path
) -> None:
    other = make_run(tmp_path / unfinished)
    before = files_of(other.path)
    opened = open_run(compose(tmp_path / given))
    assert opened.folder.path == tmp_path / given
    assert opened.checkpoint is None
    assert files_of(other.path) == before


def test_a_run_that_has_done_more_steps_is_refused(last_step_saved: RunFolder) -> None:
    steady = ("optim.schedule=constant", "optim.warmup_steps=0")
    last_step_saved.config_path.write_text(to_yaml(compose(last_step_saved.path, "auto", *steady)))
    fewer = compose(last_step_saved.path, "auto", *steady, "train.steps=2")
    with pytest.raises(CheckpointError, match="train.steps = 2: .* 3;"):
        open_run(fewer)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((), r"model\.start_from="),
        (("optim.schedule=constant", "optim.warmup_steps=0"), " train.steps=6$"),
    ],
)
def test_a_finished_run_says_how_to_train_longer(
    settings: tuple[str, ...], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = make_run(tmp_path / "run", settings=settings)
    folder.evaluations_dir.mkdir()
    folder.evaluation_path(3).touch()
    open_run(compose(folder.path, "auto", *settings)).lock.release()
    assert re.search(f"{folder.path} .*3 steps.*{said}", caplog.messages[-1])


def test_several_processes_resume_by_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr("sys.argv", ["glm-grpo"])
    program = "accelerate launch --num_processes 4 -m glm_grpo train"
    assert resume_command(Path("run")) == f"{program} train.resume=run"


@pytest.mark.parametrize("is_finished", [True, False], ids=["finished", "damaged config"])
def test_open_run_begins_anew_beside_a_run_that_cannot_go_on(
    is_finished: bool, tmp_path: Path, last_step_saved: RunFolder
) -> None:
    if is_finished:
        evaluation = last_step_saved.evaluation_path(3)
        evaluation.parent.mkdir()
        evaluation.touch()
    else:
        last_step_saved.config_path.write_bytes(b"rollout: [")
    opened = open_run(compose(tmp_path / "2026-01-02" / "09-00-00"))
    assert opened.folder.path == tmp_path / "2026-01-02" / "09-00-00"
    assert opened.checkpoint is None


@pytest.mark.parametrize("name", ["the run", "the checkpoint"])
def test_open_run_goes_on_with_what_is_named(name: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", checkpoints=(2, 3))
    resume = {"the run": folder.path, "the checkpoint": folder.checkpoint_dir(2)}[name]
    opened = open_run(compose(tmp_path / "elsewhere", str(resume)))
    assert opened.folder.path == folder.path
    assert opened.checkpoint is not None
    assert opened.checkpoint.step == {"the run": 3, "the checkpoint": 2}[name]
    assert opened.checkpoint.tensors["policy"]["a"].tolist() == [1.0, 1.0]


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(last_step_saved: RunFolder) -> None:
    (last_step_saved.checkpoint_dir(3) / "policy.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=f"{last_step_saved.checkpoints_dir} .* whole"):
        open_run(compose(last_step_saved.path))


@pytest.mark.parametrize(
    ("script", "program"),
    [("../train.py", "python ../train.py"), ("/bin/glm-grpo", "glm-grpo train")],
)
def test_the_printed_command_continues_a_run_with_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, program: str
) -> None:
    folder = make_run(tmp_path / "it's [1] x", settings=("rollout.temperature=0.5",))
    monkeypatch.setattr("sys.argv", [script])
    for path in (folder.path, folder.checkpoint_dir(3)):
        command = resume_command(path, "train.steps=4", "optim.schedule=constant")
        words = shlex.split(command)
        assert words[:2] == program.split()
        overrides = words[2:]
        config = compose_config(None, None, overrides[:1])
        assert config.rollout.temperature == 0.5
        open_run(config).lock.release()
        # Keys beside it still count.
        with pytest.raises(CheckpointError, match=r"optim\.schedule: .*, train\.steps: "):
            open_run(compose_config(None, None, overrides))


def test_the_command_of_the_start_may_be_repeated_with_resume(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", settings=("rollout.temperature=0.5",))
    again = compose_config(None, None, (f"train.resume={folder.path}", "reward=text"))
    # Composed as at the start, not from the run's own config, in which 0.5 is stored.
    assert again.rollout.temperature == 1.0


def test_a_run_of_other_settings_is_not_gone_on_with(last_step_saved: RunFolder) -> None:
    other = compose(last_step_saved.path, "auto", "rollout.temperature=0.5")
    with pytest.raises(CheckpointError, match=r"rollout\.temperature: 1\.0 .*0\.5"):
        open_run(other)


@pytest.mark.parametrize(
    "names",
    [
        ["checkpoints/step-000001/mine.bin", "images/step-000002/holiday.png"],
        [".draft.7.tmp"],
        ["config.yaml"],
        ["metrics.jsonl"],
        ["run.lock", "thesis.tex"],
    ],
)
def test_a_run_does_not_begin_in_a_folder_of_others(names: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "day" / "theirs"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("theirs")
    before = files_of(folder)

    name = names[-1].partition("/")[0]
    with pytest.raises(ConfigError, match=f"{folder}.*{name}"):
        open_run(compose(folder, None))

    assert files_of(folder) == before
    assert (folder / "run.lock").exists() == ("run.lock" in names)


def test_a_run_begins_where_hydra_and_a_start_that_failed_have_been(tmp_path: Path) -> None:
    config = compose(tmp_path / "run", None)
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

    truncate_after(folder, 0)

    assert all((folder.path / name).read_text() == "theirs" for name in theirs)
    assert not ours.exists()
    assert (elsewhere / "kept").exists()
    assert not (folder.images_dir / "step-000008").exists()


@pytest.mark.parametrize(
    "left",
    [None, '{"step": 0}\n{"step": 1}\n'],
    ids=["no file", "the first lines"],
)
def test_a_run_that_lost_its_metrics_is_refused_and_keeps_the_rest(
    left: str | None, tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "day" / "run", checkpoints=(2, 3))
    if left is None:
        folder.metrics_path.unlink()
    else:
        folder.metrics_path.write_text(left)
    before = files_of(folder.path)
    with pytest.raises(StorageError, match=r"metrics\.jsonl .*step 3"):
        open_run(compose(folder.path))
    assert files_of(folder.path) == before


def test_a_run_that_lost_its_checkpoints_is_refused_and_keeps_the_rest(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "day" / "run", lines=5)
    folder.config_path.write_text(to_yaml(compose(folder.path, "auto", "train.checkpoint_every=4")))
    shutil.rmtree(folder.checkpoints_dir)
    before = files_of(folder.path)
    with pytest.raises(CheckpointError, match="checkpoint.* 5 steps .*every 4"):
        open_run(compose(folder.path, "auto", "train.checkpoint_every=4"))
    # As many may be lost by a kill.
    open_run(compose(folder.path, "auto", "train.checkpoint_every=5")).lock.release()
    folder.metrics_path.unlink()
    with pytest.raises(CheckpointError, match="checkpoint.* 5 steps .*every 4"):
        open_run(compose(folder.path, "auto", "train.checkpoint_every=4"))
    assert [*files_of(folder.path)] == [name for name in before if name != "metrics.jsonl"]


def test_a_run_killed_in_its_first_evaluation_goes_on(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "day" / "run", lines=0, checkpoints=())
    folder.metrics_path.unlink()
    folder.evaluations_dir.mkdir()
    folder.evaluation_path(0).write_bytes(b"")
    (folder.evaluation_image_dir(0)).mkdir(parents=True)
    assert open_run(compose(folder.path)).checkpoint is None


def test_a_run_is_one_under_all_its_names(tmp_path: Path, last_step_saved: RunFolder) -> None:
    link = tmp_path / "latest"
    link.symlink_to(last_step_saved.path)
    first = open_run(compose(link, str(link / "checkpoints" / "step-000003")))
    assert first.folder.path == last_step_saved.path
    with pytest.raises(StorageError, match=f"{last_step_saved.path} "):
        open_run(compose(last_step_saved.path))
    first.lock.release()


def test_a_run_state_that_lacks_a_field_is_refused_with_it(last_step_saved: RunFolder) -> None:
    metadata = {key: value for key, value in STATE.items() if key != "updates"}
    save_checkpoint(last_step_saved, step=3, tensors=TENSORS, metadata=metadata)
    # Weights alone may be wanted.
    checkpoint = load_checkpoint(last_step_saved.checkpoint_dir(3))
    assert checkpoint.step == 3
    with pytest.raises(CheckpointError, match=r"step-000003/checkpoint\.json .*updates"):
        checkpoint.run_state()


def test_settings_are_compared_before_anything_that_they_name_is_looked_for(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"model\.path: "):
        open_run(compose(folder.path, "auto", "model.path=none"))
    # A run that begins has none.
    open_run(compose(tmp_path / "new", "auto", "model.path=none"))
