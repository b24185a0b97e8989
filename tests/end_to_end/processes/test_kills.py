"""`kill -9` at any moment of a run: it goes on from a whole checkpoint and ends as if undisturbed.

Two benches: runs that are killed just before each change of their folder, by number; and
`python train.py` killed at random moments.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm_grpo.run.checkpoints import load_checkpoint
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics

ROOT = Path(__file__).resolve().parents[3]
KILL = int(signal.SIGKILL)
TERMINATE = int(signal.SIGTERM)
PATIENCE = 200

Record = dict[str, Any]


def is_worth_a_kill(number: int, changes: list[str]) -> bool:
    """The many files of the page's program are one after another: the first and last will do."""
    is_asset = [" gallery/assets/" in change for change in changes]
    inside = (
        is_asset[number - 1] and is_asset[number] and is_asset[min(number + 1, len(changes) - 1)]
    )
    return number == 0 or not inside


def assert_killed_whole(run_dir: Path, *, checkpoint_every: int = 1) -> None:
    """Every checkpoint with a name is whole, and no more than the step at hand is lost."""
    folder = RunFolder(run_dir)
    recorded = [int(row["step"] or 0) for row in read_metrics(folder)]
    saved = [load_checkpoint(path).step for path in folder.checkpoints_dir.glob("step-*")]
    assert max(saved, default=0) >= max(recorded, default=0) - checkpoint_every


def assert_goes_on(train_server: Any, run_dir: Path, expected: Record, record_of: Any) -> None:
    run = train_server.finish(run_dir)
    assert "damaged" not in run.said()
    assert record_of(run_dir) == expected


def kill_before(train_server: Any, number: int, run_dir: Path) -> None:
    """A run that kills itself just before the change of that number."""
    run = train_server.start(run_dir, signals={number: KILL})
    assert run.wait() == -KILL, run.said()
    assert len(run.listed_changes()) == number + 1


def kill_and_compare(
    train_server: Any, number: int, run_dir: Path, expected: Record, record_of: Any
) -> None:
    kill_before(train_server, number, run_dir)
    assert_killed_whole(run_dir)
    assert_goes_on(train_server, run_dir, expected, record_of)
    # To make the folder is a change, too.
    shutil.rmtree(run_dir.parent)


@pytest.mark.parametrize(
    "change",
    [
        "open rollouts/.step-000002",
        "open checkpoints/.step-000002.tmp/checkpoint.json",
        "rename checkpoints/.step-000002",
    ],
)
def test_run_killed_before_a_change_goes_on_to_equal_results(
    train_server: Any, whole_run: Any, record_of: Any, run_dir: Path, change: str
) -> None:
    number = whole_run.number_of(change)
    kill_and_compare(train_server, number, run_dir, whole_run.record, record_of)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_run_killed_before_every_change_goes_on_to_equal_results(
    train_server: Any, whole_run: Any, record_of: Any, run_dir: Path
) -> None:
    changes = whole_run.changes
    numbers = [number for number in range(len(changes)) if is_worth_a_kill(number, changes)]
    for number in numbers:
        print(f"{number}/{len(changes)} {changes[number]}", flush=True)  # noqa: T201
        kill_and_compare(train_server, number, run_dir, whole_run.record, record_of)


@pytest.fixture(scope="module")
def half_recorded(train_server: Any, whole_run: Any, tmp_path_factory: Any) -> Path:
    """A run killed as it saved step 2: all of that step is recorded, and is to be made anew."""
    run_dir = tmp_path_factory.mktemp("half") / "day" / "run"
    number = whole_run.number_of("checkpoints/.step-000002.tmp/checkpoint.json")
    kill_before(train_server, number, run_dir)
    return run_dir


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_resumed_run_killed_before_every_change_goes_on_to_equal_results(
    train_server: Any, whole_run: Any, half_recorded: Path, record_of: Any, run_dir: Path
) -> None:
    shutil.copytree(half_recorded, run_dir)
    resumed = train_server.finish(run_dir)
    changes = resumed.listed_changes()
    # From then on it is as in the run that was never interrupted.
    end = resumed.number_of("open images/.step-000002")
    for number in range(end):
        print(f"{number}/{end} {changes[number]}", flush=True)  # noqa: T201
        shutil.rmtree(run_dir)
        shutil.copytree(half_recorded, run_dir)
        kill_before(train_server, number, run_dir)
        assert_killed_whole(run_dir)
        assert_goes_on(train_server, run_dir, whole_run.record, record_of)


@pytest.mark.long
def test_stopped_run_killed_in_its_last_save_loses_no_step(
    train_server: Any, whole_run: Any, record_of: Any, run_dir: Path
) -> None:
    # Asked to stop once step 1 is saved, it saves that step again: SLURM kills half a minute later.
    asked = whole_run.number_of("rename checkpoints/.step-000001")
    stopped = train_server.start(run_dir, signals={asked: TERMINATE})
    assert stopped.wait() == 0, stopped.said()
    changes = stopped.listed_changes()
    replaced = find_change(changes, "rename checkpoints/step-000001", after=asked)
    # Before the earlier one loses its name, with neither named, with both there, with one and half.
    for number in range(replaced, replaced + 4):
        shutil.rmtree(run_dir.parent)
        run = train_server.start(run_dir, signals={asked: TERMINATE, number: KILL})
        assert run.wait() == -KILL, run.said()
        resumed = train_server.finish(run_dir)
        assert "from step-000001" in resumed.said(), changes[number]
        assert record_of(run_dir) == whole_run.record


def kill_at_random_moments(
    start: Callable[[Path], Any],
    tmp_path: Path,
    expected: Record,
    record_of: Any,
    *,
    moments: int,
    life: float,
) -> None:
    """Kills and goes on, so often; a run that ends before its moment is compared and begun anew.

    Args:
        start: Starts a run in a folder, or goes on with the one there.
        tmp_path: For run folders.
        expected: What an undisturbed run leaves.
        record_of: Reads what a run left.
        moments: How many kills.
        life: Seconds that an undisturbed run takes: moments are spread evenly over them.
    """
    chance = random.Random(0)
    kills, runs = 0, 1
    while kills < moments:
        run_dir = tmp_path / str(runs) / "day" / "run"
        run = start(run_dir)
        moment = chance.uniform(0, life)
        if run.wait(moment) is None:
            run.kill()
            kills += 1
            assert_killed_whole(run_dir)
            where = [row["step"] for row in read_metrics(RunFolder(run_dir))]
            print(f"kill {kills} in run {runs} after {moment:.1f} s, steps {where}")  # noqa: T201
        else:
            assert run.code == 0, run.said()
            assert record_of(run_dir) == expected
            runs += 1
    last = start(run_dir)
    assert last.wait(PATIENCE) == 0, last.said()
    assert "damaged" not in last.said()
    assert record_of(run_dir) == expected


def find_change(changes: list[str], text: str, *, after: int) -> int:
    return next(n for n, change in enumerate(changes) if n > after and text in change)


class TrainScript:
    """`python train.py` in a process of its own, a new interpreter every time."""

    def __init__(self, run_dir: Path, prompts: Path) -> None:
        overrides = (
            *("train.resume=auto", "train.steps=6", "train.eval_every=3", "decode.steps=2"),
            *("train.checkpoint_every=1", "train.keep_checkpoints=1", "train.micro_batch_size=4"),
            *("rollout.group_size=2", "rollout.prompts_per_step=2", "eval.samples_per_prompt=1"),
        )
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self._output = run_dir.with_name("output.txt")
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, str(ROOT / "train.py"), "--config-name", "tiny", *overrides),
                    *(f"data.eval_path={prompts}", f"run_dir={run_dir}"),
                ],
                stdout=output,
                stderr=output,
            )
        self.code: int | None = None

    def wait(self, seconds: float) -> int | None:
        try:
            self.code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return self.code

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def said(self) -> str:
        return self._output.read_text()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_train_script_killed_at_30_random_moments_ends_as_if_undisturbed(
    record_of: Any, tmp_path: Path
) -> None:
    prompts = tmp_path / "held_out.jsonl"
    prompts.write_text(
        '{"prompt": "red on white: a circle below the word \\"KITE\\"", "id": "kite"}\n'
        '{"prompt": "white on red: a square above the word \\"ZEN\\"", "id": "zen"}\n'
    )
    undisturbed = tmp_path / "undisturbed" / "day" / "run"
    begun = time.monotonic()
    run = TrainScript(undisturbed, prompts)
    assert run.wait(PATIENCE) == 0, run.said()
    life = time.monotonic() - begun
    print(f"an undisturbed run takes {life:.1f} s")  # noqa: T201

    kill_at_random_moments(
        lambda run_dir: TrainScript(run_dir, prompts),
        tmp_path,
        record_of(undisturbed),
        record_of,
        moments=30,
        life=life,
    )
