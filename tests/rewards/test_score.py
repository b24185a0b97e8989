from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor, nn

from rewards.coverage import check_prompts
from rewards.score import Scorer, Term
from rewards.score_map import Grid, ScoreBox
from rewards.types import Prompt, RewardError, RewardTable, Scores


def brightness(pixels: Tensor) -> Tensor:
    return pixels.float().mean(dim=(1, 2, 3)) / 255


@dataclass
class FakeReward:
    """Scores by a function of the images; applies where `needs_text` is satisfied."""

    name: str
    function: Callable[[Tensor], Tensor] = brightness
    needs_text: bool = False
    networks: tuple[nn.Module, ...] = ()
    seen: list[str] = field(default_factory=list)

    def applies_to(self, prompt: Prompt) -> bool:
        return bool(prompt.texts) or not self.needs_text

    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        self.seen += [prompt.prompt_id for prompt in prompts]
        return self.function(pixels)

    def modules(self) -> tuple[nn.Module, ...]:
        return self.networks


def make_scorer(rewards: Sequence[FakeReward], weights: Sequence[float]) -> Scorer:
    pairs = zip(rewards, weights, strict=True)
    return Scorer(
        [Term(reward.name, reward, weight, timeout_seconds=30.0) for reward, weight in pairs]
    )


WITH_TEXT = Prompt("sign", 'a sign saying "A"', texts=("A",))
WITHOUT_TEXT = Prompt("dog", "a dog")


def grey(*levels: Sequence[int]) -> UInt8[Tensor, "P G 3 2 2"]:
    """Plain images, one level each, by prompt and image."""
    pixels = torch.tensor(levels, dtype=torch.uint8)[:, :, None, None, None]
    return pixels.expand(-1, -1, 3, 2, 2).contiguous()


def test_scorer_fills_the_table_by_prompt_image_and_term() -> None:
    networks = nn.Linear(1, 1), nn.Linear(1, 1)
    terms = [
        FakeReward("bright", networks=networks[:1]),
        FakeReward("dark", lambda pixels: 1 - brightness(pixels), networks=networks[1:]),
    ]
    scorer = make_scorer(terms, [0.7, 0.3])
    assert scorer.modules() == networks
    table = scorer.score([WITH_TEXT, WITHOUT_TEXT], grey([0, 255], [51, 102]))
    assert table.names == ("bright", "dark")
    expected = torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[0.2, 0.8], [0.4, 0.6]]])
    torch.testing.assert_close(table.raw, expected)
    assert table.is_applicable.all()
    torch.testing.assert_close(table.weights, torch.tensor([0.7, 0.3]))


def test_scorer_masks_terms_that_do_not_apply_and_never_calls_them() -> None:
    picky = FakeReward("picky", needs_text=True)
    scorer = make_scorer([picky, FakeReward("any")], [1.0, 1.0])
    table = scorer.score([WITHOUT_TEXT, WITH_TEXT], grey([255, 255], [255, 255]))
    assert table.is_applicable.tolist() == [[False, True], [True, True]]
    assert table.raw[..., 0].tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert picky.seen == ["sign", "sign"]


def test_scorer_finds_the_image_that_a_term_fails_at() -> None:
    def refuse_white(pixels: Tensor) -> Tensor:
        if (pixels == 255).any():
            raise ZeroDivisionError("too bright")
        return brightness(pixels)

    scorer = make_scorer([FakeReward("shy", refuse_white)], [1.0])
    with pytest.raises(RewardError, match=r"term shy, prompt dog, image 3.*too bright"):
        # More images than channels.
        scorer.score([WITHOUT_TEXT], grey([5, 6, 7, 255]))


def test_scorer_looks_for_the_failing_image_without_gradients() -> None:
    seen = []

    def fail(pixels: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        raise ZeroDivisionError

    with pytest.raises(RewardError, match="term shy, prompt dog, image 0"):
        make_scorer([FakeReward("shy", fail)], [1.0]).score([WITHOUT_TEXT], grey([5, 6]))
    assert seen == [False, False]


def test_scorer_says_where_only_the_whole_group_fails() -> None:
    def refuse_groups(pixels: Tensor) -> Tensor:
        if len(pixels) > 1:
            raise MemoryError("no room")
        return brightness(pixels)

    scorer = make_scorer([FakeReward("large", refuse_groups)], [1.0])
    with pytest.raises(RewardError, match=r"prompt dog, images 0 to 1 together.*no room"):
        scorer.score([WITHOUT_TEXT], grey([1, 2]))


def test_scorer_does_not_ask_a_term_again_that_says_itself_what_failed() -> None:
    calls = []

    def refuse(pixels: Tensor) -> Tensor:
        calls.append(len(pixels))
        raise RewardError("http://scores.example answered 500: out of memory")

    pixels = grey([1, 2])
    with pytest.raises(RewardError) as caught:
        make_scorer([FakeReward("remote", refuse)], [1.0]).score([WITHOUT_TEXT], pixels)
    assert str(caught.value) == (
        "term remote, prompt dog: http://scores.example answered 500: out of memory"
    )
    assert caught.value.images is not None
    assert torch.equal(caught.value.images, pixels[0])
    assert calls == [2]


def set_an_alarm(pixels: Tensor) -> Tensor:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return brightness(pixels)


def await_a_score(pixels: Tensor) -> Tensor:
    return asyncio.get_event_loop().run_until_complete(asyncio.sleep(0, brightness(pixels)))


@pytest.mark.parametrize("function", [set_an_alarm, await_a_score])
def test_what_works_only_in_the_main_thread_is_named_with_the_users_line(
    function: Callable[[Tensor], Tensor],
) -> None:
    line = function.__code__.co_firstlineno + 1
    with pytest.raises(RewardError) as caught:
        make_scorer([FakeReward("mine", function)], [1.0]).score([WITHOUT_TEXT], grey([1]))
    message = str(caught.value)
    assert f" (test_score.py, line {line}). " in message
    assert "every term runs in a thread of its own" in message
    assert "reward.terms.mine.timeout_seconds" in message


# What a score is: test_base.py.
@pytest.mark.parametrize(
    ("scores", "error"),
    [
        (torch.tensor([0.5, float("nan")]), "image 1: returned nan"),
        (torch.zeros(3), "images 0 to 1: returned torch.float32 of shape"),
        (None, "images 0 to 1: returned a NoneType"),
        (ZeroDivisionError("broken"), "image 0: scoring failed with ZeroDivisionError: broken"),
        (
            NotImplementedError(),
            r"image 0: scoring failed with NotImplementedError \(test_score\.py, line \d+\)",
        ),
        (KeyboardInterrupt("of a library"), "image 0: .*KeyboardInterrupt: of a library"),
        (SystemExit("no licence"), "image 0: .*SystemExit: no licence"),
    ],
    ids=repr,
)
def test_scorer_names_term_and_prompt_of_what_is_no_score_and_hands_on_the_images(
    scores: Any, error: str
) -> None:
    def fail(pixels: Tensor) -> Any:
        if (pixels >= 3).all() and (pixels <= 4).all():
            if isinstance(scores, BaseException):
                raise scores
            return scores
        return brightness(pixels)

    pixels = grey([1, 2], [3, 4], [5, 6])
    scorer = make_scorer([FakeReward("any"), FakeReward("picky", fail)], [1.0, 1.0])
    with pytest.raises(RewardError, match=f"term picky, prompt sign, {error}") as caught:
        scorer.score([WITHOUT_TEXT, WITH_TEXT, WITHOUT_TEXT], pixels)
    assert caught.value.__cause__ is not None
    assert caught.value.images is not None
    assert torch.equal(caught.value.images, pixels[1])


def test_a_term_applies_to_the_prompts_whose_ids_match() -> None:
    terms = [
        Term("any", FakeReward("any"), 1.0),
        Term("dogs", FakeReward("dogs"), 1.0, prompt_ids="d?g"),
    ]
    scorer = Scorer(terms)
    table = scorer.score([WITHOUT_TEXT, WITH_TEXT], grey([1, 2], [3, 4]))
    assert (WITHOUT_TEXT.prompt_id, WITH_TEXT.prompt_id) == ("dog", "sign")
    assert table.is_applicable.tolist() == [[True, True], [True, False]]
    assert check_prompts(terms, [WITH_TEXT]) == [
        "dogs (50% of the weight) applies to none of the 1 prompts",
        "reward.terms.dogs.prompt_ids is 'd?g': none of the prompts that it could apply to has "
        "such an id",
    ]


def test_scorer_keeps_what_terms_say_of_images() -> None:
    class Reading(FakeReward):
        def score(self, prompts: Sequence[Prompt], pixels: Tensor) -> Scores:
            notes = tuple(f"p{image[0, 0, 0].item()}" for image in pixels)
            return Scores(brightness(pixels), notes, objects=(("dog",), ()))

    scorer = make_scorer([FakeReward("bright"), Reading("ocr", needs_text=True)], [1.0, 1.0])
    table = scorer.score([WITHOUT_TEXT, WITH_TEXT], grey([1, 2], [3, 4]))
    assert table.notes == {"ocr": ((), ("p3", "p4"))}
    assert table.objects == {"ocr": ((), (("dog",), ()))}


class Halves:
    """Scores the mean of both halves of an image; applies to dogs only."""

    def applies_to(self, prompt: Prompt) -> bool:
        return prompt.prompt_id == "dog"

    def score(self, prompts: Sequence[Prompt], pixels: Tensor) -> Tensor:
        return self.score_with_map(prompts, pixels).values

    def score_with_map(self, prompts: Sequence[Prompt], pixels: Tensor) -> Scores:
        halves = pixels.float().mean(dim=(1, 2)).chunk(2, dim=-1)
        parts = torch.stack([half.mean(dim=-1) / 2 for half in halves], dim=-1)[:, None]
        return Scores(parts.sum(dim=(1, 2)), score_map=parts)

    def modules(self) -> tuple[nn.Module, ...]:
        return ()


class Boxes(Halves):
    """As two boxes, of which one is a point."""

    def score_with_map(self, prompts: Sequence[Prompt], pixels: Tensor) -> Scores:
        values = super().score_with_map(prompts, pixels).values
        pieces = (ScoreBox(0.25, 0.0, 0.0, 2.0, 3.0, "a"), ScoreBox(0.5, 2.0, 3.0, 2.0, 3.0))
        return Scores(values, score_map=(pieces,) * len(prompts))


def test_scorer_draws_parts_onto_the_asked_grid() -> None:
    scorer = Scorer(
        [
            Term("halves", Halves(), 1.0),
            Term("boxes", Boxes(), 1.0),
            Term("plain", FakeReward("plain"), 1.0),
        ]
    )
    prompts = (Prompt("dog", "a dog"), Prompt("cat", "a cat"))
    pixels = torch.zeros(2, 1, 3, 3, 2, dtype=torch.uint8)
    pixels[:, :, :, :, 1] = 200
    with scorer.begin(prompts, grid=Grid(2, 2)) as scoring:
        for group in pixels:
            scoring.add(group)
        table = scoring.finish()
    # The left half earned nothing, the right one half of 200: a quarter in each of its places.
    assert table.score_map["halves"].tolist() == [[[[0, 50], [0, 50]]], [[[0, 0], [0, 0]]]]
    # The first box covers the image, the point is at its corner.
    boxes = [[[[0.0625, 0.0625], [0.0625, 0.5625]]], [[[0, 0], [0, 0]]]]
    assert table.score_map["boxes"].tolist() == boxes
    assert set(table.score_map) == {"halves", "boxes"}
    assert [len(group) for group in table.score_boxes["boxes"]] == [1, 0]
    assert table.score_boxes["boxes"][0][0][0].text == "a"
    assert scorer.score(prompts, pixels).score_map == {}


class Letters(Halves):
    """One letter an image, which stands wherever the image is bright, and earns how bright."""

    def score_with_map(self, prompts: Sequence[Prompt], pixels: Tensor) -> Scores:
        values, boxes = [], []
        for image in pixels.amax(dim=1).float():
            row, column = divmod(int(image.argmax()), image.shape[1])
            values.append(image.max().item())
            place = (float(column), float(row), column + 1.0, row + 1.0)
            boxes.append((ScoreBox(values[-1], *place, text="A", kind="a:0"),))
        return Scores(torch.tensor(values), score_map=tuple(boxes))


def test_scorer_compares_boxes_of_a_kind_wherever_they_stand() -> None:
    def refuse_second(pixels: Tensor) -> Any:
        return [1.0, None, 1.0][: len(pixels)]

    def score(*terms: Term) -> RewardTable:
        prompts = (Prompt("dog", "a dog"), Prompt("cat", "a cat"))
        scoring = Scorer(terms).begin(prompts, grid=Grid(2, 2))
        for group in pixels:
            scoring.add(group)
        return scoring.finish()

    pixels = torch.zeros(2, 3, 3, 2, 2, dtype=torch.uint8)
    pixels[0, 0, :, 0, 0], pixels[0, 1, :, 0, 1], pixels[0, 2, :, 1, 1] = 40, 130, 70
    letters = Term("letters", Letters(), 1.0)
    table = score(letters)
    expected = torch.zeros(2, 3, 2, 2)
    expected[0, 0, 0, 0], expected[0, 1, 0, 1], expected[0, 2, 1, 1] = -40, 50, -10
    assert table.kind_map["letters"].equal(expected)
    assert table.score_map["letters"].count_nonzero() == 0
    bare = table.without_places()
    assert [bare.score_map, bare.kind_map, bare.score_boxes] == [{}] * 3
    # The image that a judge refuses is left out of the group: 40 and 70 remain.
    table = score(letters, Term("judge", FakeReward("judge", refuse_second), 1.0))
    expected[0, 0, 0, 0], expected[0, 1, 0, 1], expected[0, 2, 1, 1] = -15, 0, 15
    assert table.kind_map["letters"].equal(expected)


@pytest.mark.usefixtures("own_defaults")
def test_scores_are_kept_as_they_are_whatever_the_default_dtype() -> None:
    scorer = Scorer([Term("halves", Halves(), 1.0)])
    with scorer.begin([WITHOUT_TEXT], grid=Grid(1, 1)) as scoring:
        torch.set_default_dtype(torch.bfloat16)
        # A bfloat16 has 8 bits: 185.5 would be stored as 186.
        pixels = torch.full((1, 3, 2, 2), 185, dtype=torch.uint8)
        pixels[..., 0, :] = 186
        scoring.add(pixels)
        table = scoring.finish()
    assert table.raw.tolist() == [[[185.5]]]
    assert table.score_map["halves"].tolist() == [[[[185.5]]]]


@pytest.mark.usefixtures("own_defaults")
def test_what_a_term_changes_for_the_whole_process_is_undone_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def careless(pixels: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        os.chdir(tmp_path)
        return brightness(pixels)

    scorer, folder = make_scorer([FakeReward("careless", careless)], [1.0]), Path.cwd()
    for _ in range(2):
        scorer.score([WITHOUT_TEXT], grey([0]))
        assert torch.get_default_dtype() == torch.float32
        assert Path.cwd() == folder
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "a reward term changed torch.get_default_dtype() from torch.float32 to torch.float64, "
        f"os.getcwd() from {folder} to {tmp_path}, for the whole process; this was undone. "
    )


PROGRAM = """
import sys, threading, torch
from rewards.coverage import check_prompts
from rewards.score import Scorer, Term
from rewards.types import Prompt

is_computing = threading.Event()

class Slow:
    calls = 0
    def applies_to(self, prompt): return True
    def modules(self): return ()
    def score(self, prompts, pixels):
        Slow.calls += 1
        is_computing.set()
        values = torch.ones(400, 400)
        for _ in range(400):
            values = (values @ values).softmax(dim=-1)
        return values[0, :len(pixels)]

class Failing(Slow):
    def score(self, prompts, pixels):
        is_computing.wait()
        raise ValueError("no score")

scorer = Scorer([Term("failing", Failing(), 1.0), Term("slow", Slow(), 1.0)])
try:
    scorer.score([Prompt("a", "a")] * 3, torch.zeros(3, 1, 3, 8, 8, dtype=torch.uint8))
finally:
    print(Slow.calls)
"""


def test_a_term_that_raises_while_another_computes_ends_the_process_with_its_own_code() -> None:
    # Not a fork of the tests' own, which would skip the end of Python.
    command = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "RewardError: term failing, prompt a, image 0" in found.stderr.splitlines()[-1]
    # The other groups are not begun.
    assert found.stdout == "1\n"


def test_a_term_that_runs_out_of_memory_says_which_keys_give_it_room() -> None:
    def fill_memory(pixels: Tensor) -> Tensor:
        # 4 PB where the group is scored at once; each image alone can be scored.
        return torch.empty(10**15) if len(pixels) > 1 else brightness(pixels)

    scorer = make_scorer([FakeReward("hungry", fill_memory)], [1.0])
    pixels = torch.zeros(1, 2, 3, 8, 6, dtype=torch.uint8)
    with pytest.raises(RewardError) as caught:
        scorer.score([Prompt("p", "a prompt")], pixels)
    message = str(caught.value)
    assert "term hungry, prompt p, images 0 to 1 together (each can be scored by itself)" in message
    assert "memory ran out over a group of 2 images of 8 x 6 pixels" in message
    assert "reward.overlap=false" in message
    assert "rollout.group_size" in message


def test_term_for_evaluations_alone_does_not_see_what_is_trained_on() -> None:
    judge, other = FakeReward("judge", needs_text=True), FakeReward("other")
    scorer = Scorer([Term("judge", judge, 1.0, is_trained_on=False), Term("other", other, 1.0)])
    pixels = torch.zeros(2, 3, 3, 4, 4, dtype=torch.uint8)
    prompts = [WITH_TEXT, WITHOUT_TEXT]

    with scorer.begin(prompts, is_training=True) as scoring:
        for group in pixels:
            scoring.add(group)
        table = scoring.finish()

    assert judge.seen == []
    assert table.is_applicable.tolist() == [[False, True], [False, True]]
    assert scorer.score(prompts, pixels).is_applicable.tolist() == [[True, True], [False, True]]
