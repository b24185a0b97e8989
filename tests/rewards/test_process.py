"""A term in a process of its own: scores as in this one, and its failures are errors."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rewards.base import score_with_notes
from rewards.process import ProcessReward
from rewards.score import Scorer, Term
from rewards.terms.custom import CustomConfig
from rewards.types import Prompt, RewardError
from tests.programs import Programs

CPU = torch.device("cpu")
PIXELS = torch.arange(2, dtype=torch.uint8)[:, None, None, None].expand(2, 3, 2, 2)

FUNCTIONS = """
import os, signal, time, torch
from rewards import Piece, Scores

class Odd(Exception):
    def __init__(self, this, that):  # cannot be unpickled
        super().__init__("cannot look at this")

def obey(prompts, pixels):
    match prompts[0].prompt:
        case "die":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(60)
        case "raise":
            raise Odd(1, 2)
        case "map" | "pieces":
            return place(prompts, pixels)
    source = prompts[0].sources[0].float().mean() if prompts[0].sources else 0.0
    target = 0.0 if prompts[0].target is None else prompts[0].target.float().mean()
    return pixels.float().mean(dim=(1, 2, 3)) / 3 + 10 * target + 100 * source

def place(prompts, pixels):
    values = pixels.float().mean(dim=(1, 2, 3))
    places = pixels.float().mean(dim=1) / pixels[0, 0].numel()
    pieces = [[Piece(value, 0.0, 0.0, 2.0, 1.0, "A")] for value in values.tolist()]
    is_map = prompts[0].prompt == "map"
    return Scores(values, ("a", "b"), places if is_map else tuple(map(tuple, pieces)))
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
def reward(folder: Path) -> ProcessReward:
    """A child that scores for the tests that leave it alive."""
    return ProcessReward(config(), name="mine", device=CPU)


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


def test_process_returns_notes_and_parts_as_this_one_does(reward: ProcessReward) -> None:
    here = config().build(CPU)
    for with_parts in (True, False):
        for prompt in (Prompt("a", "map"), Prompt("a", "pieces")):
            there, expected = (
                score_with_notes(term, [prompt] * 2, PIXELS, with_parts=with_parts)
                for term in (reward, here)
            )
            assert str(there) == str(expected)
            assert there.notes == ("a", "b")
            assert (there.parts is not None) == with_parts
    # Parts stay in the child unless they are asked for.
    assert reward.score_with_notes([prompt] * 2, PIXELS).parts is None


def test_process_goes_on_after_an_error_of_the_term(reward: ProcessReward) -> None:
    scorer = Scorer([Term("mine", reward, 1.0)])
    with pytest.raises(RewardError, match="term mine, prompt dog: Odd: cannot look at this"):
        scorer.score([Prompt("dog", "raise")], PIXELS[None])
    assert reward.score([Prompt("a", "a")], PIXELS[:1]).tolist() == [0.0]


def test_process_does_not_end_by_a_signal_that_asks_the_run_to(reward: ProcessReward) -> None:
    for child in multiprocessing.active_children():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(child.pid, number)
    time.sleep(0.2)
    assert reward.score([Prompt("a", "a")], PIXELS[:1]).tolist() == [0.0]


@pytest.mark.parametrize(
    ("prompt", "seconds", "error"),
    [
        ("hang", 1.0, "gave no answer within 1 seconds and was stopped"),
        ("die", 30.0, "has ended with exit code 3; "),
        ("kill", 30.0, "has ended with signal 9; "),
    ],
)
def test_process_that_hangs_or_dies_ends_the_step(
    folder: Path, prompt: str, seconds: float, error: str
) -> None:
    others = set(multiprocessing.active_children())
    reward = ProcessReward(config(timeout_seconds=seconds), name="mine", device=CPU)
    scorer = Scorer([Term("mine", reward, 1.0)])
    with pytest.raises(RewardError, match=f"term mine, prompt dog: .* mine {error}") as caught:
        scorer.score([Prompt("dog", prompt)], PIXELS[None])
    assert torch.equal(caught.value.pictures, PIXELS)
    # Joining the child would race with the executor's own thread, which joins it too.
    deadline = time.monotonic() + 10
    while set(multiprocessing.active_children()) != others and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(multiprocessing.active_children()) == others


def test_process_that_cannot_build_its_term_says_why(folder: Path) -> None:
    with pytest.raises(RewardError, match="custom function"):
        ProcessReward(config("functions:no_such_function"), name="mine", device=CPU)


def test_process_ends_when_the_run_is_killed(folder: Path, programs: Programs) -> None:
    code = """
import multiprocessing, os, signal, torch
from rewards.process import ProcessReward
from rewards.terms.custom import CustomConfig
config = CustomConfig(kind="custom", weight=1.0, function="functions:obey")
reward = ProcessReward(config, name="mine", device=torch.device("cpu"))
print(multiprocessing.active_children()[0].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = programs.run(folder, "-c", code)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    deadline = time.monotonic() + 10
    while is_alive(int(ended.stdout)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(int(ended.stdout))
