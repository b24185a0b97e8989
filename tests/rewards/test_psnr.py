from __future__ import annotations

import math

import pytest
import torch
from jaxtyping import UInt8
from torch import Tensor

from rewards.terms.psnr import PsnrReward
from rewards.types import Prompt


def flat(level: int) -> UInt8[Tensor, "3 16 24"]:
    return torch.full((3, 16, 24), level, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("level", "decibels"),
    [
        (255, 0.0),  # white against black: mean squared difference 1
        (51, 10 * math.log10(25)),  # a fifth of the range: 1 / 0.2 ** 2 = 25
        (1, 20 * math.log10(255)),  # one level everywhere: 48.13 dB
    ],
)
def test_psnr_equals_the_formula_over_fifty_decibels(level: int, decibels: float) -> None:
    scores = PsnrReward().score([Prompt("0", "a", target=flat(0))], flat(level)[None])
    torch.testing.assert_close(scores, torch.tensor([decibels / 50]), rtol=0, atol=1e-5)


def test_psnr_of_equal_and_of_nearly_equal_pictures_is_one() -> None:
    nearly = flat(100)
    nearly[0, 0, 0] = 101  # 48.13 dB for all values, here one of 1152: 48.13 + 30.61 > 50
    prompt = Prompt("0", "a", target=flat(100))
    scores = PsnrReward().score([prompt] * 2, torch.stack([flat(100), nearly]))
    assert torch.equal(scores, torch.ones(2))


def test_psnr_compares_each_picture_with_its_own_target() -> None:
    prompts = [Prompt("0", "a", target=flat(51)), Prompt("1", "a", target=flat(0))]
    scores = PsnrReward().score(prompts, torch.stack([flat(51), flat(255)]))
    torch.testing.assert_close(scores, torch.tensor([1.0, 0.0]))
