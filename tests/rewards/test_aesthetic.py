from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rewards.terms.aesthetic import AestheticConfig, AestheticReward, load_head, to_unit_score
from rewards.types import Prompt, RewardError
from tests.rewards.tiny_clip import NAME, embed_images, noise

WIDTH = 16
LAION_MLP = "sac+logos+ava1-l14-linearMSE.pth"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reads the embedding's first entry."""
    path = tmp_path_factory.mktemp("head") / "head.safetensors"
    save_head(path, width=WIDTH)
    return path


def save_head(path: Path, *, width: int) -> None:
    weight = torch.zeros(1, width)
    weight[0, 0] = 4.0
    save_file({"weight": weight, "bias": torch.full((1,), 5.0)}, path)


def make_reward(folder: Path, head: Path) -> AestheticReward:
    config = AestheticConfig(
        kind="aesthetic",
        weight=1.0,
        clip_model=str(folder / f"{NAME}.json"),
        clip_weights=str(folder / "weights.safetensors"),
        head=str(head),
    )
    return AestheticReward(config, torch.device("cpu"))


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
    assert to_unit_score(torch.tensor([float("nan")])).isnan().all()


def test_aesthetic_equals_open_clip_on_pillow_images(clip_folder: Path, head: Path) -> None:
    # By hand: the unit embedding's first entry x, head 4 x + 5, mapped from 1..10.
    pixels = noise(3)
    expected = (4 * embed_images(clip_folder, pixels)[:, 0] + 5 - 1) / 9
    reward = make_reward(clip_folder, head)
    scores = reward.score(prompts(3), pixels)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
    assert len(set(scores.tolist())) == 3
    assert reward.applies_to(Prompt("a", "a"))
    assert not any(weight.requires_grad for m in reward.modules() for weight in m.parameters())
    assert len(reward.modules()) == 2


def test_aesthetic_refuses_a_head_for_another_embedding(clip_folder: Path, tmp_path: Path) -> None:
    save_head(tmp_path / "wide.safetensors", width=24)
    with pytest.raises(RewardError, match=r"\(1, 24\).* 16 "):
        make_reward(clip_folder, tmp_path / "wide.safetensors")


@pytest.mark.parametrize(
    "state",
    [
        {"weight": torch.zeros(1, WIDTH)},
        {"weight": torch.zeros(WIDTH), "bias": torch.zeros(1)},
    ],
)
def test_head_refuses_files_of_another_make(state: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(state, tmp_path / "head.pth")
    with pytest.raises(RewardError, match="layers of shape"):
        load_head(tmp_path / "head.pth", width=WIDTH)
