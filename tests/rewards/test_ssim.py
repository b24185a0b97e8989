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


def test_ssim_equals_the_reference_figures(lpips_pictures: UInt8[Tensor, "3 3 H W"]) -> None:
    reference, *distorted = lpips_pictures
    prompt = Prompt("ref", "a picture", target=reference)
    scores = SsimReward(CPU).score([prompt] * 2, torch.stack(distorted))
    torch.testing.assert_close(scores, torch.tensor([0.450091, 0.285930]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("spread", [1, 8, 255])
def test_ssim_equals_that_of_torchmetrics_in_float64(spread: int) -> None:
    target = noise(1, 3, 24, 40)
    picture = (target.int() + noise(1, 3, 24, 40).flip(3).int() % spread).clamp(max=255).byte()
    expected = structural_similarity_index_measure(
        picture.double() / 255, target.double() / 255, data_range=1.0
    )
    scores = SsimReward(CPU).score([Prompt("0", "a", target=target[0])], picture)
    assert scores.item() == pytest.approx(float(expected), abs=1e-6)


def test_ssim_of_a_copy_is_one_and_no_other_picture_reaches_it() -> None:
    prompts = [Prompt(str(level), "a", target=flat(level)) for level in range(256)]
    reward = SsimReward(CPU)
    copies = torch.stack([flat(level) for level in range(256)])
    assert torch.equal(reward.score(prompts, copies), torch.ones(256))
    assert reward.score(prompts[:255], copies[1:]).max() < 1
    assert reward.score(prompts[1:], copies[:255]).max() < 1
    textured = noise(3, 16, 16)
    assert reward.score([Prompt("0", "a", target=textured)], textured[None]) == 1


def test_ssim_of_a_batch_equals_one_by_one_each_against_its_own_target() -> None:
    pictures = noise(3, 3, 32, 48)
    prompts = [Prompt(str(index), "a", target=pictures[2 - index]) for index in range(3)]
    reward = SsimReward(CPU)
    scores = reward.score(prompts, pictures)
    assert scores[1] == 1
    assert scores[0] < 0.5
    single = [reward.score([prompts[i]], pictures[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(scores, torch.cat(single), rtol=0, atol=1e-5)


def test_ssim_takes_pictures_from_six_pixels_a_side() -> None:
    small = noise(3, 5, 6)
    reward = SsimReward(CPU)
    with pytest.raises(ValueError, match=r"6 x 5 pixels are too small: .* at least 6"):
        reward.score([Prompt("0", "a", target=small)], small[None])
    six = noise(3, 6, 6)
    assert reward.score([Prompt("0", "a", target=six)], six[None]) == 1


def test_ssim_compares_on_the_device_that_it_is_given() -> None:
    # The scores of meta tensors are without values.
    scores = SsimReward(torch.device("meta")).score(
        [Prompt("0", "a", target=flat(1))], flat(1)[None]
    )
    assert scores.device.type == "meta"
