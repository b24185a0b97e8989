from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import Float32, UInt8
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import normalize, pad, resize

from rewards.terms.hps import HpsReward
from rewards.types import Prompt, RewardError
from tests.rewards.tiny_clip import NAME, embed_captions, load

CPU = torch.device("cpu")
MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)
CAPTIONS = ["a red dog", "a blue sign"]


def make_reward(folder: Path, **changes: str) -> HpsReward:
    options = {"clip_model": str(folder / f"{NAME}.json"), "checkpoint": str(folder / "half.pt")}
    return HpsReward(**(options | changes), device=CPU)


def prompts() -> list[Prompt]:
    return [Prompt(str(index), caption) for index, caption in enumerate(CAPTIONS)]


def smooth(height: int, width: int) -> UInt8[Tensor, "2 3 H W"]:
    """Two images without sharp edges, which all ways of resizing keep alike."""
    down, across = np.mgrid[0:height, 0:width] / max(height, width)
    first = np.stack([40 + 180 * down, 220 - 180 * across, 90 + 120 * down * across])
    images = np.stack([first, 255 - first])
    return torch.from_numpy(images.round().astype(np.uint8))


def fit_with_pillow(pixels: UInt8[Tensor, "3 H W"]) -> Float32[Tensor, "1 3 32 32"]:
    """40 x 60 fits 32 x 32 as 21 x 32, with 5 black rows above and 6 below."""
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    canvas = Image.new("RGB", (32, 32))
    canvas.paste(image.resize((32, 21), Image.Resampling.BICUBIC), (0, 5))
    unit = torch.from_numpy(np.array(canvas)).permute(2, 0, 1).float() / 255
    return normalize(unit, MEAN, DEVIATION)[None]


def fit_as_upstream(image: UInt8[Tensor, "3 H W"]) -> Float32[Tensor, "3 32 32"]:
    """What tgxs002/HPSv2 does with the tensor of an image."""
    height, width = image.shape[1:]
    scale = 32 / max(height, width)
    size = [round(height * scale), round(width * scale)]
    unit = resize(image.float() / 255, size, InterpolationMode.BICUBIC)
    down, across = 32 - size[0], 32 - size[1]
    sides = [across // 2, down // 2, across - across // 2, down - down // 2]
    return normalize(pad(unit, sides, fill=0), MEAN, DEVIATION)


@torch.no_grad()
def test_hps_is_the_cosine_of_prompt_and_whole_image(clip_folder: Path) -> None:
    pixels = smooth(40, 60)
    fitted = torch.cat([fit_with_pillow(image) for image in pixels])
    images = load(clip_folder).encode_image(fitted, normalize=True)
    cosines = embed_captions(clip_folder, CAPTIONS) @ images.T
    scores = make_reward(clip_folder).score(prompts(), pixels)
    torch.testing.assert_close(scores, cosines.diagonal(), rtol=0, atol=1e-5)
    assert abs(scores[0] - scores[1]) > 1e-3


@pytest.mark.parametrize(("height", "width"), [(40, 60), (96, 50), (20, 31)])
def test_hps_shows_the_model_what_upstream_shows_it(
    clip_folder: Path, height: int, width: int
) -> None:
    reward, pixels = make_reward(clip_folder), smooth(height, width)
    (model,) = reward.modules()
    shown = []
    model.visual.register_forward_pre_hook(lambda _, given: shown.append(given[0]))
    reward.score(prompts(), pixels)
    upstream = torch.stack([fit_as_upstream(image) for image in pixels])
    # Pillow rounds twice, along each axis: at most 1.5 of 255 levels, in units of the deviation.
    torch.testing.assert_close(shown[0], upstream, rtol=0, atol=1.5 / 255 / min(DEVIATION))


def test_hps_without_its_checkpoint_says_what_to_download(
    clip_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "HPS_v2.1_compressed.pt"
    with pytest.raises(RewardError, match=r"^hps\.checkpoint .*no such file") as caught:
        make_reward(clip_folder, checkpoint=str(path))
    assert "https://huggingface.co/xswu/HPSv2/resolve/main/HPS_v2.1_compressed.pt" in str(
        caught.value
    )


def test_hps_takes_no_path_for_a_pretrained_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("open_clip.factory.download_pretrained", lambda tag, **_: asked.append(tag))
    monkeypatch.chdir(tmp_path)
    Path("openai").write_bytes(b"no weights")
    with pytest.raises(RewardError, match=r"^hps\.checkpoint .*openai' "):
        HpsReward(clip_model="ViT-B-32-quickgelu", checkpoint="openai", device=CPU)
    assert asked == []
