from __future__ import annotations

import itertools
import json
import logging
import math
import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from rewards.terms.ocr import OcrReward
from rewards.terms.ocr_rapidocr import RapidOcrReader
from rewards.terms.text_matching import match_texts
from rewards.types import Prompt

WORDS = ("OPEN", "TAXI", "JAZZ", "BUS", "FERN", "QUAY")


@pytest.fixture(scope="module")
def reader() -> RapidOcrReader:
    return RapidOcrReader(threads=2, detection_side=160)


def mean_match(texts: list[str], words: Sequence[str]) -> float:
    """Letters beside a word count as mistakes here."""
    pairs = zip(texts, words, strict=True)
    scores = [match_texts(text, [word], extra_text_penalty=1.0) for text, word in pairs]
    return sum(scores) / len(scores)


def read_texts(reader: RapidOcrReader, pixels: UInt8[Tensor, "N 3 H W"]) -> list[str]:
    return [" ".join(box.text for box in boxes) for boxes in reader.read(pixels)]


def draw_word(word: str) -> UInt8[Tensor, "3 128 128"]:
    """White letters on blue, one per 32 pixel cell, with a plain square below."""
    image = Image.new("RGB", (128, 128), (30, 60, 180))
    canvas = ImageDraw.Draw(image)
    font = ImageFont.load_default(size=30)
    for column, letter in enumerate(word):
        place = (16 + 32 * column, 48)
        canvas.text(place, letter, fill="white", font=font, anchor="mm", stroke_width=1)
    canvas.rectangle((38, 70, 89, 121), fill="white")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def draw_poster(*words: tuple[str, int, int], turn: int = 0) -> UInt8[Tensor, "1 3 256 256"]:
    """Words around places, and the image turned counter-clockwise by some degrees."""
    image = Image.new("RGB", (256, 256), (30, 60, 180))
    font = ImageFont.load_default(size=24)
    for text, x, y in words:
        ImageDraw.Draw(image).text((x, y), text, fill="white", font=font, anchor="mm")
    return torch.from_numpy(np.array(image.rotate(turn))).permute(2, 0, 1)[None]


def load_photo(path: Path, size: int | None = None) -> UInt8[Tensor, "1 3 H W"]:
    """As it is, or scaled to a square."""
    image = Image.open(path).convert("RGB")
    if size is not None:
        image = image.resize((size, size), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]


def test_rapidocr_reads_drawn_words(reader: RapidOcrReader) -> None:
    texts = read_texts(reader, torch.stack([draw_word(word) for word in WORDS]))
    assert mean_match(texts, WORDS) >= 0.95


def test_rapidocr_reads_a_batch_as_it_reads_one_by_one(reader: RapidOcrReader) -> None:
    images = torch.stack([draw_word(word) for word in ("OPEN", "BUS", "A")])
    single = [reader.read(images[index : index + 1])[0] for index in range(3)]
    assert reader.read(images) == single


def test_rapidocr_reads_nothing_in_a_blank_image(reader: RapidOcrReader) -> None:
    grey = torch.full((1, 3, 128, 128), 127, dtype=torch.uint8)
    assert reader.read(grey) == [[]]
    scores = OcrReward(reader).score_with_map([Prompt("a", "a", texts=("OPEN",))], grey)
    assert scores.values.tolist() == [0.0]
    assert scores.score_map == ((),)


def test_rapidocr_reads_photographed_words(reader: RapidOcrReader, assets_dir: Path) -> None:
    folder = assets_dir / "images" / "words"
    labels: dict[str, str] = json.loads((folder / "labels.json").read_text(encoding="utf-8"))
    read = [text for name in labels for text in read_texts(reader, load_photo(folder / name))]
    assert read == list(labels.values())
    assert len(read) == 4


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (
            [("GRAND", 65, 90), ("LIVE", 195, 90), ("OPENING", 65, 140), ("MUSIC", 195, 140)],
            ("GRAND OPENING", "LIVE MUSIC"),
        ),
        ([("GRAND", 70, 100), ("OPENING", 80, 150), ("SALE", 210, 100)], ("GRAND OPENING", "SALE")),
    ],
    ids=["columns", "badge"],
)
def test_rapidocr_reads_posters_with_words_beside_the_text(
    reader: RapidOcrReader, words: list[tuple[str, int, int]], texts: tuple[str, ...]
) -> None:
    scores = OcrReward(reader).score([Prompt("a", "a", texts=texts)], draw_poster(*words)).values
    assert scores.tolist() == [1.0]


@pytest.mark.parametrize("turn", [90, -90])
def test_rapidocr_reads_text_turned_either_way(reader: RapidOcrReader, turn: int) -> None:
    poster = draw_poster(("GRAND", 128, 100), ("OPENING", 128, 150), turn=turn)
    prompt = Prompt("a", "a", texts=("GRAND OPENING",))
    assert OcrReward(reader).score([prompt], poster).values.tolist() == [1.0]


def drawn_line(
    text: str, *, width: int, height: int, size: int, turn: int = 0
) -> tuple[UInt8[Tensor, "1 3 H W"], list[tuple[float, float]]]:
    """A line in the middle, turned counter-clockwise, and the middle of each letter."""
    image = Image.new("RGB", (width, height), (30, 60, 180))
    font = ImageFont.load_default(size=size)
    middle = (width / 2, height / 2)
    ImageDraw.Draw(image).text(middle, text, fill="white", font=font, anchor="mm")
    ends = [font.getlength(text[:stop]) for stop in range(len(text) + 1)]
    along = [(start + stop - ends[-1]) / 2 for start, stop in itertools.pairwise(ends)]
    x, y = math.cos(math.radians(turn)), -math.sin(math.radians(turn))
    places = [(middle[0] + x * step, middle[1] + y * step) for step in along]
    letters = [place for place, letter in zip(places, text, strict=True) if letter != " "]
    return torch.from_numpy(np.array(image.rotate(turn))).permute(2, 0, 1)[None], letters


@pytest.mark.parametrize(
    ("text", "width", "height", "size", "turn"),
    [
        ("OPEN", 128, 128, 24, 0),
        ("Illumine", 512, 512, 60, 0),
        ("LIVE MUSIC", 1024, 1024, 90, 0),
        ("OPENING", 256, 256, 30, 90),
        ("OPENING", 256, 256, 30, -90),
        ("GRAND", 256, 256, 24, 15),
    ],
)
def test_rapidocr_says_where_each_letter_stands(
    reader: RapidOcrReader, text: str, width: int, height: int, size: int, turn: int
) -> None:
    pixels, places = drawn_line(text, width=width, height=height, size=size, turn=turn)
    scores = OcrReward(reader).score_with_map([Prompt("a", "a", texts=(text,))], pixels)
    assert scores.values.tolist() == [1.0]
    assert isinstance(scores.score_map, tuple)
    (pieces,) = scores.score_map
    assert "".join(piece.text for piece in pieces) == text.replace(" ", "")
    assert [piece.value for piece in pieces] == pytest.approx([1 / len(pieces)] * len(pieces))
    for piece, (x, y) in zip(pieces, places, strict=True):
        middle = (piece.left + piece.right) / 2, (piece.top + piece.bottom) / 2
        # Letters are 0.6 of the size wide; RapidOCR's columns 0.2, and twice that in strips.
        assert middle == pytest.approx((x, y), abs=0.3 * size)
        assert piece.left <= x <= piece.right
        assert piece.top <= y <= piece.bottom


def test_rapidocr_keeps_what_it_is_sure_of_in_one_direction(reader: RapidOcrReader) -> None:
    # The other way round it reads Z with a confidence of 0.42.
    assert read_texts(reader, draw_poster(("JAZZ", 128, 128), turn=90)) == ["JAZZ"]
    # Read as G with a confidence of 0.23, which RapidOCR leaves out.
    assert reader.read(draw_poster(("&", 128, 128))) == [[]]


def test_rapidocr_finds_both_scripts_on_a_photographed_can(
    reader: RapidOcrReader, assets_dir: Path
) -> None:
    # In two scripts and on several lines, among other text.
    photo = load_photo(assets_dir / "images" / "photos" / "can_01.jpg", 512)
    can = [Prompt("can", "a can", texts=("TRANSATLANTIC IPA", "横越大西洋"))]
    assert OcrReward(reader).score(can, photo).values.tolist() == [1.0]
    # What stands there besides costs only where that was asked for, and then not everything.
    strict = OcrReward(reader, extra_text_penalty=1.0).score(can, photo).values
    assert 0.4 < strict.item() < 1.0


def test_rapidocr_knows_the_characters_of_its_model(reader: RapidOcrReader) -> None:
    alphabet = reader.alphabet()
    assert set("AZaz09 é営业!") <= alphabet
    assert {len(character) for character in alphabet} == {1}
    assert "д" not in alphabet


def test_rapidocr_needs_no_network_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def no_network(*arguments: object) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    with caplog.at_level(logging.DEBUG):
        reader = RapidOcrReader(threads=1, detection_side=160)
        texts = read_texts(reader, draw_word("OPEN")[None])
    assert texts == ["OPEN"]
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
