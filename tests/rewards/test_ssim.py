from __future__ import annotations

import pytest
import torch
from jaxtyping import UInt8
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

from rewards.terms.ssim import SsimReward
from rewards.types import Prompt

CPU = torch.device("cpu")


def noise(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, shape, generator=generator).to(torch.uint8)


def flat(level: int) -> UInt8[Tensor, "3 16 16"]:
    return torch.full((3, 16, 16), level, dtype=torch.uint8)


def test_ssim_equals_the_reference_figures(lpips_images: UInt8[Tensor, "3 3 H W"]) -> None:
    reference, *distorted = lpips_images
    prompt = Prompt("ref", "an image", target=reference)
    scores = SsimReward(CPU).score([prompt] * 2, torch.stack(distorted))
    torch.testing.assert_close(scores, torch.tensor([0.450091, 0.285930]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("spread", [1, 8, 255])
def test_ssim_equals_that_of_torchmetrics_in_float64(spread: int) -> None:
    target = noise(1, 3, 24, 40)
    image = (target.int() + noise(1, 3, 24, 40).flip(3).int() % spread).clamp(max=255).byte()
    expected = structural_similarity_index_measure(
        image.double() / 255, target.double() / 255, data_range=1.0
    )
    scores = SsimReward(CPU).score([Prompt("0", "a", target=target[0])], image)
    assert scores.item() == pytest.approx(float(expected), abs=1e-6)


def test_ssim_of_a_copy_is_one_and_no_other_image_reaches_it() -> None:
    prompts = [Prompt(str(level), "a", target=flat(level)) for level in range(256)]
    reward = SsimReward(CPU)
    copies = torch.stack([flat(level) for level in range(256)])
    assert torch.equal(reward.score(prompts, copies), torch.ones(256))
    assert reward.score(prompts[:255], copies[1:]).max() < 1
    assert reward.score(prompts[1:], copies[:255]).max() < 1
    textured = noise(3, 16, 16)
    assert reward.score([Prompt("0", "a", target=textured)], textured[None]) == 1


@pytest.mark.parametrize(("height", "width"), [(16, 16), (6, 41), (37, 24)])
def test_parts_of_ssim_add_up_to_its_scores(height: int, width: int) -> None:
    images, targets = noise(3, 3, height, width), noise(3, 3, height, width).flip(3)
    targets[2] = images[2]
    prompts = [Prompt(str(row), "a", target=target) for row, target in enumerate(targets)]
    reward = SsimReward(CPU)
    scores = reward.score_with_map(prompts, images)
    assert torch.equal(scores.values, reward.score(prompts, images))
    assert scores.score_map.shape == (3, height, width)
    torch.testing.assert_close(scores.score_map.sum(dim=(1, 2)), scores.values, rtol=0, atol=1e-6)
    # A copy has earned as much in every place.
    even = torch.full((height, width), 1 / (height * width))
    torch.testing.assert_close(scores.score_map[2], even, rtol=1e-6, atol=0)


def test_a_corner_of_an_image_changes_parts_of_ssim_within_half_a_window() -> None:
    target = noise(3, 24, 40)
    image = target.clone()
    image[:, :4, :6] = 255 - image[:, :4, :6]
    scores = SsimReward(CPU).score_with_map([Prompt("0", "a", target=target)], image[None])
    is_changed = scores.score_map[0] < scores.score_map[0].max() * 0.999
    assert is_changed[:4, :6].all()
    # The window reaches 5 pixels to each side.
    assert not is_changed[9:].any()
    assert not is_changed[:, 11:].any()
