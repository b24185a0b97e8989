from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rewards.process import ProcessReward
from rewards.score import Scorer, Term
from rewards.terms.custom import CustomConfig
from rewards.terms.ocr import RapidOcrConfig
from rewards.types import Prompt, RewardError

CPU = torch.device("cpu")
PIXELS = torch.arange(2, dtype=torch.uint8)[:, None, None, None].expand(2, 3, 2, 2)

FUNCTIONS = """
import os, sys, time, torch

def obey(prompts, pixels):
    match prompts[0].prompt:
        case "die":
            print("spilled the coffee", flush=True)
            print("and fell asleep", file=sys.stderr, flush=True)
            os._exit(3)
        case "hang":
            print("counting sheep", file=sys.stderr, flush=True)
            time.sleep(60)
        case "raise":
            raise ValueError("cannot look at this")
        case "process":
            return torch.full((len(prompts),), float(os.getpid()))
    return pixels.float().mean(dim=(1, 2, 3)) / 3
"""

NEVER_READY = "import time\nprint('fetching weights', flush=True)\ntime.sleep(60)\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with the modules the tests' children import."""
    folder = tmp_path_factory.mktemp("process")
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "never_ready.py").write_text(NEVER_READY)
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def start(
    function: str = "functions:obey", *, timeout_seconds: float = 30.0, ready_seconds: float = 120.0
) -> ProcessReward:
    config = CustomConfig(
        kind="custom", weight=0.0, function=function, timeout_seconds=timeout_seconds
    )
    return ProcessReward(config, name="mine", device=CPU, ready_seconds=ready_seconds)


@pytest.fixture(scope="module")
def reward(folder: Path) -> Iterator[ProcessReward]:
    """A child that lives as long as the tests of this file."""
    reward = start()
    assert is_alive(reward.process_id)
    yield reward
    reward.close()
    assert not is_alive(reward.process_id)


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    # A killed process stays in the table until its parent, here init, has asked for it.
    return ") Z " not in Path(f"/proc/{process_id}/stat").read_text()


def test_process_scores_in_a_process_of_its_own(reward: ProcessReward) -> None:
    prompts = [Prompt("dog", "a dog")] * 2
    assert torch.equal(reward.score(prompts, PIXELS), torch.tensor([0.0, 1.0]) / 3)
    (process_id,) = reward.score([Prompt("a", "process")], PIXELS[:1]).tolist()
    assert process_id == reward.process_id != os.getpid()
    assert reward.modules() == ()


def test_process_brings_no_notes_of_a_term_that_takes_none(reward: ProcessReward) -> None:
    scores = reward.score_with_notes([Prompt("dog", "a dog")] * 2, PIXELS)
    assert scores.notes == ()
    assert torch.equal(scores.values, torch.tensor([0.0, 1.0]) / 3)


def test_process_brings_what_the_term_notes_of_each_picture(
    draw_word: Callable[[str], Tensor],
) -> None:
    # The plain colour has no text to be read, which is a note too: an empty one.
    pixels = torch.stack([draw_word("OPEN"), torch.full((3, 128, 128), 90, dtype=torch.uint8)])
    reward = ProcessReward(
        RapidOcrConfig(kind="ocr", engine="rapidocr", weight=0.3), name="ocr", device=CPU
    )
    table = Scorer([Term("ocr", reward, 1.0)]).score(
        [Prompt("sign", "a sign", texts=("OPEN",))], pixels[None]
    )
    reward.close()
    assert table.notes == {"ocr": (("OPEN", ""),)}
    assert table.raw.flatten().tolist() == [1.0, 0.0]


def test_process_passes_on_why_the_term_failed_and_lives_on(reward: ProcessReward) -> None:
    with pytest.raises(RewardError, match="^ValueError: cannot look at this$"):
        reward.score([Prompt("a", "raise")], PIXELS[:1])
    assert reward.score([Prompt("a", "a")], PIXELS[:1]).tolist() == [0.0]


def test_process_hears_no_signal_that_asks_a_run_to_finish_its_step(reward: ProcessReward) -> None:
    os.kill(reward.process_id, signal.SIGINT)
    os.kill(reward.process_id, signal.SIGTERM)
    time.sleep(0.8)
    assert reward.score([Prompt("a", "a")], PIXELS[:1]).tolist() == [0.0]


def test_process_that_dies_ends_the_step_with_its_last_words_and_the_pictures(folder: Path) -> None:
    reward = start()
    scorer = Scorer([Term("mine", reward, 1.0)])
    with pytest.raises(RewardError) as caught:
        scorer.score([Prompt("dog", "die")], PIXELS[None])
    text = str(caught.value)
    assert "term mine, prompt dog" in text
    assert "the process of mine has ended with exit code 3" in text
    assert "Its last words:\nspilled the coffee\nand fell asleep" in text
    assert torch.equal(caught.value.pictures, PIXELS)
    with pytest.raises(RewardError, match="has ended with exit code 3.*"):
        reward.score([Prompt("dog", "a dog")], PIXELS[:1])
    reward.close()


def test_process_that_is_killed_ends_the_step_and_is_not_asked_what_it_applies_to(
    folder: Path,
) -> None:
    reward = start()
    os.kill(reward.process_id, signal.SIGKILL)
    with pytest.raises(RewardError, match=r"with signal 9 \(Killed\); remove .*It said nothing"):
        reward.score([Prompt("dog", "a dog")], PIXELS[:1])
    assert reward.applies_to(Prompt("a", "a"))
    reward.close()


def test_process_that_hangs_is_ended_with_its_last_words(folder: Path) -> None:
    reward = start(timeout_seconds=1.0)
    error = r"gave no answer within 1 seconds and was ended; .*last words:\ncounting sheep"
    with pytest.raises(RewardError, match=error):
        reward.score([Prompt("dog", "hang")], PIXELS[:1])
    assert not is_alive(reward.process_id)
    reward.close()
    with pytest.raises(RewardError, match="ended with signal 9"):
        reward.score([Prompt("dog", "a dog")], PIXELS[:1])


def test_process_that_cannot_build_its_term_says_why(folder: Path) -> None:
    with pytest.raises(
        RewardError, match=r"has ended with exit code 1; (?s:.*)words:\nmine: custom fun"
    ):
        start("functions:no_such_function")


def test_process_that_is_never_ready_is_ended(folder: Path) -> None:
    others = set(multiprocessing.active_children())
    started = time.monotonic()
    error = "mine was not ready within 0.5 seconds: it downloads"
    # Kept, and with it whatever the traceback holds: the child must not wait for that to go.
    with pytest.raises(RewardError, match=error) as caught:
        start("never_ready:score", ready_seconds=0.5)
    assert time.monotonic() - started < 5
    assert set(multiprocessing.active_children()) == others, caught


def test_process_ends_when_the_run_is_killed(folder: Path) -> None:
    code = """
import os, signal, torch
from rewards.process import ProcessReward
from rewards.terms.custom import CustomConfig
config = CustomConfig(kind="custom", weight=1.0, function="functions:obey")
reward = ProcessReward(config, name="mine", device=torch.device("cpu"))
print(reward.process_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    deadline = time.monotonic() + 5
    while is_alive(int(ended.stdout)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(int(ended.stdout))
