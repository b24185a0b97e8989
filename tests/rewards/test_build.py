from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rewards.base import Reward
from rewards.build import build_reward, build_scorer
from rewards.config import RewardConfig
from rewards.score import Scorer
from rewards.terms.reading_orders import TextBox
from rewards.terms.ssim import SsimConfig
from rewards.types import Prompt, RewardError

CPU = torch.device("cpu")


def build(**terms: dict[str, Any]) -> Scorer:
    return build_scorer(RewardConfig.model_validate({"terms": terms}), CPU)


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reader reads OPEN DAY in every image."""

    class Reader:
        def __init__(self, **options: int) -> None: ...

        def read(self, pixels: Tensor) -> list[list[TextBox]]:
            return [[TextBox("OPEN DAY", 0.0, 0.0, 8.0, 1.0)]] * len(pixels)

        def alphabet(self) -> frozenset[str]:
            return frozenset("OPEN")

        def modules(self) -> tuple[torch.nn.Module, ...]:
            return ()

    monkeypatch.setattr("rewards.terms.ocr_rapidocr.RapidOcrReader", Reader)


OCR = {"kind": "ocr", "weight": 1.0, "engine": "rapidocr"}


def test_build_makes_the_terms_of_the_config_in_order() -> None:
    scorer = build(
        ocr={**OCR, "weight": 0.3},
        lpips={"weight": 0.5, "network": "squeeze", "pretrained": False},
        ssim={"weight": -0.2},
    )
    assert scorer.names == ("lpips", "ssim", "ocr")
    assert len(scorer.modules()) == 1
    target = torch.full((3, 64, 64), 100, dtype=torch.uint8)
    prompts = [Prompt("likeness", "a", target=target), Prompt("sign", "b", texts=("OPEN",))]
    table = scorer.score(prompts, target.expand(2, 2, 3, 64, 64))
    torch.testing.assert_close(table.weights, torch.tensor([0.5, -0.2, 0.3]))
    assert table.is_applicable.tolist() == [[True, True, False], [False, False, True]]
    torch.testing.assert_close(table.raw[0], torch.tensor([[1.0, 1.0, 0.0]] * 2))
    torch.testing.assert_close(table.raw[1], torch.tensor([[0.0, 0.0, 1.0]] * 2))


def test_build_gives_every_term_its_own_options() -> None:
    values = {
        "overlap": False,
        "terms": {
            "shape": {"kind": "ssim", "weight": 0.5, "std_floor": 0.25, "prompt_ids": "b*"},
            "pull": {"kind": "ssim", "weight": -0.25, "std_floor": 0.125},
            "seen": {"kind": "ssim", "weight": 0.0, "when": "evaluation"},
        },
    }
    scorer = build_scorer(RewardConfig.model_validate(values), CPU)
    assert scorer.names == ("pull", "seen", "shape")
    assert not scorer.is_overlapping
    target = torch.full((3, 64, 64), 100, dtype=torch.uint8)
    with scorer.begin([Prompt("a", "a", target=target)], is_training=True) as scoring:
        scoring.add(target[None])
        table = scoring.finish()
    assert table.weights.tolist() == [-0.25, 0.0, 0.5]
    torch.testing.assert_close(table.std_floors, torch.tensor([0.125, 1e-4, 0.25]))
    assert table.is_applicable.tolist() == [[True, False, False]]


class Program:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_library_that_unpickles_anything_runs_no_program(tmp_path: Path) -> None:
    class Careless(SsimConfig):
        def build(self, device: torch.device) -> Reward:
            torch.load(tmp_path / "weights.pt", weights_only=False)
            return super().build(device)

    options = Careless(kind="ssim", weight=1.0)
    before = dict(os.environ)
    torch.save({"weight": torch.zeros(1)}, tmp_path / "weights.pt")
    build_reward(options, CPU)
    torch.save(Program(tmp_path / "was run"), tmp_path / "weights.pt")
    with pytest.raises(RewardError, match="was not run"):
        build_reward(options, CPU)
    assert not (tmp_path / "was run").exists()
    assert dict(os.environ) == before
