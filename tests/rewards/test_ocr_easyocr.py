from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from easyocr.config import detection_models, recognition_models
from easyocr.craft import CRAFT
from easyocr.model.vgg_model import Model

from rewards.terms.ocr_easyocr import EasyOcrReader
from rewards.types import RewardError

CPU = torch.device("cpu")
ENGLISH = recognition_models["gen2"]["english_g2"]


def use_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for EASYOCR_MODULE_PATH, and no network."""

    def no_network(*arguments: Any, **options: Any) -> None:
        raise URLError("no network")

    monkeypatch.setattr("easyocr.easyocr.MODULE_PATH", str(folder))
    monkeypatch.setattr("rewards.terms.ocr_easyocr.MODULE_PATH", str(folder))
    monkeypatch.setattr("easyocr.easyocr.download_and_unzip", no_network)


def store(
    state: dict[str, Any], folder: Path, entry: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / entry["filename"]
    torch.save(state, path)
    monkeypatch.setitem(entry, "md5sum", hashlib.md5(path.read_bytes()).hexdigest())


@pytest.fixture(scope="module")
def sees_an_a_everywhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Weights for EasyOCR's own networks: all pixels are text, and every text is an A."""
    folder = tmp_path_factory.mktemp("easyocr")
    (folder / "model").mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_folder(folder, monkeypatch)
        detector = CRAFT(pretrained=False, freeze=False)
        last = detector.conv_cls[-1]
        torch.nn.init.zeros_(last.weight)
        last.bias.data = torch.tensor([1.0, 0.0])  # text, link between letters
        craft = detection_models["craft"]
        store(detector.state_dict(), folder / "model", craft, monkeypatch)

        characters = ENGLISH["characters"]
        recogniser = Model(1, 256, 256, num_class=len(characters) + 1)
        torch.nn.init.zeros_(recogniser.Prediction.weight)
        torch.nn.init.zeros_(recogniser.Prediction.bias)
        recogniser.Prediction.bias.data[1 + characters.index("A")] = 20.0
        # Published weights were saved from a DataParallel module, whose prefix EasyOCR cuts off.
        state = {f"module.{key}": value for key, value in recogniser.state_dict().items()}
        store(state, folder / "model", ENGLISH, monkeypatch)
        yield


@pytest.mark.usefixtures("sees_an_a_everywhere")
def test_easyocr_reads_through_its_own_networks_and_knows_their_characters() -> None:
    reader = EasyOcrReader(("en",), device=CPU)
    pixels = torch.full((2, 3, 32, 48), 127, dtype=torch.uint8)
    assert reader.read(pixels) == ["A", "A"]
    assert reader.alphabet() == frozenset(ENGLISH["characters"])
    modules = reader.modules()
    assert [type(module).__name__ for module in modules] == ["CRAFT", "Model"]
    assert not any(parameter.requires_grad for m in modules for parameter in m.parameters())


@pytest.mark.gpu
@pytest.mark.usefixtures("sees_an_a_everywhere")
def test_easyocr_reads_where_its_networks_are() -> None:
    reader = EasyOcrReader(("en",), device=torch.device("cuda"))
    pixels = torch.full((1, 3, 64, 96), 127, dtype=torch.uint8)
    assert reader.read(pixels) == ["A"]
    for module in reader.modules():
        module.to("cpu")
    assert reader.read(pixels) == ["A"]


@pytest.mark.usefixtures("sees_an_a_everywhere")
def test_easyocr_refuses_languages_it_does_not_know() -> None:
    with pytest.raises(RewardError, match=r"ocr.languages \['xx'\]"):
        EasyOcrReader(("xx",), device=CPU)


def test_easyocr_offline_says_which_files_go_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_folder(tmp_path, monkeypatch)
    with pytest.raises(RewardError, match="no network") as caught:
        EasyOcrReader(("en",), device=CPU)
    assert detection_models["craft"]["filename"] == "craft_mlt_25k.pth"
    message = str(caught.value)
    assert f"craft_mlt_25k.pth and a recogniser (for English {ENGLISH['filename']})" in message
    assert str(tmp_path / "model") in message
    assert "ocr.engine=rapidocr" in message
