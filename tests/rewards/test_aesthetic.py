from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from jaxtyping import UInt8
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from rewards.terms.aesthetic import AestheticReward, load_head, to_unit_score
from rewards.types import Prompt, RewardError

CPU = torch.device("cpu")
WIDTH = 16
LAION_MLP = "sac+logos+ava1-l14-linearMSE.pth"
MODEL_CONFIG = {
    "embed_dim": WIDTH,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 32, "width": 64, "heads": 1, "layers": 1},
}


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model config, random weights for it, and a head that reads the embedding's first entry."""
    folder = tmp_path_factory.mktemp("clip")
    config = folder / "aesthetic_test_clip.json"
    config.write_text(json.dumps(MODEL_CONFIG), encoding="utf-8")
    open_clip.add_model_config(config)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = open_clip.create_model(config.stem)
    save_file(model.state_dict(), folder / "weights.safetensors")
    save_head(folder / "head.safetensors", width=WIDTH)
    return folder


def save_head(path: Path, *, width: int) -> None:
    weight = torch.zeros(1, width)
    weight[0, 0] = 4.0
    save_file({"weight": weight, "bias": torch.full((1,), 5.0)}, path)


def make_reward(folder: Path, **changes: str) -> AestheticReward:
    options = {
        "clip_model": str(folder / "aesthetic_test_clip.json"),
        "clip_weights": str(folder / "weights.safetensors"),
        "head": str(folder / "head.safetensors"),
    }
    return AestheticReward(**(options | changes), device=CPU)


def noise(count: int, height: int = 40, width: int = 60) -> UInt8[Tensor, "N 3 H W"]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 256, (count, 3, height, width), generator=generator).to(torch.uint8)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(index), "a") for index in range(count)]


def test_laion_mlp_equals_the_reference_figures(assets_dir: Path) -> None:
    head = load_head(assets_dir / "aesthetic" / LAION_MLP, width=768)
    ratings = head(embeddings(assets_dir, "vit_l_14")).flatten()
    expected = [1.655, 2.359, 3.070, 3.672, 4.238, 4.701, 5.073, 5.365, 5.577, 5.747]
    torch.testing.assert_close(ratings, torch.tensor(expected), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("model", "width"), [("vit_l_14", 768), ("vit_b_32", 512)])
def test_laion_linear_heads_rise_with_the_rating(assets_dir: Path, model: str, width: int) -> None:
    head = load_head(assets_dir / "aesthetic" / f"sa_0_4_{model}_linear.pth", width=width)
    ratings = head(embeddings(assets_dir, model)).flatten()
    assert (ratings.diff() > 0).all()


def embeddings(assets_dir: Path, model: str) -> Tensor:
    folder = assets_dir / "aesthetic" / f"{model}_embeddings"
    return torch.cat([torch.from_numpy(np.load(folder / f"rating{i}.npy")) for i in range(10)])


def test_unit_score_maps_one_to_ten_and_clamps() -> None:
    scores = to_unit_score(torch.tensor([1.0, 5.5, 10.0, -3.0, 12.0]))
    torch.testing.assert_close(scores, torch.tensor([0.0, 0.5, 1.0, 0.0, 1.0]))


def test_unit_score_does_not_hide_nan() -> None:
    assert to_unit_score(torch.tensor([float("nan")])).isnan().all()


def test_aesthetic_equals_open_clip_on_pillow_images(clip_folder: Path) -> None:
    # By hand: open_clip's own model and transform, the unit embedding's first entry, head
    # 4 x + 5, mapped from 1..10.
    pixels = noise(3)
    weights = str(clip_folder / "weights.safetensors")
    model = open_clip.create_model("aesthetic_test_clip", weights)
    transform = image_transform_v2(PreprocessCfg(**model.visual.preprocess_cfg), is_train=False)
    expected = []
    for picture in pixels:
        image = transform(Image.fromarray(picture.permute(1, 2, 0).numpy()))
        with torch.no_grad():
            embedding = model.encode_image(image[None], normalize=True)
        expected.append((4 * embedding[0, 0] + 5 - 1) / 9)
    scores = make_reward(clip_folder).score(prompts(3), pixels)
    torch.testing.assert_close(scores, torch.stack(expected), rtol=0, atol=1e-5)
    assert len(set(scores.tolist())) == 3


def test_aesthetic_of_a_batch_equals_one_by_one(clip_folder: Path) -> None:
    reward, pixels = make_reward(clip_folder), noise(3)
    single = torch.cat([reward.score(prompts(1), pixels[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(reward.score(prompts(3), pixels), single, rtol=0, atol=1e-5)


def test_aesthetic_applies_to_every_prompt_and_exposes_tower_and_head(clip_folder: Path) -> None:
    reward = make_reward(clip_folder)
    assert reward.applies_to(Prompt("a", "a"))
    tower, head = reward.modules()
    assert not tower.training
    assert not any(weight.requires_grad for m in (tower, head) for weight in m.parameters())


def test_aesthetic_refuses_a_head_for_another_embedding(clip_folder: Path, tmp_path: Path) -> None:
    save_head(tmp_path / "wide.safetensors", width=24)
    with pytest.raises(RewardError, match=r"\(1, 24\).*the 16 numbers of the embedding"):
        make_reward(clip_folder, head=str(tmp_path / "wide.safetensors"))


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"weight": torch.zeros(1, WIDTH)},
        {"fc.weight": torch.zeros(1, WIDTH), "fc.bias": torch.zeros(1)},
        {"weight": torch.zeros(WIDTH), "bias": torch.zeros(1)},
    ],
)
def test_head_refuses_files_of_another_make(state: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(state, tmp_path / "head.pth")
    with pytest.raises(RewardError, match="it must hold weight"):
        load_head(tmp_path / "head.pth", width=WIDTH)


def test_head_never_runs_code_from_a_file(tmp_path: Path) -> None:
    torch.save(nn.Linear(WIDTH, 1), tmp_path / "head.pth")
    with pytest.raises(RewardError, match="cannot be read as tensors"):
        load_head(tmp_path / "head.pth", width=WIDTH)


@pytest.mark.parametrize("name", ["none.pth", "none.safetensors"])
def test_head_says_which_file_is_missing(name: str, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=name):
        load_head(tmp_path / name, width=WIDTH)


def test_aesthetic_refuses_models_and_weights_it_cannot_find(
    clip_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(RewardError, match=r"^aesthetic\.clip_model 'ViT-XXL' is not"):
        make_reward(clip_folder, clip_model="ViT-XXL")
    with pytest.raises(RewardError, match=r"none\.json: no such file"):
        make_reward(clip_folder, clip_model=str(tmp_path / "none.json"))
    with pytest.raises(RewardError, match=r"^aesthetic\.clip_weights .*none\.pt.*cannot be loaded"):
        make_reward(clip_folder, clip_weights=str(tmp_path / "none.pt"))


def test_aesthetic_refuses_a_config_under_the_name_of_another(
    clip_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "RN50.json").write_text(json.dumps(MODEL_CONFIG), encoding="utf-8")
    with pytest.raises(RewardError, match="'RN50' is the name of another one"):
        make_reward(clip_folder, clip_model=str(tmp_path / "RN50.json"))


def test_aesthetic_refuses_weights_of_another_model(clip_folder: Path, tmp_path: Path) -> None:
    save_file({"visual.proj": torch.zeros(3, 3)}, tmp_path / "other.safetensors")
    with pytest.raises(RewardError, match=r"other\.safetensors.*cannot be loaded"):
        make_reward(clip_folder, clip_weights=str(tmp_path / "other.safetensors"))


def test_aesthetic_offline_says_what_to_use_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*arguments: Any, **options: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("open_clip.factory.download_pretrained", no_network)
    save_head(tmp_path / "head.safetensors", width=512)
    with pytest.raises(RewardError, match=r"'openai'.*no network.*HF_HOME"):
        AestheticReward(
            clip_model="ViT-B-32-quickgelu",
            clip_weights="openai",
            head=str(tmp_path / "head.safetensors"),
            device=CPU,
        )
