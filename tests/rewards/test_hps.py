from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from jaxtyping import Float32, UInt8
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import normalize, pad, resize

from rewards.terms.hps import HpsReward
from rewards.types import Prompt, RewardError

CPU = torch.device("cpu")
NAME = "hps_test_clip"
MODEL_CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)
CAPTIONS = ["a red dog", "a blue sign"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model config, and a checkpoint of the published form: half precision, `state_dict`."""
    folder = tmp_path_factory.mktemp("hps")
    config = folder / f"{NAME}.json"
    config.write_text(json.dumps(MODEL_CONFIG), encoding="utf-8")
    open_clip.add_model_config(config)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        state = open_clip.create_model(NAME).state_dict()
    half = {key: part.half() for key, part in state.items()}
    torch.save({"state_dict": half}, folder / "HPS.pt")
    return folder


@pytest.fixture(scope="module")
def hps(folder: Path) -> HpsReward:
    return make_reward(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    """The same network, loaded by torch alone."""
    with torch.random.fork_rng(devices=[]):
        model = open_clip.create_model(NAME)
    state = torch.load(folder / "HPS.pt", weights_only=True)["state_dict"]
    model.load_state_dict({key: part.float() for key, part in state.items()})
    return model.eval().requires_grad_(False)


def make_reward(folder: Path, **changes: str) -> HpsReward:
    options = {"clip_model": str(folder / f"{NAME}.json"), "checkpoint": str(folder / "HPS.pt")}
    return HpsReward(**(options | changes), device=CPU)


def prompts() -> list[Prompt]:
    return [Prompt(str(index), caption) for index, caption in enumerate(CAPTIONS)]


def smooth(height: int, width: int) -> UInt8[Tensor, "2 3 H W"]:
    """Two pictures without sharp edges, which all ways of resizing keep alike."""
    down, across = np.mgrid[0:height, 0:width] / max(height, width)
    first = np.stack([40 + 180 * down, 220 - 180 * across, 90 + 120 * down * across])
    pictures = np.stack([first, 255 - first])
    return torch.from_numpy(pictures.round().astype(np.uint8))


def fit_with_pillow(picture: UInt8[Tensor, "3 H W"]) -> Float32[Tensor, "1 3 32 32"]:
    """40 x 60 fits 32 x 32 as 21 x 32, with 5 black rows above and 6 below."""
    image = Image.fromarray(picture.permute(1, 2, 0).numpy())
    canvas = Image.new("RGB", (32, 32))
    canvas.paste(image.resize((32, 21), Image.Resampling.BICUBIC), (0, 5))
    unit = torch.from_numpy(np.array(canvas)).permute(2, 0, 1).float() / 255
    return normalize(unit, MEAN, DEVIATION)[None]


def fit_as_upstream(picture: UInt8[Tensor, "3 H W"]) -> Float32[Tensor, "3 32 32"]:
    """What tgxs002/HPSv2 does with the tensor of a picture."""
    height, width = picture.shape[1:]
    scale = 32 / max(height, width)
    size = [round(height * scale), round(width * scale)]
    unit = resize(picture.float() / 255, size, InterpolationMode.BICUBIC)
    down, across = 32 - size[0], 32 - size[1]
    sides = [across // 2, down // 2, across - across // 2, down - down // 2]
    return normalize(pad(unit, sides, fill=0), MEAN, DEVIATION)


def test_hps_is_the_cosine_of_prompt_and_whole_picture(hps: HpsReward, model: Any) -> None:
    pixels = smooth(40, 60)
    pictures = torch.cat([fit_with_pillow(picture) for picture in pixels])
    tokens = open_clip.tokenize(CAPTIONS, context_length=8)
    cosines = model.encode_text(tokens, normalize=True) @ model.encode_image(pictures, True).T
    scores = hps.score(prompts(), pixels)
    torch.testing.assert_close(scores, cosines.diagonal(), rtol=0, atol=1e-5)
    assert abs(scores[0] - scores[1]) > 1e-3


@pytest.mark.parametrize(("height", "width"), [(40, 60), (96, 50), (64, 64), (20, 31)])
def test_hps_shows_the_model_what_upstream_shows_it(folder: Path, height: int, width: int) -> None:
    reward, pixels = make_reward(folder), smooth(height, width)
    (model,) = reward.modules()
    shown = []
    model.visual.register_forward_pre_hook(lambda _, given: shown.append(given[0]))
    reward.score(prompts(), pixels)
    upstream = torch.stack([fit_as_upstream(picture) for picture in pixels])
    # Pillow rounds twice, along each axis: at most 1.5 of 255 levels, in units of the deviation.
    torch.testing.assert_close(shown[0], upstream, rtol=0, atol=1.5 / 255 / min(DEVIATION))


def test_hps_of_a_batch_equals_one_by_one_and_twice_the_same(hps: HpsReward) -> None:
    pixels = smooth(40, 60)
    scores = hps.score(prompts(), pixels)
    assert scores.dtype == torch.float32
    assert torch.equal(hps.score(prompts(), pixels), scores)
    single = [hps.score(prompts()[i : i + 1], pixels[i : i + 1]) for i in range(2)]
    torch.testing.assert_close(torch.cat(single), scores, rtol=0, atol=1e-5)


def test_hps_exposes_a_frozen_network_in_float32_and_runs_where_it_is(folder: Path) -> None:
    reward = make_reward(folder)
    (module,) = reward.modules()
    assert not module.training
    assert {weight.dtype for weight in module.parameters()} == {torch.float32}
    assert not any(weight.requires_grad for weight in module.parameters())
    module.to("meta")
    assert reward.score(prompts(), smooth(40, 60)).device.type == "meta"


def test_hps_applies_to_every_prompt_and_leaves_the_global_generator(folder: Path) -> None:
    state = torch.get_rng_state()
    reward = make_reward(folder)
    assert reward.applies_to(Prompt("0", "a"))
    reward.score(prompts(), smooth(40, 60))
    assert torch.equal(torch.get_rng_state(), state)


def test_hps_without_its_checkpoint_says_what_to_download(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "HPS_v2.1_compressed.pt"
    with pytest.raises(RewardError, match=r"^hps\.checkpoint .*no such file; download") as caught:
        make_reward(folder, checkpoint=str(path))
    assert "https://huggingface.co/xswu/HPSv2/resolve/main/HPS_v2.1_compressed.pt" in str(
        caught.value
    )
    assert str(path) in str(caught.value)


def test_hps_takes_no_path_for_a_pretrained_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("open_clip.factory.download_pretrained", lambda tag, **_: asked.append(tag))
    monkeypatch.chdir(tmp_path)
    Path("openai").write_bytes(b"no weights")
    with pytest.raises(RewardError, match=r"^hps\.checkpoint .*openai' .*cannot be loaded"):
        HpsReward(clip_model="ViT-B-32-quickgelu", checkpoint="openai", device=CPU)
    assert asked == []


def test_hps_names_its_own_keys_in_errors(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"^hps\.clip_model 'ViT-XXL' is not"):
        make_reward(folder, clip_model="ViT-XXL")
    torch.save({"state_dict": {"visual.proj": torch.zeros(3, 3)}}, tmp_path / "other.pt")
    with pytest.raises(RewardError, match=r"^hps\.checkpoint .*other\.pt' .*cannot be loaded"):
        make_reward(folder, checkpoint=str(tmp_path / "other.pt"))
