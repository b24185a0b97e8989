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


def test_psnr_of_equal_and_of_nearly_equal_images_is_one() -> None:
    nearly = flat(100)
    nearly[0, 0, 0] = 101  # 48.13 dB for all values, here one of 1152: 48.13 + 30.61 > 50
    prompt = Prompt("0", "a", target=flat(100))
    scores = PsnrReward().score([prompt] * 2, torch.stack([flat(100), nearly]))
    assert torch.equal(scores, torch.ones(2))


def test_psnr_compares_each_image_with_its_own_target() -> None:
    prompts = [Prompt("0", "a", target=flat(51)), Prompt("1", "a", target=flat(0))]
    scores = PsnrReward().score(prompts, torch.stack([flat(51), flat(255)]))
    torch.testing.assert_close(scores, torch.tensor([1.0, 0.0]))


def test_parts_of_psnr_share_the_loss_by_squared_difference() -> None:
    target = torch.zeros(3, 2, 2, dtype=torch.uint8)
    image = target.clone()
    image[:, 0, 1] = 51  # a fifth of the range in each channel
    image[0, 1, 0] = 102  # two fifths in one
    scores = PsnrReward().score_with_map([Prompt("0", "a", target=target)], image[None])
    # Squared differences 3 / 25 and 4 / 25, over 12 values; a score of 0.325.
    score = 10 * math.log10(12 / (7 / 25)) / 50
    lost = 1 - score
    assert scores.values.item() == pytest.approx(score, abs=1e-6)
    expected = torch.tensor([[[0.25, 0.25 - lost * 3 / 7], [0.25 - lost * 4 / 7, 0.25]]])
    torch.testing.assert_close(scores.score_map, expected, rtol=0, atol=1e-6)


def test_parts_of_psnr_of_limited_scores() -> None:
    nearly, white, half = flat(0), flat(255), flat(0)
    nearly[0, 0, 0] = 1
    half[:, :8] = 255  # 3 dB, all of it lost in the upper half
    prompt = Prompt("0", "a", target=flat(0))
    images = torch.stack([flat(0), nearly, white, half])
    scores = PsnrReward().score_with_map([prompt] * 4, images)
    assert torch.equal(scores.values, PsnrReward().score([prompt] * 4, images))
    assert (scores.score_map[:2] == torch.tensor(1 / 384)).all()
    torch.testing.assert_close(scores.score_map[2], torch.zeros(16, 24), rtol=0, atol=1e-9)
    torch.testing.assert_close(scores.score_map.sum(dim=(1, 2)), scores.values, rtol=0, atol=1e-6)
    assert scores.score_map[3, 8:].sum().item() == pytest.approx(0.5, abs=1e-6)
