from __future__ import annotations

import string

import pytest
import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from rewards.images import to_bgr_arrays
from rewards.terms.ocr import OcrReward
from rewards.terms.reading_orders import TextBox, surest_reading
from rewards.types import Prompt, RewardError


class FakeReader:
    """Reads what it was told to; knows Latin capitals, digits and the space."""

    def __init__(self, *texts: str, alphabet: str = string.ascii_uppercase + "0123 ") -> None:
        self.texts = list(texts)
        self.network = nn.Linear(1, 1)
        self._alphabet = frozenset(alphabet)

    def read(self, pixels: UInt8[Tensor, "N 3 H W"]) -> list[list[TextBox]]:
        return [[TextBox(text, 0.0, 0.0, 8.0, 4.0)] for text in self.texts]

    def alphabet(self) -> frozenset[str]:
        return self._alphabet

    def modules(self) -> tuple[nn.Module, ...]:
        return (self.network,)


def blank(count: int) -> UInt8[Tensor, "N 3 8 8"]:
    return torch.zeros(count, 3, 8, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("upright", "turned", "surest"),
    [
        (("OPING", 0.86), [("OPENING", 1.0)], "OPENING"),
        # 3 * 0.68 letters against 2 * 0.98, though the other one is surer.
        (("ABC", 0.84), [("EF", 0.99)], "ABC"),
        # 7 * 0.44 letters against 5 * 0.98, though it has more letters.
        (("MOUUUSE", 0.72), [("MOUSE", 0.99)], "MOUSE"),
        (("8", 0.9), [("EZL", 0.3), ("123", 0.8)], "123"),
        (("NOON", 1.0), [("NOON", 1.0)], "NOON"),
        # Maybe a stroke of H.
        (("I", 0.3), [("_", 0.8)], "I"),
        (("I", 0.3), [], "I"),
    ],
)
def test_surest_reading_has_most_right_letters_less_wrong_ones(
    upright: tuple[str, float], turned: list[tuple[str, float]], surest: str
) -> None:
    def boxed(reading: tuple[str, float]) -> tuple[TextBox, float]:
        return TextBox(reading[0], 0.0, 0.0, 8.0, 4.0), reading[1]

    assert surest_reading(boxed(upright), map(boxed, turned))[0].text == surest


def test_engines_get_rows_of_blue_green_and_red() -> None:
    pixels = torch.tensor([1, 2, 3], dtype=torch.uint8)[None, :, None, None].repeat(1, 1, 2, 1)
    pixels[..., 1, :] += 10
    (array,) = to_bgr_arrays(pixels)
    assert array.tolist() == [[[3, 2, 1]], [[13, 12, 11]]]


def test_ocr_scores_each_image_against_its_own_prompt() -> None:
    prompts = [Prompt("a", "a", texts=("CAT",)), Prompt("b", "b", texts=("DOG",))]
    scores = OcrReward(FakeReader("cat", "dig")).score(prompts, blank(2)).values
    torch.testing.assert_close(scores, torch.tensor([1.0, 2 / 3]))


def test_ocr_hands_its_options_to_the_comparison() -> None:
    reader = FakeReader("cat dog", alphabet=string.ascii_letters)
    prompt = Prompt("a", "a", texts=("CAt",))
    # Two of three letters are of another case, and half of what was read is extra.
    strict = OcrReward(reader, is_case_sensitive=True, extra_text_penalty=0.5)
    torch.testing.assert_close(
        strict.score([prompt], blank(1)).values, torch.tensor([1 / 3 * 0.75])
    )
    assert OcrReward(reader).score([prompt], blank(1)).values.tolist() == [1.0]


def test_ocr_applies_to_prompts_with_a_text_that_is_not_blank() -> None:
    reward = OcrReward(FakeReader())
    assert reward.applies_to(Prompt("a", "a", texts=("A",)))
    assert reward.applies_to(Prompt("a", "a", texts=(" ", "A\nB")))
    assert not reward.applies_to(Prompt("a", "a"))
    assert not reward.applies_to(Prompt("a", "a", texts=(" \n",)))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("OPEN 🙂", "'🙂'"),
        ("ÜBER 9", "'9', 'ü'"),
        ("営業中", "'中', '営', '業'"),
    ],
)
def test_ocr_refuses_a_text_with_characters_the_engine_cannot_return(text: str, named: str) -> None:
    prompt = Prompt("smile", "a sign", texts=("OPEN", text))
    with pytest.raises(RewardError, match="prompt smile asks for the text") as caught:
        OcrReward(FakeReader()).applies_to(prompt)
    assert f"text {text!r}, of which the OCR engine cannot read {named}: " in str(caught.value)
    assert "Leave these characters out of the prompt's `text`" in str(caught.value)


def test_ocr_takes_characters_that_do_not_count_as_different() -> None:
    # Small letters of capitals, full-width forms, a ligature, white space the engine lacks.
    prompt = Prompt("a", "a", texts=("open", "ＯＰＥＮ", "oﬃce\tA"))  # noqa: RUF001 - meant
    assert OcrReward(FakeReader(alphabet=string.ascii_uppercase)).applies_to(prompt)
    prompt = Prompt("a", "a", texts=("\u201cDON\u2019T\u201d \u2013 WAIT\u2026",))
    assert OcrReward(FakeReader(alphabet=string.ascii_uppercase + "'\"-.")).applies_to(prompt)


def test_ocr_refuses_the_other_case_where_case_counts() -> None:
    reward = OcrReward(FakeReader(), is_case_sensitive=True)
    assert reward.applies_to(Prompt("a", "a", texts=("OPEN",)))
    with pytest.raises(RewardError, match="cannot read 'n': "):
        reward.applies_to(Prompt("a", "a", texts=("OPEn",)))


def test_ocr_hands_on_what_was_read_and_the_networks() -> None:
    reader = FakeReader("What it Says")
    wanted = Prompt("a", "a", texts=("says",))
    scores = OcrReward(reader).score([wanted], blank(1))
    assert scores.notes == ("What it Says",)
    assert scores.values.tolist() == [1.0]
    assert OcrReward(reader).modules() == (reader.network,)


def test_ocr_says_which_letters_earned_the_score() -> None:
    reader = FakeReader("\u00dfAT", "DIG !", "", alphabet=string.ascii_letters)
    reward = OcrReward(reader, is_case_sensitive=True, extra_text_penalty=0.5)
    prompts = [Prompt("a", "a", texts=("CAT",)), *[Prompt("b", "b", texts=("DOG",))] * 2]
    scores = reward.score_with_map(prompts, blank(3))
    plain = reward.score(prompts, blank(3))
    assert torch.equal(scores.values, plain.values)
    assert scores.notes == plain.notes
    assert plain.score_map is None
    assert isinstance(scores.score_map, tuple)
    first, second, third = ([piece.value for piece in pieces] for pieces in scores.score_map)
    # Where case does not count, this would be ss.
    assert first == pytest.approx([0.0, 1 / 3, 1 / 3])
    # What the extra letter costs is no part of its place.
    assert second == pytest.approx([1 / 3, 0.0, 1 / 3, 0.0])
    assert third == []
