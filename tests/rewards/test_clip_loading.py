from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from torch import nn

from rewards.terms.clip_loading import (
    ImageEmbedder,
    PromptEmbedder,
    find_architecture,
    load_clip,
    pair_cosine,
    resolve_path,
)
from rewards.types import RewardError
from tests.rewards.tiny_clip import CONFIG, NAME, noise


@pytest.fixture
def clip(clip_folder: Path) -> Any:
    return load_clip(NAME, str(clip_folder / "weights.safetensors"), key="term.weights")


def write_config(folder: Path, name: str, config: object) -> str:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def test_architecture_of_a_file_is_registered(tmp_path: Path) -> None:
    path = write_config(tmp_path, "clip_loading_test_other", {**CONFIG, "embed_dim": 24})
    assert find_architecture(path, key="term.model") == "clip_loading_test_other"
    assert find_architecture("ViT-B-32", key="term.model") == "ViT-B-32"
    assert open_clip.get_model_config("clip_loading_test_other")["embed_dim"] == 24


@pytest.mark.parametrize(
    ("clip_model", "problem"),
    [
        ("ViT-XXL", "'ViT-XXL' is not an architecture of open_clip"),
        ("none.json", r"none\.json cannot be loaded"),
    ],
)
def test_architecture_that_cannot_be_used_is_refused(clip_model: str, problem: str) -> None:
    with pytest.raises(RewardError, match=rf"^term\.model .*{problem}"):
        find_architecture(clip_model, key="term.model")


@pytest.mark.parametrize(
    ("content", "problem"),
    [("{embed_dim", "cannot be loaded"), ('{"embed_dim": 16}', "is not an architecture")],
)
def test_architecture_refuses_files_that_are_no_config(
    tmp_path: Path, content: str, problem: str
) -> None:
    path = tmp_path / "clip_loading_test_broken.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(RewardError, match=rf"^term\.model .*broken\.json.*{problem}"):
        find_architecture(str(path), key="term.model")


@pytest.mark.parametrize("file", ["weights.safetensors", "half.pt"])
def test_clip_is_loaded_frozen_in_float32_and_without_the_global_generator(
    clip_folder: Path, file: str
) -> None:
    state = torch.get_rng_state()
    clip = load_clip(NAME, str(clip_folder / file), key="term.weights")
    assert torch.equal(torch.get_rng_state(), state)
    assert not clip.training
    assert {weight.dtype for weight in clip.parameters()} == {torch.float32}
    assert not any(weight.requires_grad for weight in clip.parameters())


@pytest.mark.parametrize(
    "content",
    [{"visual.proj": torch.zeros(3, 3)}, nn.Linear(2, 2)],
    ids=["another model", "not tensors alone"],
)
def test_clip_refuses_weights_of_another_make(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(
        RewardError, match=r"^term\.weights .*other\.pt' .*cannot be loaded"
    ) as caught:
        load_clip(NAME, str(tmp_path / "other.pt"), key="term.weights")
    assert len(str(caught.value)) < 1000


def test_clip_offline_says_what_to_download_and_where_to_put_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_network(*arguments: Any, **options: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    with pytest.raises(RewardError, match=r"^term\.weights 'openai'.*no network") as caught:
        load_clip("ViT-B-32-quickgelu", "openai", key="term.weights")
    assert "HF_HOME" in str(caught.value)


def test_images_are_cropped_by_their_shortest_edge_and_kept_whole_by_their_longest(
    clip: Any,
) -> None:
    # 64 x 32: the shortest edge fits as it is, and 16 columns on either side are cut off.
    pixels = noise(1, height=32, width=64)
    other_ends = pixels.clone()
    other_ends[..., :8] = 255 - other_ends[..., :8]
    cropped = [ImageEmbedder(clip).embed(part) for part in (pixels, other_ends)]
    assert torch.equal(*cropped)
    embedder = ImageEmbedder(clip, resize_mode="longest")
    assert not torch.allclose(embedder.embed(pixels), embedder.embed(other_ends), atol=1e-3)


def test_prompts_offline_say_which_tokenizer_is_missing(
    clip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*arguments: Any, **options: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("open_clip.factory.HFTokenizer", no_network)
    config = {**CONFIG, "text_cfg": {**CONFIG["text_cfg"], "hf_tokenizer_name": "o/n"}}
    path = write_config(tmp_path, "clip_loading_test_hub", config)
    architecture = find_architecture(path, key="term.model")
    with pytest.raises(RewardError, match=r"^term\.model .*HF_HOME"):
        PromptEmbedder(clip, architecture, key="term.model")


def test_pair_cosine_is_the_product_of_unit_vectors_and_stays_in_range() -> None:
    first = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0001, 0.0]])
    second = torch.tensor([[0.6, 0.8], [-1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    assert torch.equal(pair_cosine(first, second), torch.tensor([0.6, -1.0, 0.0, 1.0]))


def test_paths_into_packages_are_resolved() -> None:
    path = resolve_path("pkg://rewards/types.py")
    assert path.is_file()
    assert path.parent.name == "rewards"
    assert resolve_path("heads/head.pth") == Path("heads/head.pth")
    with pytest.raises(RewardError, match="no package 'not_a_package'"):
        resolve_path("pkg://not_a_package/head.pth")
