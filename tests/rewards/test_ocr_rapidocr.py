from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from rewards.ocr import OcrReward, text_similarity
from rewards.ocr_rapidocr import RapidOcrReader
from rewards.types import Prompt

Draw = Callable[[str], UInt8[Tensor, "3 128 128"]]
WORDS = ("OPEN", "TAXI", "JAZZ", "BUS", "FERN", "QUAY")


@pytest.fixture(scope="module")
def reader() -> RapidOcrReader:
    return RapidOcrReader(threads=2, detection_side=160)


def test_rapidocr_reads_drawn_words(reader: RapidOcrReader, draw_word: Draw) -> None:
    texts = reader.read(torch.stack([draw_word(word) for word in WORDS]))
    similarities = [text_similarity(text, word) for text, word in zip(texts, WORDS, strict=True)]
    assert sum(similarities) / len(WORDS) >= 0.95


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
    similarities = []
    for name, label in labels.items():
        picture = torch.from_numpy(np.array(Image.open(folder / name).convert("RGB")))
        (text,) = reader.read(picture.permute(2, 0, 1)[None])
        similarities.append(text_similarity(text, label))
    assert similarities == [1.0] * 4


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

    def total_similarity(detection_side: int) -> float:
        texts = RapidOcrReader(threads=1, detection_side=detection_side).read(pictures)
        return sum(map(text_similarity, texts, words))

    assert total_similarity(256) > total_similarity(64) + 0.5
