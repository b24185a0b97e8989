"""Scoring while images are still being drawn, and what happens to terms that hang."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor, nn

from rewards.score import Scorer, Scoring, Term
from rewards.types import Prompt, RewardError
from tests.programs import ROOT, Programs

SOON = 20.0
"""Seconds after which a test gives up on a thread."""

PROMPTS = [Prompt("dog", "a dog"), Prompt("cat", "a cat"), Prompt("cow", "a cow")]


@dataclass
class Gate:
    """A term that says when it begins, and goes on when it is let."""

    networks: tuple[nn.Module, ...] = ()
    holds: Callable[[Prompt], bool] = lambda prompt: True
    began: dict[str, threading.Event] = field(
        default_factory=lambda: {prompt.prompt_id: threading.Event() for prompt in PROMPTS}
    )
    may_go_on: threading.Event = field(default_factory=threading.Event)
    scored: list[str] = field(default_factory=list)

    def applies_to(self, prompt: Prompt) -> bool:
        return True

    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        self.began[prompts[0].prompt_id].set()
        if self.holds(prompts[0]):
            assert self.may_go_on.wait(SOON)
        self.scored.append(prompts[0].prompt_id)
        return pixels.float().mean(dim=(1, 2, 3))

    def modules(self) -> tuple[nn.Module, ...]:
        return self.networks


def gate_of(*networks: nn.Module) -> Gate:
    """A term that holds nothing up."""
    return Gate(networks, holds=lambda prompt: False)


def group(*levels: int) -> UInt8[Tensor, "G 3 2 2"]:
    """Plain images, one level each."""
    return torch.tensor(levels, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Opened at the end, so that no thread waits on."""
    gate = Gate()
    yield gate
    gate.may_go_on.set()


def begin(*rewards: Gate, is_resident: bool = True, timeout_seconds: float = SOON) -> Scoring:
    terms = [
        Term(f"term_{index}", reward, 1.0, timeout_seconds=timeout_seconds)
        for index, reward in enumerate(rewards)
    ]
    return Scorer(terms).begin(PROMPTS, is_resident=is_resident)


def test_scoring_begins_with_a_group_while_others_are_to_come(gate: Gate) -> None:
    with begin(gate) as scoring:
        scoring.add(group(1, 2))
        assert gate.began["dog"].wait(SOON)
        # The term has not ended, and yet the next groups can be handed over.
        scoring.add(group(3, 4))
        scoring.add(group(5, 6))
        assert gate.scored == []
        gate.may_go_on.set()
        table = scoring.finish()
    assert table.raw.tolist() == [[[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0]]]
    assert gate.scored == ["dog", "cat", "cow"]


def test_scoring_runs_terms_side_by_side() -> None:
    # Each waits for the other: one after the other, both would break the barrier.
    barrier = threading.Barrier(2)

    def meet(prompt: Prompt) -> bool:
        barrier.wait(SOON)
        return False

    with begin(Gate(holds=meet), Gate(holds=meet)) as scoring:
        for level in (1, 2, 3):
            scoring.add(group(level))
        assert scoring.finish().raw.tolist() == [[[1.0, 1.0]], [[2.0, 2.0]], [[3.0, 3.0]]]


def test_scoring_makes_terms_wait_whose_networks_are_elsewhere() -> None:
    free, networked = gate_of(), gate_of(nn.Linear(1, 1))
    with begin(networked, free, is_resident=False) as scoring:
        for level in (1, 2, 3):
            scoring.add(group(level))
        assert free.began["cow"].wait(SOON)
        assert not any(began.is_set() for began in networked.began.values())
        table = scoring.finish()
    assert networked.scored == ["dog", "cat", "cow"]
    assert table.raw.tolist() == [[[1.0, 1.0]], [[2.0, 2.0]], [[3.0, 3.0]]]


def test_scoring_keeps_to_one_thread_a_term() -> None:
    threads: list[tuple[str, int]] = []

    def note(prompt: Prompt) -> bool:
        threads.append((threading.current_thread().name, threading.get_ident()))
        return False

    scorer = Scorer([Term("note", Gate(holds=note), 1.0)])
    for _ in range(2):
        scorer.score(PROMPTS, torch.stack([group(1, 2)] * 3))
    assert len(threads) == 6
    assert len(set(threads)) == 1
    assert threads[0][0] == "note"
    assert threads[0][1] != threading.get_ident()


def test_a_scorer_leaves_neither_networks_nor_threads_behind() -> None:
    def score() -> weakref.ref[nn.Module]:
        network = nn.Linear(1, 1)
        Scorer([Term("left", gate_of(network), 1.0)]).score(PROMPTS[:1], group(1, 2)[None])
        return weakref.ref(network)

    before = set(threading.enumerate())
    network = score()
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(SOON)
    assert network() is None
    assert set(threading.enumerate()) <= before


def test_a_scorer_lets_go_of_images_that_it_has_scored() -> None:
    scorer, images = Scorer([Term("plain", gate_of(), 1.0)]), group(1, 2)
    with scorer.begin(PROMPTS[:1]) as scoring:
        scoring.add(images)
        scoring.finish()
    scored = weakref.ref(images)
    del images, scoring
    gc.collect()
    # The thread hands the scores on before it lets go.
    end = time.monotonic() + SOON
    while scored() is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert scored() is None


SCORING = """
import torch
from torch import nn
from rewards.score import Scorer, Term
from rewards.types import Prompt

class Network:
    network = nn.Conv2d(3, 64, 3)
    applies_to = lambda self, prompt: True
    modules = lambda self: ()

    def score(self, prompts, pixels):
        with torch.no_grad():
            return self.network(pixels.float()).mean(dim=(1, 2, 3))

def score():
    scorer = Scorer([Term(f"term {number}", Network(), 1.0) for number in range(8)])
    scorer.score([Prompt("a", "a")], torch.zeros(1, 2, 3, 64, 64, dtype=torch.uint8))

score()
"""


def test_a_process_that_scored_ends_well() -> None:
    # A thread that is woken while Python ends aborts the process, after all that it did.
    ended = subprocess.run([sys.executable, "-c", SCORING], cwd=ROOT, check=False)
    assert ended.returncode == 0


def test_scoring_names_term_and_prompt_that_took_too_long(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rewards.score._GRACE_SECONDS", 0.0)
    gate.holds = lambda prompt: prompt.prompt_id == "cat"
    with begin(gate_of(), gate, timeout_seconds=0.25) as scoring:
        images = [group(1, 2), group(3, 4), group(5, 6)]
        for image in images:
            scoring.add(image)
        with pytest.raises(RewardError) as caught:
            scoring.finish()
    message = str(caught.value)
    assert message.startswith("term term_1, prompt cat: not scored within 0.25 seconds")
    assert "reward.terms.term_1.timeout_seconds" in message
    assert caught.value.images is not None
    assert torch.equal(caught.value.images, images[1])


def test_scoring_gives_a_term_that_keeps_its_limit_itself_time_to_say_so() -> None:
    def give_up(prompt: Prompt) -> bool:
        time.sleep(0.5)
        raise RewardError("the scorer did not answer within 0.125 seconds")

    with begin(Gate(holds=give_up), timeout_seconds=0.125) as scoring:
        for level in (1, 2, 3):
            scoring.add(group(level))
        with pytest.raises(RewardError, match="term_0, prompt dog: "):
            scoring.finish()


def test_scoring_limits_the_time_of_each_group_not_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewards.score._GRACE_SECONDS", 0.0)

    def rest(prompt: Prompt) -> bool:
        time.sleep(0.4)
        return False

    with begin(Gate(holds=rest), timeout_seconds=1.0) as scoring:
        for level in (1, 2, 3):
            scoring.add(group(level))
        assert scoring.finish().raw.flatten().tolist() == [1.0, 2.0, 3.0]


def test_scoring_refuses_to_finish_without_a_group_for_each_prompt() -> None:
    with begin(gate_of()) as scoring:
        scoring.add(group(1))
        scoring.add(group(1))
        with pytest.raises(ValueError, match="3 prompts, 2 groups"):
            scoring.finish()


HANGING = """
import threading, torch
from rewards.score import Scorer, Term
from rewards.types import Prompt

class Hanging:
    def applies_to(self, prompt): return True
    def score(self, prompts, pixels): threading.Event().wait()
    def modules(self): return ()

scorer = Scorer([Term("hanging", Hanging(), 1.0, timeout_seconds=0.1)])
scorer.score([Prompt("dog", "a dog")], torch.zeros(1, 2, 3, 2, 2, dtype=torch.uint8))
"""


def test_a_term_that_hangs_does_not_keep_the_process_from_ending(
    tmp_path: Path, programs: Programs
) -> None:
    ended = programs.run(tmp_path, "-c", HANGING)
    assert ended.returncode == 1
    assert "RewardError: term hanging, prompt dog: not scored within 0.1 seconds" in ended.stderr


@pytest.mark.gpu
def test_scoring_on_a_device_waits_for_weights_and_not_for_what_comes_after() -> None:
    weight = torch.zeros(1, device="cuda")
    second = 2_000_000_000  # cycles, about

    class Weighted(Gate):
        def score(self, prompts: Sequence[Prompt], pixels: Tensor) -> Tensor:
            assert torch.cuda.current_stream() != torch.cuda.default_stream()
            return (pixels.to("cuda").float() * weight).mean(dim=(1, 2, 3)).cpu()

    scorer = Scorer([Term("weighted", Weighted(), 1.0)])
    for value in (3.0, 5.0):
        # As weights that are copied to the device without waiting for it.
        torch.cuda._sleep(second // 10)
        weight.fill_(value)
        with scorer.begin(PROMPTS[:1]) as scoring:
            scoring.add(group(2))
            torch.cuda._sleep(second)
            assert scoring.finish().raw.item() == 2 * value
        assert not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
