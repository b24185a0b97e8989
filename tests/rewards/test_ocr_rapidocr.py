from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from rewards.terms.ocr import OcrReward
from rewards.terms.ocr_rapidocr import RapidOcrReader
from rewards.terms.text_matching import match_texts
from rewards.types import Prompt, RewardError

Draw = Callable[[str], UInt8[Tensor, "3 128 128"]]
WORDS = ("OPEN", "TAXI", "JAZZ", "BUS", "FERN", "QUAY")


@pytest.fixture(scope="module")
def reader() -> RapidOcrReader:
    return RapidOcrReader(threads=2, detection_side=160)


def mean_match(texts: list[str], words: Sequence[str]) -> float:
    """Letters beside a word count as mistakes here."""
    pairs = zip(texts, words, strict=True)
    scores = [match_texts(text, [word], extra_text_penalty=1.0) for text, word in pairs]
    return sum(scores) / len(scores)


def load_photo(path: Path, size: int | None = None) -> UInt8[Tensor, "1 3 H W"]:
    """As it is, or scaled to a square."""
    picture = Image.open(path).convert("RGB")
    if size is not None:
        picture = picture.resize((size, size), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]


def test_rapidocr_reads_drawn_words(reader: RapidOcrReader, draw_word: Draw) -> None:
    texts = reader.read(torch.stack([draw_word(word) for word in WORDS]))
    assert mean_match(texts, WORDS) >= 0.95


def test_rapidocr_reads_a_batch_as_it_reads_one_by_one(
    reader: RapidOcrReader, draw_word: Draw
) -> None:
    pictures = torch.stack([draw_word(word) for word in ("OPEN", "BUS", "A")])
    single = [reader.read(pictures[index : index + 1])[0] for index in range(3)]
    assert reader.read(pictures) == single


def test_rapidocr_reads_nothing_in_a_blank_picture(reader: RapidOcrReader) -> None:
    grey = torch.full((1, 3, 128, 128), 127, dtype=torch.uint8)
    assert reader.read(grey) == [""]
    scores = OcrReward(reader).score([Prompt("a", "a", texts=("OPEN",))], grey)
    assert scores.tolist() == [0.0]


def test_rapidocr_scores_the_right_word_above_a_wrong_one(
    reader: RapidOcrReader, draw_word: Draw
) -> None:
    pictures = torch.stack([draw_word("OPEN"), draw_word("OVEN"), draw_word("BUS")])
    scores = OcrReward(reader).score([Prompt("a", "a", texts=("open",))] * 3, pictures)
    torch.testing.assert_close(scores, torch.tensor([1.0, 0.75, 0.0]))


def test_rapidocr_reads_photographed_words(reader: RapidOcrReader, assets_dir: Path) -> None:
    folder = assets_dir / "images" / "words"
    labels: dict[str, str] = json.loads((folder / "labels.json").read_text(encoding="utf-8"))
    read = [text for name in labels for text in reader.read(load_photo(folder / name))]
    assert read == list(labels.values())
    assert len(read) == 4


CANS = ("can_01.jpg", "can_02.jpg")
CAN_TEXTS = ("TRANSATLANTIC IPA", "横越大西洋")
"""In two scripts and on several lines, among other text."""


@pytest.mark.parametrize("size", [512, 768])
def test_rapidocr_finds_both_scripts_on_photographed_cans(
    reader: RapidOcrReader, assets_dir: Path, size: int
) -> None:
    photos = [load_photo(assets_dir / "images" / "photos" / name, size) for name in CANS]
    cans = [Prompt(name, "a can", texts=CAN_TEXTS) for name in CANS]
    assert OcrReward(reader).score(cans, torch.cat(photos)).tolist() == [1.0, 1.0]
    # What stands there besides costs only where that was asked for, and then not everything.
    strict = OcrReward(reader, extra_text_penalty=1.0).score(cans, torch.cat(photos))
    assert strict.min() > 0.4
    assert strict.min() < 1.0


def test_rapidocr_finds_more_on_a_small_can_where_it_is_enlarged_more(assets_dir: Path) -> None:
    # At 256 pixels the second can's letters are 8 pixels high.
    photo = load_photo(assets_dir / "images" / "photos" / CANS[1], 256)

    def score(detection_side: int) -> float:
        reward = OcrReward(RapidOcrReader(threads=1, detection_side=detection_side))
        return reward.score([Prompt("can", "a can", texts=CAN_TEXTS[:1])], photo).item()

    assert score(736) > 0.9
    assert score(256) < 0.5


def test_rapidocr_knows_the_characters_of_its_model(reader: RapidOcrReader) -> None:
    alphabet = reader.alphabet()
    assert set("AZaz09 é営业!") <= alphabet
    assert {len(character) for character in alphabet} == {1}
    assert "д" not in alphabet


def test_rapidocr_alphabet_of_a_reader_that_has_read_nothing_yet() -> None:
    assert "A" in RapidOcrReader(threads=1, detection_side=64).alphabet()


@pytest.mark.parametrize("text", ["OPEN 🙂", "ОТКРЫТО"])
def test_rapidocr_refuses_texts_its_model_cannot_return(reader: RapidOcrReader, text: str) -> None:
    with pytest.raises(RewardError, match="prompt sign asks for the text .* cannot read"):
        OcrReward(reader).applies_to(Prompt("sign", "a sign", texts=(text,)))


def test_rapidocr_can_return_the_texts_of_real_prompts(
    reader: RapidOcrReader, assets_dir: Path
) -> None:
    reward = OcrReward(reader)
    lines = (assets_dir / "prompts" / "ocr_prompts.txt").read_text(encoding="utf-8").splitlines()
    quoted = [tuple(re.findall('"([^"]+)"', line)) for line in lines]
    applies = [
        reward.applies_to(Prompt(line, line, texts=texts))
        for line, texts in zip(lines, quoted, strict=True)
    ]
    assert sum(applies) == sum(bool(texts) for texts in quoted) > 450


def test_rapidocr_needs_no_network_and_says_nothing(
    draw_word: Draw,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def no_network(*arguments: object) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    with caplog.at_level(logging.DEBUG):
        texts = RapidOcrReader(threads=1, detection_side=160).read(draw_word("OPEN")[None])
    assert texts == ["OPEN"]
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_rapidocr_has_no_modules_to_move(reader: RapidOcrReader) -> None:
    assert reader.modules() == ()


def test_rapidocr_reads_better_where_small_pictures_are_enlarged(draw_word: Draw) -> None:
    # At 128 pixels, to which a side of 64 changes nothing, the detector misses thin letters.
    words = ("YUHI", "HILL", "FILM", "OPEN")
    pictures = torch.stack([draw_word(word) for word in words])

    def match(detection_side: int) -> float:
        texts = RapidOcrReader(threads=1, detection_side=detection_side).read(pictures)
        return mean_match(texts, words)

    assert match(256) > match(64) + 0.125
