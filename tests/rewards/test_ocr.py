from __future__ import annotations

import numpy as np
import pytest
import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from rewards.ocr import OcrReward, TextBox, join_in_reading_order, text_box, text_similarity
from rewards.types import Prompt


class FakeReader:
    """Reads what it was told to."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.network = nn.Linear(1, 1)

    def read(self, pixels: UInt8[Tensor, "N 3 H W"]) -> list[str]:
        return self.texts

    def modules(self) -> tuple[nn.Module, ...]:
        return (self.network,)


def blank(count: int) -> UInt8[Tensor, "N 3 8 8"]:
    return torch.zeros(count, 3, 8, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("read", "wanted", "similarity"),
    [
        ("OPEN", "OPEN", 1.0),
        ("", "OPEN", 0.0),
        ("OPFN", "OPEN", 0.75),  # one of four replaced
        ("OPEN 24", "OPEN", 4 / 6),  # two of six unasked for
        ("OEN", "OPEN", 0.75),  # one of four missing
        ("o p\ne n", "OPEN", 1.0),  # case and white space
        ("ＯＰＥＮ", "open", 1.0),  # full-width letters  # noqa: RUF001 - meant
        ("STRASSE", "straße", 1.0),
        ("ﬁn", "FIN", 1.0),  # ligature
    ],
)
def test_text_similarity_is_one_minus_the_normalised_edit_distance(
    read: str, wanted: str, similarity: float
) -> None:
    assert text_similarity(read, wanted) == pytest.approx(similarity)


def test_reading_order_is_by_line_then_from_left() -> None:
    boxes = [
        TextBox("below", left=0.0, top=40.0, bottom=60.0),
        TextBox("right", left=50.0, top=8.0, bottom=28.0),  # not quite level with its neighbour
        TextBox("left", left=0.0, top=12.0, bottom=32.0),
    ]
    assert join_in_reading_order(boxes) == "left right below"


def test_reading_order_separates_lines_of_small_pictures() -> None:
    # 8 pixels apart: RapidOCR's own order takes less than 10 for one line.
    upper = TextBox("A", left=20.0, top=0.0, bottom=6.0)
    lower = TextBox("B", left=0.0, top=8.0, bottom=14.0)
    assert join_in_reading_order([lower, upper]) == "A B"


def test_reading_order_of_nothing_is_empty() -> None:
    assert join_in_reading_order([]) == ""


def test_text_box_is_the_upright_rectangle_around_the_corners() -> None:
    box = text_box("tilted", np.array([[5.0, 0.0], [20.0, 4.0], [18.0, 12.0], [3.0, 8.0]]))
    assert box == TextBox("tilted", left=3.0, top=0.0, bottom=12.0)


def test_ocr_scores_each_picture_against_its_own_prompt() -> None:
    prompts = [Prompt("a", "a", texts=("CAT",)), Prompt("b", "b", texts=("DOG",))]
    scores = OcrReward(FakeReader("cat", "dig")).score(prompts, blank(2))
    torch.testing.assert_close(scores, torch.tensor([1.0, 2 / 3]))


def test_ocr_applies_to_prompts_with_a_text_that_is_not_blank() -> None:
    reward = OcrReward(FakeReader())
    assert reward.applies_to(Prompt("a", "a", texts=("A",)))
    assert not reward.applies_to(Prompt("a", "a"))
    assert not reward.applies_to(Prompt("a", "a", texts=(" \n",)))


def test_ocr_refuses_prompts_without_text_and_readers_that_lose_pictures() -> None:
    with pytest.raises(ValueError, match="prompt a asks for no text"):
        OcrReward(FakeReader("x")).score([Prompt("a", "a")], blank(1))
    with pytest.raises(ValueError, match="zip"):
        OcrReward(FakeReader("x")).score([Prompt("a", "a", texts=("A",))] * 2, blank(2))


def test_ocr_hands_on_what_was_read_and_the_networks() -> None:
    reader = FakeReader("What it Says")
    assert OcrReward(reader).read(blank(1)) == ["What it Says"]
    assert OcrReward(reader).modules() == (reader.network,)
