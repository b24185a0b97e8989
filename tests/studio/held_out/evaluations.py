"""Small evaluations of one term, stored as runs store them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.writing import write_evaluation
from glm_grpo.types import Evaluation, ImageBatch
from rewards.types import Prompt, RewardTable

ROWS = [{"tag": "b"}, {"tag": "a"}, {"tag": "b"}]
BEFORE = [[0.0, 1.0], [0.5, 0.5], [0.0, 0.5]]
AFTER = [[1.0, 1.0], [0.5, 1.0], [0.5, 0.5]]


def store(
    folder: RunFolder,
    step: int,
    scores: Sequence[Sequence[float]],
    rows: Sequence[dict[str, Any]],
    *,
    applies: Sequence[bool] | None = None,
    weight: float = 0.5,
) -> None:
    """An evaluation of a term `ocr`: a row of scores, and one of a file, for each prompt."""
    raw = torch.tensor(scores)
    is_applicable = torch.tensor(applies or [True] * len(rows))[:, None]
    table = RewardTable(
        ("ocr",),
        raw.masked_fill(~is_applicable, 0.0)[..., None],
        is_applicable,
        torch.tensor([weight]),
        torch.tensor([1e-4]),
    )
    prompts = tuple(Prompt(f"p{n}", f"prompt {n}", metadata=row) for n, row in enumerate(rows))
    images = ImageBatch(torch.zeros(*raw.shape, 3, 8, 8, dtype=torch.uint8), (0,) * len(rows))
    evaluation = Evaluation(step, prompts, images, table, weight * raw, torch.ones(len(rows)))
    write_evaluation(folder, evaluation, combine="weighted_sum")
