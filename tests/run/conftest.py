"""What tests of more than one file of this folder use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from glm_grpo.types import Evaluation, ImageBatch
from rewards.types import Prompt, RewardTable


def build(*, prompts: int = 2, samples: int = 2, height: int = 4, width: int = 8) -> Evaluation:
    """The first prompt has a green target and text to be read, the others have neither.

    Image s of prompt p is grey, of value 10 p + s, and so are its scores, in hundredths.
    """
    target = torch.tensor([0, 255, 0], dtype=torch.uint8)[:, None, None].expand(3, height, width)
    values = 10.0 * torch.arange(prompts)[:, None] + torch.arange(samples)
    grey = values.to(torch.uint8)[:, :, None, None, None]
    applies = torch.tensor([[True, index == 0] for index in range(prompts)])
    read = (tuple(f"word {sample}" for sample in range(samples)), *[()] * (prompts - 1))
    return Evaluation(
        step=20,
        prompts=(
            Prompt("sign", 'a sign "CAT"', texts=("CAT",), target=target),
            *(Prompt(f"field-{index}", "a | field") for index in range(1, prompts)),
        ),
        images=ImageBatch(
            grey.expand(prompts, samples, 3, height, width).contiguous(), tuple(range(prompts))
        ),
        scores=RewardTable(
            names=("clip", "ocr"),
            raw=(values / 100).unsqueeze(-1).expand(prompts, samples, 2).contiguous(),
            is_applicable=applies,
            weights=torch.tensor([0.5, 0.5]),
            std_floors=torch.tensor([1e-4, 1e-4]),
            notes={"ocr": read},
        ),
        totals=values / 50,
        entropy=torch.zeros(prompts),
    )


@pytest.fixture(scope="session")
def make_evaluation() -> Callable[..., Evaluation]:
    """Builds an evaluation of so many prompts and samples, of images of so many pixels."""
    return build
