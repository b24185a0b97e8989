from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from jaxtyping import UInt8
from torch import Tensor

from rewards.terms.lpips import LpipsConfig, LpipsReward, Network
from rewards.types import Prompt, RewardError, Scores


def make(network: Network, *, pretrained: bool = False) -> LpipsReward:
    config = LpipsConfig(kind="lpips", weight=1.0, network=network, pretrained=pretrained)
    return LpipsReward(config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("network", "distances"), [("alex", (0.721881, 0.137566)), ("squeeze", (0.711048, 0.147902))]
)
def test_lpips_equals_the_reference_figures(
    network: Network,
    distances: tuple[float, float],
    lpips_images: UInt8[Tensor, "3 3 H W"],
    assets_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(assets_dir / "torch_home"))
    reward = make(network, pretrained=True)
    reference, *distorted = lpips_images
    prompts = [Prompt("ref", "an image", target=reference)] * 2
    scores = reward.score_with_map(prompts, torch.stack(distorted))
    # p1 is the closer one, so it scores higher.
    torch.testing.assert_close(scores.values, 1 - torch.tensor(distances), rtol=0, atol=1e-5)
    assert_parts_add_up(scores)


def assert_parts_add_up(scores: Scores) -> None:
    torch.testing.assert_close(scores.score_map.sum(dim=(1, 2)), scores.values, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def untrained() -> LpipsReward:
    return make("squeeze")


def noise(seed: int) -> UInt8[Tensor, "3 64 64"]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, 64, 64), generator=generator).to(torch.uint8)


def test_untrained_lpips_is_one_for_the_target_and_falls_with_distance(
    untrained: LpipsReward,
) -> None:
    target = noise(0)
    prompt = Prompt("a", "a", target=target)
    slightly_other = target.clone()
    slightly_other[:, :16] = noise(1)[:, :16]
    scores = untrained.score([prompt] * 3, torch.stack([target, slightly_other, noise(1)]))
    assert scores[0] == 1.0
    assert scores[0] > scores[1] > scores[2] > -1.0
    (module,) = untrained.modules()
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("network", ["alex", "vgg", "squeeze"])
@pytest.mark.parametrize("targets", [(0, 0, 0), (0, 1, 2)], ids=["shared", "own"])
def test_lpips_equals_that_of_the_package_and_its_parts_add_up(
    network: Network, targets: tuple[int, ...]
) -> None:
    sources = [noise(seed)[:, :35, :53] for seed in range(3)]
    prompts = [Prompt(str(i), "a", target=sources[target]) for i, target in enumerate(targets)]
    images = torch.stack([noise(3)[:, :35, :53], sources[1], sources[2]])
    reward = make(network)
    (module,) = reward.modules()
    compared = torch.stack([prompt.target for prompt in prompts])
    distances = module(images / 255, compared / 255, normalize=True).flatten()
    scores = reward.score_with_map(prompts, images)
    assert torch.equal(scores.values, reward.score(prompts, images))
    torch.testing.assert_close(scores.values, 1 - distances / module.L, rtol=0, atol=1e-6)
    assert_parts_add_up(scores)
    # Two copies, if each has its own target: an even share of the 1 in every place.
    for row in range(3):
        is_copy = torch.equal(images[row], prompts[row].target)
        assert (scores.values[row] == 1) == is_copy
        assert (scores.score_map[row].min() == scores.score_map[row].max()) == is_copy


def test_a_corner_of_an_image_lowers_the_parts_of_lpips_there(untrained: LpipsReward) -> None:
    target = noise(0)
    image = target.clone()
    image[:, 48:, :16] = noise(1)[:, 48:, :16]
    scores = untrained.score_with_map([Prompt("a", "a", target=target)], image[None])
    lost = 1 / scores.score_map[0].numel() - scores.score_map[0]
    # Fields of the deeper layers reach beyond the corner.
    half = len(lost) // 2
    assert lost[half:, :half].sum() > 0.9 * lost.sum()


def test_untrained_lpips_is_the_mean_over_layers(untrained: LpipsReward) -> None:
    # Black against white: the sum over the layers is above 2, their mean is not.
    white = torch.full((3, 64, 64), 255, dtype=torch.uint8)
    scores = untrained.score([Prompt("a", "a", target=white)], torch.zeros_like(white)[None])
    (module,) = untrained.modules()
    assert (1 - scores.item()) * module.L > 2
    assert abs(scores.item()) < 1


def test_untrained_lpips_is_the_same_in_every_process_and_leaves_the_global_generator(
    untrained: LpipsReward,
) -> None:
    torch.rand(3)  # another state than the one the fixture was built in
    state = torch.get_rng_state()
    again = make("squeeze")
    assert torch.equal(torch.get_rng_state(), state)
    prompts, images = [Prompt("a", "a", target=noise(0))], noise(1)[None]
    assert torch.equal(again.score(prompts, images), untrained.score(prompts, images))


def test_lpips_offline_says_which_file_goes_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*arguments: Any, **options: Any) -> None:
        raise URLError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    with pytest.raises(RewardError, match="no network") as caught:
        make("squeeze", pretrained=True)
    assert str(tmp_path / "hub" / "checkpoints") in str(caught.value)
    assert "lpips.pretrained=false" in str(caught.value)
