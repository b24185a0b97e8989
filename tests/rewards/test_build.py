from __future__ import annotations

import subprocess
import sys

import torch

from rewards.build import build_scorer
from rewards.config import RewardConfig
from rewards.types import Prompt

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
