from __future__ import annotations

import pytest
import torch
from jaxtyping import UInt8
from torch import Tensor

from rewards.terms.ssim import SsimReward
from rewards.types import Prompt


def test_ssim_equals_the_reference_figures(lpips_pictures: UInt8[Tensor, "3 3 H W"]) -> None:
    reference, *distorted = lpips_pictures
    prompt = Prompt("ref", "a picture", target=reference)
    scores = SsimReward().score([prompt] * 2, torch.stack(distorted))
    torch.testing.assert_close(scores, torch.tensor([0.450091, 0.285930]), rtol=0, atol=1e-5)


def test_ssim_of_the_target_itself_is_one_for_a_single_picture() -> None:
    picture = torch.randint(0, 256, (3, 32, 48), generator=torch.Generator().manual_seed(0))
    target = picture.to(torch.uint8)
    scores = SsimReward().score([Prompt("a", "a", target=target)], target[None])
    torch.testing.assert_close(scores, torch.ones(1))


def test_ssim_of_a_batch_equals_one_by_one() -> None:
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randint(0, 256, (3, 3, 32, 32), generator=generator).to(torch.uint8)
    prompts = [Prompt(str(index), "a", target=pictures[2 - index]) for index in range(3)]
    reward = SsimReward()
    single = [reward.score([prompts[i]], pictures[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(
        reward.score(prompts, pictures), torch.cat(single), rtol=0, atol=1e-5
    )


def test_ssim_applies_to_prompts_with_a_target() -> None:
    target = torch.zeros(3, 32, 32, dtype=torch.uint8)
    assert SsimReward().applies_to(Prompt("a", "a", target=target))
    assert not SsimReward().applies_to(Prompt("a", "a", texts=("A",)))


def test_ssim_refuses_targets_of_another_size_and_missing_ones() -> None:
    pixels = torch.zeros(1, 3, 32, 64, dtype=torch.uint8)
    small = Prompt("small", "a", target=torch.zeros(3, 32, 32, dtype=torch.uint8))
    with pytest.raises(ValueError, match="target of prompt small is 32 x 32, the picture 64 x 32"):
        SsimReward().score([small], pixels)
    with pytest.raises(ValueError, match="prompt none has no target"):
        SsimReward().score([Prompt("none", "a")], pixels)
