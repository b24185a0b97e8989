from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rewards.terms.clip import ClipImageConfig, ClipImageReward, ClipScoreConfig, ClipScoreReward
from rewards.types import Prompt, RewardError
from tests.rewards.tiny_clip import NAME, embed_captions, embed_images, noise

CPU = torch.device("cpu")
CAPTIONS = ["a red dog", "a blue sign", "a blue sign"]
KINDS = {"clip_score": ClipScoreConfig, "clip_image": ClipImageConfig}


def make(name: str, folder: Path, **changes: str) -> ClipScoreReward | ClipImageReward:
    options = {
        "clip_model": str(folder / f"{NAME}.json"),
        "clip_weights": str(folder / "weights.safetensors"),
    }
    return KINDS[name](kind=name, weight=1.0, **(options | changes)).build(CPU)


def test_clip_score_is_the_cosine_of_prompt_and_image(clip_folder: Path) -> None:
    reward, pixels = make("clip_score", clip_folder), noise(3)
    cosines = embed_captions(clip_folder, CAPTIONS) @ embed_images(clip_folder, pixels).T
    prompts = [Prompt(str(index), caption) for index, caption in enumerate(CAPTIONS)]
    scores = reward.score(prompts, pixels)
    torch.testing.assert_close(scores, cosines.diagonal(), rtol=0, atol=1e-5)
    assert len(set(scores.tolist())) == 3
    assert reward.applies_to(Prompt("0", "a"))


def test_clip_image_is_the_cosine_of_each_image_and_its_own_target(clip_folder: Path) -> None:
    reward = make("clip_image", clip_folder)
    pixels, targets = noise(3), noise(2, seed=8)
    pixels[2] = targets[1]
    first, second = (Prompt(str(i), "a", target=target) for i, target in enumerate(targets))
    scores = reward.score([second, first, second], pixels)
    wanted = embed_images(clip_folder, targets)[[1, 0, 1]]
    expected = (wanted * embed_images(clip_folder, pixels)).sum(dim=-1)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores[2], torch.tensor(1.0), rtol=0, atol=1e-6)
    assert reward.applies_to(first)
    assert not reward.applies_to(Prompt("0", "a"))


def test_clip_image_keeps_no_tower_for_captions(clip_folder: Path) -> None:
    both, one = (
        sum(part.numel() for part in make(name, clip_folder).modules()[0].parameters())
        for name in KINDS
    )
    assert one < both - 49408 * 32  # the tokens' embedding


@pytest.mark.parametrize("name", KINDS)
def test_clip_terms_run_where_their_networks_are(name: str, clip_folder: Path) -> None:
    reward = make(name, clip_folder)
    (module,) = reward.modules()
    module.to("meta")
    prompts = [Prompt("0", "a red dog", target=noise(1)[0])] * 2
    assert reward.score(prompts, noise(2)).device.type == "meta"


@pytest.mark.parametrize("name", KINDS)
def test_clip_terms_name_their_own_keys_in_errors(name: str, clip_folder: Path) -> None:
    with pytest.raises(RewardError, match=rf"^{name}\.clip_model 'ViT-XXL' is not"):
        make(name, clip_folder, clip_model="ViT-XXL")
    with pytest.raises(RewardError, match=rf"^{name}\.clip_weights .*none\.pt"):
        make(name, clip_folder, clip_weights=str(clip_folder / "none.pt"))


@pytest.mark.parametrize("name", KINDS)
def test_clip_terms_miss_a_file_before_it_is_loaded(name: str, clip_folder: Path) -> None:
    options = {"weight": 1.0, "clip_model": str(clip_folder / f"{NAME}.json")}
    weights = str(clip_folder / "weights.safetensors")
    KINDS[name](kind=name, clip_weights=weights, **options).check()
    with pytest.raises(RewardError, match=rf"^{name}\.clip_weights .*none\.pt: no such file"):
        KINDS[name](kind=name, clip_weights="none.pt", **options).check()
