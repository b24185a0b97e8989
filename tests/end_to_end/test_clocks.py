"""A wall clock that jumps: durations and time limits go by another, and names do not break."""

from __future__ import annotations

import datetime
import itertools
import os
import subprocess
import sys
import threading
import time
from email.utils import format_datetime
from pathlib import Path

import httpx
import pytest
import torch
from PIL import Image

from glm_grpo.config import compose_config, to_yaml
from glm_grpo.gallery.thumbnails import make_thumbnails
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from glm_grpo.training.checkpoint.files import save_checkpoint
from glm_grpo.training.checkpoint.resume import open_run
from glm_grpo.training.phase import PhaseClock
from rewards.process import ProcessReward
from rewards.remote.client import RetryRules
from rewards.score import Scorer, Term
from rewards.terms.custom import CustomConfig
from rewards.types import Prompt, RewardError

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
YEAR = 365 * 86400.0

# Every reading is a jump: an hour on, a year back, and beyond the year 2038.
DRIVER = """
import itertools, runpy, sys, time
from datetime import datetime

jumps = itertools.cycle((3600.0, -365 * 86400.0, 20 * 365 * 86400.0))
real = time.time
time.time = lambda: real() + next(jumps)
time.time_ns = lambda: int(time.time() * 1e9)

import hydra.core.utils

class Jumping(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)

# By this it names the run folder.
hydra.core.utils.datetime = Jumping
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def jumping_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reading of the wall clock is a jump."""
    jumps = itertools.cycle((3600.0, -YEAR, 20 * YEAR))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))


def test_a_run_under_a_clock_that_jumps_measures_what_it_took(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a red circle\na blue square\n")
    (tmp_path / "driver.py").write_text(DRIVER)
    command = [
        *(sys.executable, str(tmp_path / "driver.py"), str(ROOT / "train.py"), "train.steps=2"),
        *("data.path=prompts.txt", "data.eval_path=prompts.txt", "eval.samples_per_prompt=1"),
        *("rollout.height=32", "rollout.width=32", "rollout.prompts_per_step=2"),
        *("rollout.group_size=2", "train.micro_batch_size=4", "optim.warmup_steps=0"),
        *(f"~reward.terms.{name}" for name in ("lpips", "ssim", "ocr")),
        *("reward.allow_untied=true", "trackers=[tensorboard]"),
    ]
    started = time.monotonic()
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    took = time.monotonic() - started

    assert ended.returncode == 0, ended.stderr
    (config,) = tmp_path.glob("outputs/*/*/config.yaml")
    folder = RunFolder(config.parent)
    rows = read_metrics(folder)[1:]
    assert [row["step"] for row in rows] == [1, 2]
    times = [value for row in rows for name, value in row.items() if name.startswith("time/")]
    assert min(times) >= 0
    assert 0 < sum(row["time/step"] for row in rows) < took
    assert min(row["throughput/images_per_second"] for row in rows) > 4 / took
    assert folder.checkpoint_dir(2).is_dir()
    assert folder.gallery_path.is_file()
    # The events of a step hold the wall clock's time, and are there whatever it says.
    assert list(folder.tensorboard_dir.rglob("events.out.tfevents.*"))


def test_phases_are_timed_by_a_clock_that_does_not_jump(jumping_clock: None) -> None:
    clock = PhaseClock()
    with clock.phase("rollout"):
        time.sleep(0.05)
    seconds = clock.seconds()
    assert 0.05 <= seconds["rollout"] <= seconds["step"] < 5


class Hanging:
    """A term that never answers."""

    def applies_to(self, prompt: Prompt) -> bool:
        return True

    def score(self, prompts: list[Prompt], pixels: torch.Tensor) -> torch.Tensor:
        threading.Event().wait(100)
        raise AssertionError("it was waited for")

    def modules(self) -> tuple[torch.nn.Module, ...]:
        return ()


def test_the_time_limit_of_a_term_is_kept_under_a_clock_that_jumps(jumping_clock: None) -> None:
    scorer = Scorer([Term("hanging", Hanging(), 1.0, timeout_seconds=0.5)])
    started = time.monotonic()
    with pytest.raises(RewardError, match="not scored within 0.5 seconds"):
        scorer.score([Prompt("dog", "a dog")], torch.zeros(1, 2, 3, 2, 2, dtype=torch.uint8))
    assert 0.5 <= time.monotonic() - started < 10


def test_a_scorer_process_is_waited_for_under_a_clock_that_jumps(
    jumping_clock: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "functions.py").write_text(
        "import time\n"
        "def slow(prompts, pixels):\n"
        "    time.sleep(100 if prompts[0].prompt == 'hang' else 0)\n"
        "    return pixels.float().mean(dim=(1, 2, 3))\n"
    )
    monkeypatch.chdir(tmp_path)
    reward = ProcessReward(
        CustomConfig(kind="custom", weight=1.0, function="functions:slow", timeout_seconds=1.0),
        name="mine",
        device=torch.device("cpu"),
    )
    pixels = torch.full((1, 3, 2, 2), 7, dtype=torch.uint8)
    assert reward.score([Prompt("dog", "a dog")], pixels).tolist() == [7.0]
    started = time.monotonic()
    with pytest.raises(RewardError, match="within 1 seconds"):
        reward.score([Prompt("dog", "hang")], pixels)
    assert 1.0 <= time.monotonic() - started < 10
    reward.close()


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        # A server's clock that is far ahead of ours would have us wait for years.
        (datetime.timedelta(days=9000), None),
        (datetime.timedelta(days=-9000), 0.0),
    ],
)
def test_a_retry_date_far_from_our_clock_makes_no_one_wait(
    ahead: datetime.timedelta, expected: float | None
) -> None:
    rules = RetryRules(retries=3, statuses=frozenset({503}), errors=())
    date = format_datetime(datetime.datetime.now(datetime.UTC) + ahead, usegmt=True)
    assert rules.wait_after(httpx.Response(503, headers={"Retry-After": date}), 1) == expected


def compose(run_dir: Path):
    overrides = ["train.steps=3", "train.resume=auto", f"run_dir={run_dir}"]
    return compose_config(CONFIGS, "tiny", overrides)


def make_unfinished_run(folder: Path, *, modified: float) -> None:
    """A run with a checkpoint of its first step, whose files bear a time."""
    folder.mkdir(parents=True)
    run = RunFolder(folder)
    run.config_path.write_text(to_yaml(compose(folder)))
    run.metrics_path.write_text('{"step": 1}\n')
    state = {"optimizer": {"state": {}, "groups": []}, "updates": 1, "best_step": None}
    more = {"best_total": None, "skipped_in_a_row": 0, "full_decode_from": None}
    tensors = {"policy": {}, "optimizer": {}}
    save_checkpoint(run, step=1, tensors=tensors, metadata=state | more)
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (modified, modified))


def test_auto_goes_on_with_the_run_that_is_named_last_whatever_the_files_say(
    tmp_path: Path,
) -> None:
    # A clock that was wrong when files were copied or written changes no name.
    make_unfinished_run(tmp_path / "2039-01-20" / "03-14-08", modified=0.0)
    make_unfinished_run(tmp_path / "2038-01-19" / "23-14-07", modified=2.0**31 + YEAR)

    opened = open_run(compose(tmp_path / "2026-01-02" / "09-00-00"))

    assert opened.folder.path == tmp_path / "2039-01-20" / "03-14-08"
    assert opened.checkpoint is not None
    assert opened.checkpoint.step == 1


def test_a_picture_made_anew_under_an_earlier_clock_gets_its_own_thumbnail(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    source = folder.images_dir / "step-000001" / "a.png"
    thumbnail = folder.gallery_path.parent / "thumbs" / "step-000001" / "a.webp"

    def draw(colour: str, moment: float) -> tuple[int, ...]:
        source.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (300, 300), colour).save(source)
        os.utime(source, (moment, moment))
        make_thumbnails(folder, ["step-000001/a.png"])
        return Image.open(thumbnail).convert("RGB").getpixel((9, 9))

    now = time.time()
    assert draw("white", now) == (255, 255, 255)
    assert draw("black", now - YEAR) == (0, 0, 0)
    # One that has not changed is not made again.
    made = thumbnail.stat().st_ino
    make_thumbnails(folder, ["step-000001/a.png"])
    assert thumbnail.stat().st_ino == made
