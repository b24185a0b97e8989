from __future__ import annotations

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


def test_ssim_of_a_batch_equals_one_by_one_each_against_its_own_target() -> None:
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randint(0, 256, (3, 3, 32, 48), generator=generator).to(torch.uint8)
    prompts = [Prompt(str(index), "a", target=pictures[2 - index]) for index in range(3)]
    reward = SsimReward()
    scores = reward.score(prompts, pictures)
    torch.testing.assert_close(scores[1], torch.tensor(1.0))
    assert scores[0] < 0.5
    single = [reward.score([prompts[i]], pictures[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(scores, torch.cat(single), rtol=0, atol=1e-5)
