"""A term in a process of its own: scores as in this one, and its failures are errors."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rewards.process import ProcessReward
from rewards.score import Scorer, Term
from rewards.terms.custom import CustomConfig
from rewards.types import Prompt, RewardError
from tests.programs import Programs

CPU = torch.device("cpu")
PIXELS = torch.arange(2, dtype=torch.uint8)[:, None, None, None].expand(2, 3, 2, 2)

FUNCTIONS = """
import os, time, torch

def obey(prompts, pixels):
    match prompts[0].prompt:
        case "die":
            print("spilled the coffee", flush=True)
            os._exit(3)
        case "hang":
            print("counting sheep", flush=True)
            time.sleep(60)
        case "raise":
            raise ValueError("cannot look at this")
    source = prompts[0].sources[0].float().mean() if prompts[0].sources else 0.0
    target = 0.0 if prompts[0].target is None else prompts[0].target.float().mean()
    return pixels.float().mean(dim=(1, 2, 3)) / 3 + 10 * target + 100 * source
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with the module that children import."""
    folder = tmp_path_factory.mktemp("process")
    (folder / "functions.py").write_text(FUNCTIONS)
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def config(function: str = "functions:obey", timeout_seconds: float = 30.0) -> CustomConfig:
    return CustomConfig(
        kind="custom", weight=0.0, function=function, timeout_seconds=timeout_seconds
    )


@pytest.fixture(scope="module")
def reward(folder: Path) -> Iterator[ProcessReward]:
    """A child that scores for the tests that leave it alive."""
    reward = ProcessReward(config(), name="mine", device=CPU)
    yield reward
    reward.close()


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    # A killed process stays in the table until its parent, here init, has asked for it.
    return ") Z " not in Path(f"/proc/{process_id}/stat").read_text()


def test_process_scores_as_this_one_does_with_target_and_source(reward: ProcessReward) -> None:
    prompt = Prompt("dog", "a dog", target=PIXELS[1], sources=(PIXELS[1] * 2,))
    here = config().build(CPU)
    for each in (Prompt("cat", "a cat"), prompt):
        assert torch.equal(reward.score([each] * 2, PIXELS), here.score([each] * 2, PIXELS))
    assert reward.score([prompt], PIXELS[:1]).tolist() == [210.0]


def test_process_goes_on_after_an_error_of_the_term(reward: ProcessReward) -> None:
    scorer = Scorer([Term("mine", reward, 1.0)])
    with pytest.raises(RewardError, match="term mine, prompt dog: ValueError: cannot look at this"):
        scorer.score([Prompt("dog", "raise")], PIXELS[None])
    assert reward.score([Prompt("a", "a")], PIXELS[:1]).tolist() == [0.0]


def test_process_does_not_end_by_a_signal_that_asks_the_run_to(reward: ProcessReward) -> None:
    os.kill(reward.process_id, signal.SIGINT)
    os.kill(reward.process_id, signal.SIGTERM)
    time.sleep(0.2)
    assert reward.score([Prompt("a", "a")], PIXELS[:1]).tolist() == [0.0]


@pytest.mark.parametrize(
    ("prompt", "seconds", "error"),
    [
        ("hang", 1.0, r"no answer within 1 seconds .*Its last words:\ncounting sheep"),
        ("die", 30.0, r"ended with exit code 3; .*Its last words:\nspilled the coffee"),
    ],
)
def test_process_that_hangs_or_dies_ends_the_step_with_its_last_words(
    folder: Path, prompt: str, seconds: float, error: str
) -> None:
    reward = ProcessReward(config(timeout_seconds=seconds), name="mine", device=CPU)
    scorer = Scorer([Term("mine", reward, 1.0)])
    with pytest.raises(RewardError, match=f"term mine, prompt dog: .*{error}") as caught:
        scorer.score([Prompt("dog", prompt)], PIXELS[None])
    assert torch.equal(caught.value.pictures, PIXELS)
    assert not is_alive(reward.process_id)
    reward.close()


def test_process_that_cannot_build_its_term_says_why(folder: Path) -> None:
    with pytest.raises(RewardError, match=r"exit code 1; (?s:.*)words:\nmine: custom function"):
        ProcessReward(config("functions:no_such_function"), name="mine", device=CPU)


def test_process_ends_when_the_run_is_killed(folder: Path, programs: Programs) -> None:
    code = """
import os, signal, torch
from rewards.process import ProcessReward
from rewards.terms.custom import CustomConfig
config = CustomConfig(kind="custom", weight=1.0, function="functions:obey")
reward = ProcessReward(config, name="mine", device=torch.device("cpu"))
print(reward.process_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = programs.run(folder, "-c", code)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    deadline = time.monotonic() + 10
    while is_alive(int(ended.stdout)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(int(ended.stdout))
