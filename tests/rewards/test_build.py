from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from rewards.build import build_scorer
from rewards.config import RewardConfig
from rewards.types import Prompt, RewardError

CPU = torch.device("cpu")


def test_build_makes_the_terms_of_the_config_in_order() -> None:
    values = {
        "terms": {
            "ocr": {"weight": 0.3, "engine": "rapidocr", "threads": 1, "detection_side": 64},
            "lpips": {"weight": 0.5, "network": "squeeze", "pretrained": False},
            "ssim": {"weight": -0.2},
        }
    }
    scorer = build_scorer(RewardConfig.model_validate(values), CPU)
    assert scorer.names == ("lpips", "ssim", "ocr")
    assert len(scorer.modules()) == 1
    target = torch.full((3, 64, 64), 100, dtype=torch.uint8)
    prompts = [Prompt("likeness", "a", target=target), Prompt("sign", "b", texts=("B",))]
    table = scorer.score(prompts, target.expand(2, 2, 3, 64, 64))
    torch.testing.assert_close(table.weights, torch.tensor([0.5, -0.2, 0.3]))
    assert table.is_applicable.tolist() == [[True, True, False], [False, False, True]]
    torch.testing.assert_close(table.raw[0], torch.tensor([[1.0, 1.0, 0.0]] * 2))
    assert table.raw[1].tolist() == [[0.0, 0.0, 0.0]] * 2


def test_build_makes_two_terms_of_one_kind_under_their_own_names() -> None:
    values = {
        "overlap": False,
        "terms": {
            "shape": {"kind": "ssim", "weight": 0.5, "std_floor": 0.25},
            "pull": {"kind": "ssim", "weight": -0.25, "std_floor": 0.125},
        },
    }
    scorer = build_scorer(RewardConfig.model_validate(values), CPU)
    assert scorer.names == ("pull", "shape")
    assert not scorer.is_overlapping
    target = torch.full((3, 64, 64), 100, dtype=torch.uint8)
    table = scorer.score([Prompt("a", "a", target=target)], target.expand(1, 1, 3, 64, 64))
    assert table.weights.tolist() == [-0.25, 0.5]
    assert table.std_floors.tolist() == [0.125, 0.25]
    torch.testing.assert_close(table.raw, torch.ones(1, 1, 2))


def test_build_gives_ocr_its_options() -> None:
    image = Image.new("RGB", (256, 160), "white")
    font = ImageFont.load_default(size=44)
    ImageDraw.Draw(image).text((40, 20), "OPEN\nDAY", "black", font, spacing=20)
    picture = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    prompts = [Prompt("upper", "a", texts=("OPEN",)), Prompt("lower", "b", texts=("open",))]
    ocr = {"kind": "ocr", "weight": 1.0, "engine": "rapidocr", "threads": 1}
    terms = {
        "cased": {**ocr, "case_sensitive": True},
        "plain": ocr,
        "strict": {**ocr, "extra_text_penalty": 1.0},
    }
    scorer = build_scorer(RewardConfig.model_validate({"terms": terms}), CPU)
    table = scorer.score(prompts, picture.expand(2, 1, -1, -1, -1))
    # 4 of the 7 letters that can be read were asked for; none of them in small letters.
    expected = torch.tensor([[[1.0, 1.0, 4 / 7]], [[0.0, 1.0, 4 / 7]]])
    torch.testing.assert_close(table.raw, expected)


def test_build_gives_every_term_its_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "resting.py").write_text("import time\ndef late(*arguments): time.sleep(9)\n")
    monkeypatch.chdir(tmp_path)
    values = {"kind": "custom", "weight": 1.0, "function": "resting:late", "timeout_seconds": 0.125}
    scorer = build_scorer(RewardConfig.model_validate({"terms": {"late": values}}), CPU)
    with pytest.raises(RewardError, match="term late, prompt a: not scored within 0.125 seconds"):
        scorer.score([Prompt("a", "a")], torch.zeros(1, 1, 3, 8, 8, dtype=torch.uint8))


def test_build_imports_only_what_the_config_names() -> None:
    code = """
import sys, torch
from rewards.build import build_scorer
from rewards.config import RewardConfig
values = {"terms": {"ssim": {"weight": 1.0}}}
build_scorer(RewardConfig.model_validate(values), torch.device("cpu"))
unwanted = {"lpips", "easyocr", "rapidocr", "open_clip", "glm_grpo"} & set(sys.modules)
sys.exit(f"imported {unwanted}" if unwanted else 0)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
