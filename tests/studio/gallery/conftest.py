"""A run as training stores it, small, and a reader of what the gallery makes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm_grpo.config import compose_config, to_yaml
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.writing import append_metrics, encode, write_evaluation, write_rollout
from glm_grpo.types import Evaluation, Experience, ImageBatch, PromptBatch, Rollout
from rewards.score_map import ScoreBoxes
from rewards.types import Prompt, RewardTable
from rewards.weighting import combine

NAMES = ("lpips", "ssim", "ocr", "aesthetic")
SEEDS = (2**63 - 1, 7)


class StoredRun:
    """Two prompts, two images each: the one with a target and a text, the other without."""

    def __init__(self, path: Path, config: str) -> None:
        self.folder = RunFolder(path)
        self.prompts = (
            Prompt(
                "kite",
                'a red sign that says "OPEN"',
                texts=("OPEN",),
                target=torch.full((3, 8, 8), 9, dtype=torch.uint8),
            ),
            Prompt("b", "a field"),
        )
        self.notes: tuple[tuple[str, ...], ...] = (("OPFN", ""), ())
        self.raw = torch.tensor(
            [
                [[0.1, 0.2, 0.3, 0.4], [1 / 3, 0.25, 1.0, 1e-7]],
                [[0.0, 0.0, 0.0, 0.7], [0.0, 0.0, 0.0, -2.5]],
            ]
        )
        self.size = 8
        self.places: Tensor | None = None
        self.score_boxes: dict[str, tuple[ScoreBoxes, ...]] = {}
        self.objects: dict[str, tuple[tuple[tuple[str, ...], ...], ...]] = {}
        path.mkdir(parents=True, exist_ok=True)
        self.folder.config_path.write_text(config, encoding="utf-8")

    def table(self) -> RewardTable:
        return RewardTable(
            names=NAMES,
            raw=self.raw,
            is_applicable=torch.tensor([[True] * 4, [False, False, False, True]]),
            weights=torch.tensor([0.4, 0.2, 0.3, 0.1]),
            std_floors=torch.full((4,), 1e-4),
            notes={"ocr": self.notes},
            score_boxes=self.score_boxes,
            objects=self.objects,
        )

    def images(self, value: int = 0) -> ImageBatch:
        pixels = torch.full((2, 2, 3, self.size, self.size), value, dtype=torch.uint8)
        pixels[:, 1, 0] = 200
        return ImageBatch(pixels, decode_seeds=SEEDS)

    def record_step(self, step: int, **metrics: float) -> None:
        """A training step, as the loop records it."""
        table = self.table()
        experience = Experience(
            prompts=PromptBatch(self.prompts, 2, 32, 32, seed=0, decode_seeds=SEEDS),
            rollout=Rollout(
                token_ids=torch.zeros(2, 2, 3, dtype=torch.int64),
                log_probs=torch.zeros(2, 2, 3),
                sampling_mask=None,
            ),
            images=self.images(step),
            scores=table,
            totals=combine(table, mode="weighted_sum"),
            penalties=torch.tensor([[0.0, 0.1], [0.0, -3.2]]),
            advantages=torch.tensor([[[-0.7], [0.7]], [[0.0], [0.0]]]),
            place_credit=self.places,
        )
        png_files = encode(experience.images)
        write_rollout(self.folder, experience, png_files, step, combine="weighted_sum")
        append_metrics(self.folder, step, {"reward/mean": step / 7, **metrics})

    def record_evaluation(self, step: int, *, totals: Tensor | None = None) -> None:
        table = self.table()
        evaluation = Evaluation(
            step=step,
            prompts=self.prompts,
            images=self.images(step),
            scores=replace(table, notes={"ocr": self.notes}),
            totals=combine(table, mode="weighted_sum") if totals is None else totals,
            entropy=torch.tensor([1.0, 2.0]),
        )
        write_evaluation(self.folder, evaluation, combine="weighted_sum")

    @property
    def gallery(self) -> Path:
        return self.folder.gallery_path.parent

    def data(self, key: str) -> dict[str, Any]:
        """What a data file hands over; it must be one call with the key and JSON."""
        text = (self.gallery / "data" / f"{key}.js").read_text(encoding="utf-8")
        match = re.fullmatch(r"glmGallery\.receive\((\".*?\"), ?(\{.*\})\);\n", text, re.DOTALL)
        assert match is not None, text[:200]
        assert json.loads(match[1]) == key
        return json.loads(match[2])

    def files(self, part: str) -> list[str]:
        """Files below a part of the gallery."""
        top = self.gallery / part
        return sorted(p.relative_to(top).as_posix() for p in top.rglob("*") if p.is_file())


@pytest.fixture(scope="session")
def tiny_yaml(configs_dir: Path) -> str:
    """A resolved config, as a run stores it."""
    return to_yaml(compose_config(configs_dir, "tiny", ["train.steps=40"]))


@pytest.fixture
def make_run(tmp_path: Path, tiny_yaml: str) -> Callable[..., StoredRun]:
    """Makes an empty run of a name."""
    return lambda name="run": StoredRun(tmp_path / name, tiny_yaml)


@pytest.fixture
def run(make_run: Callable[..., StoredRun]) -> StoredRun:
    """An empty run: config, no records."""
    return make_run()
