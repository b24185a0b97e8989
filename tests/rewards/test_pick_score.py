from __future__ import annotations

import math
import shutil
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from jaxtyping import Float32, UInt8
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

from rewards.terms.pick_score import PickScoreConfig, PickScoreReward
from rewards.types import Prompt, RewardError

CPU = torch.device("cpu")
PLACES = 8
SCALE = 50.0
"""exp(logit_scale) of the model below: not 100, so that a missing factor shows."""
LETTERS = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
VOCABULARY = {
    token: index for index, token in enumerate([*LETTERS, "<|startoftext|>", "<|endoftext|>"])
}
START, END = VOCABULARY["<|startoftext|>"], VOCABULARY["<|endoftext|>"]
CAPTIONS = ["a dog", "a cat", "a cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP of random weights that spells, with its processor, as transformers saves them."""
    folder = tmp_path_factory.mktemp("pick_score")
    save_processor(folder, VOCABULARY)
    tower = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    ends = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": END}
    text = {"vocab_size": len(VOCABULARY), "max_position_embeddings": PLACES, **tower, **ends}
    config = CLIPConfig(
        text_config=text,
        vision_config={"image_size": 32, "patch_size": 16, **tower},
        projection_dim=16,
        logit_scale_init_value=math.log(SCALE),
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        CLIPModel(config).half().save_pretrained(folder)
    return folder


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand for a hub that is out of reach; holds what it was asked for."""
    asked = []

    def fail(repository: str, **options: Any) -> str:
        asked.append(repository)
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    return asked


def save_processor(folder: Path, vocabulary: dict[str, int]) -> None:
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    tokens = CLIPTokenizer(vocab=vocabulary, merges=[])
    CLIPProcessor(images, tokens).save_pretrained(folder)


def make_reward(folder: Path, **changes: str) -> PickScoreReward:
    options = {"model": str(folder), "processor": str(folder)}
    config = PickScoreConfig(kind="pick_score", weight=1.0, **(options | changes))
    return PickScoreReward(config, CPU)


def prompts() -> list[Prompt]:
    return [Prompt(str(index), caption) for index, caption in enumerate(CAPTIONS)]


def noise(count: int) -> UInt8[Tensor, "N 3 40 60"]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 256, (count, 3, 40, 60), generator=generator).to(torch.uint8)


def spell(caption: str) -> list[int]:
    """Tokens of a caption, without padding."""
    tokens = [START]
    for word in caption.split():
        tokens += [VOCABULARY[letter] for letter in word[:-1]] + [VOCABULARY[f"{word[-1]}</w>"]]
    return [*tokens, END]


def fit(pixels: UInt8[Tensor, "3 40 60"]) -> Float32[Tensor, "1 3 32 32"]:
    """40 x 60 becomes 32 x 48, of which the middle 32 columns are kept."""
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    image = image.resize((48, 32), Image.Resampling.BICUBIC).crop((8, 0, 40, 32))
    unit = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])
    deviation = torch.tensor([0.26862954, 0.26130258, 0.27577711])
    return ((unit - mean[:, None, None]) / deviation[:, None, None])[None]


def test_pick_score_is_the_published_score_over_a_hundred(folder: Path) -> None:
    model = CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()
    pixels = noise(3)
    expected = []
    with torch.no_grad():
        for caption, each in zip(CAPTIONS, pixels, strict=True):
            text = model.get_text_features(torch.tensor([spell(caption)])).pooler_output[0]
            image = model.get_image_features(fit(each)).pooler_output[0]
            published = SCALE * (text @ image) / (text.norm() * image.norm())
            expected.append(published / 100)
    scores = make_reward(folder).score(prompts(), pixels)
    # logit_scale is kept in half precision.
    torch.testing.assert_close(scores, torch.stack(expected), rtol=1e-3, atol=1e-5)
    assert scores.abs().max() <= SCALE / 100 * 1.001
    assert len(set(scores.tolist())) == 3


def test_pick_score_exposes_a_frozen_network_in_float32_and_runs_where_it_is(
    folder: Path,
) -> None:
    reward = make_reward(folder)
    (module,) = reward.modules()
    assert not module.training
    assert {weight.dtype for weight in module.parameters()} == {torch.float32}
    assert reward.applies_to(Prompt("0", "a"))
    assert not any(weight.requires_grad for weight in module.parameters())
    module.to("meta")
    assert reward.score(prompts(), noise(3)).device.type == "meta"


def test_pick_score_downloads_no_more_than_it_needs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def download(repository: str, *, allow_patterns: list[str]) -> str:
        asked[repository] = allow_patterns
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    make_reward(folder, model="owner/model", processor="owner/clip")
    assert asked == {
        "owner/model": ["*.json", "*.safetensors"],
        "owner/clip": ["*.json", "*.txt"],
    }


@pytest.mark.parametrize("option", ["model", "processor"])
def test_pick_score_offline_says_what_to_download_and_where_to_put_it(
    option: str, folder: Path, no_hub: list[str]
) -> None:
    with pytest.raises(RewardError, match=rf"^pick_score\.{option} .*no network") as caught:
        make_reward(folder, **{option: "owner/weights"})
    assert "--local-dir FOLDER" in str(caught.value)
    assert no_hub == ["owner/weights"]


def test_pick_score_refuses_a_model_that_lacks_weights(folder: Path, tmp_path: Path) -> None:
    # transformers would draw the missing ones.
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    state = load_file(copy / "model.safetensors")
    del state["visual_projection.weight"]
    save_file(state, copy / "model.safetensors", metadata={"format": "pt"})
    generator = torch.get_rng_state()
    with pytest.raises(RewardError, match=r"^pick_score\.model .*lacks visual_projection\.weight"):
        make_reward(folder, model=str(copy))
    assert torch.equal(torch.get_rng_state(), generator)
