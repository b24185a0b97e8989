from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from jaxtyping import UInt8
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from rewards.terms.clip_loading import (
    PictureEmbedder,
    PromptEmbedder,
    find_architecture,
    load_clip,
    pair_cosine,
    resolve_path,
)
from rewards.types import RewardError

NAME = "clip_loading_test_clip"
TOWER_SIZE = 32
MODEL_CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": TOWER_SIZE, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model config, and random weights for it in float32 and float16."""
    folder = tmp_path_factory.mktemp("clip")
    config = folder / f"{NAME}.json"
    config.write_text(json.dumps(MODEL_CONFIG), encoding="utf-8")
    open_clip.add_model_config(config)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        state = open_clip.create_model(NAME).state_dict()
    save_file(state, folder / "weights.safetensors")
    torch.save(
        {"state_dict": {key: part.half() for key, part in state.items()}}, folder / "half.pt"
    )
    return folder


@pytest.fixture
def clip(clip_folder: Path) -> Any:
    return load_clip(NAME, str(clip_folder / "weights.safetensors"), key="term.weights")


def noise(count: int, height: int = 40, width: int = 60) -> UInt8[Tensor, "N 3 H W"]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 256, (count, 3, height, width), generator=generator).to(torch.uint8)


def write_config(folder: Path, name: str, config: object) -> str:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def test_architecture_is_found_by_name_and_by_file(clip_folder: Path) -> None:
    assert find_architecture("ViT-B-32", key="term.model") == "ViT-B-32"
    assert find_architecture(str(clip_folder / f"{NAME}.json"), key="term.model") == NAME


def test_architecture_of_a_file_is_registered(tmp_path: Path) -> None:
    path = write_config(tmp_path, "clip_loading_test_other", {**MODEL_CONFIG, "embed_dim": 24})
    assert find_architecture(path, key="term.model") == "clip_loading_test_other"
    assert open_clip.get_model_config("clip_loading_test_other")["embed_dim"] == 24


@pytest.mark.parametrize(
    ("clip_model", "problem"),
    [
        ("ViT-XXL", "'ViT-XXL' is not an architecture of open_clip"),
        ("coca_ViT-B-32", "'coca_ViT-B-32' is a CoCa"),
        ("none.json", r"none\.json: no such file"),
    ],
)
def test_architecture_that_cannot_be_used_is_refused(clip_model: str, problem: str) -> None:
    with pytest.raises(RewardError, match=rf"^term\.model .*{problem}"):
        find_architecture(clip_model, key="term.model")


def test_architecture_refuses_files_that_are_no_config_of_their_name(tmp_path: Path) -> None:
    broken = tmp_path / "clip_loading_test_broken.json"
    broken.write_text("{embed_dim", encoding="utf-8")
    with pytest.raises(RewardError, match=r"^term\.model .*broken\.json: not JSON"):
        find_architecture(str(broken), key="term.model")
    incomplete = write_config(tmp_path, "clip_loading_test_incomplete", {"embed_dim": 16})
    with pytest.raises(RewardError, match=r"^term\.model .*incomplete\.json: not a model config"):
        find_architecture(incomplete, key="term.model")
    taken = write_config(tmp_path, "RN50", MODEL_CONFIG)
    with pytest.raises(RewardError, match=r"^term\.model .*'RN50' is the name of another one"):
        find_architecture(taken, key="term.model")


@pytest.mark.parametrize("file", ["weights.safetensors", "half.pt"])
def test_clip_is_loaded_frozen_and_in_float32(clip_folder: Path, file: str) -> None:
    clip = load_clip(NAME, str(clip_folder / file), key="term.weights")
    assert isinstance(clip, nn.Module)
    assert not clip.training
    assert {weight.dtype for weight in clip.parameters()} == {torch.float32}
    assert not any(weight.requires_grad for weight in clip.parameters())


def test_clip_is_loaded_without_touching_the_global_generator(clip_folder: Path) -> None:
    state = torch.get_rng_state()
    load_clip(NAME, str(clip_folder / "weights.safetensors"), key="term.weights")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "content", [{}, ["weights"], {"visual.proj": torch.zeros(3, 3)}, nn.Linear(2, 2)]
)
def test_clip_refuses_weights_of_another_make(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(
        RewardError, match=r"^term\.weights .*other\.pt' .*cannot be loaded"
    ) as caught:
        load_clip(NAME, str(tmp_path / "other.pt"), key="term.weights")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("content", [b"", b"no weights"])
@pytest.mark.parametrize("name", ["broken.pt", "broken.safetensors"])
def test_clip_refuses_broken_files(content: bytes, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RewardError, match=rf"^term\.weights .*{name}' .*cannot be loaded"):
        load_clip(NAME, str(tmp_path / name), key="term.weights")


def test_clip_weights_that_are_neither_file_nor_tag_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"none\.pt.*one of the tags .*'laion2b_s34b_b79k'"):
        load_clip("ViT-B-32", str(tmp_path / "none.pt"), key="term.weights")


def test_clip_offline_says_what_to_download_and_where_to_put_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_network(*arguments: Any, **options: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("open_clip.factory.download_pretrained", no_network)
    with pytest.raises(RewardError, match=r"^term\.weights 'openai'.*no network") as caught:
        load_clip("ViT-B-32-quickgelu", "openai", key="term.weights")
    assert "hf download timm/vit_base_patch32_clip_224.openai)" in str(caught.value)
    assert "HF_HOME" in str(caught.value)
    assert "set term.weights to the weights" in str(caught.value)


def test_pictures_are_embedded_as_open_clip_does_with_pillow_images(clip: Any) -> None:
    transform = image_transform_v2(PreprocessCfg(size=(TOWER_SIZE, TOWER_SIZE)), is_train=False)
    pixels = noise(2)
    expected = []
    for picture in pixels:
        image = transform(Image.fromarray(picture.permute(1, 2, 0).numpy()))
        with torch.no_grad():
            expected.append(clip.encode_image(image[None], normalize=True))
    embeddings = PictureEmbedder(clip).embed(pixels)
    torch.testing.assert_close(embeddings, torch.cat(expected), rtol=0, atol=1e-5)
    torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(2))


def test_pictures_are_cropped_by_their_shortest_edge_and_kept_whole_by_their_longest(
    clip: Any,
) -> None:
    # 64 x 32: the shortest edge fits as it is, and 16 columns on either side are cut off.
    pixels = noise(1, height=32, width=64)
    other_ends = pixels.clone()
    other_ends[..., :8] = 255 - other_ends[..., :8]
    cropped = [PictureEmbedder(clip).embed(part) for part in (pixels, other_ends)]
    assert torch.equal(*cropped)
    embedder = PictureEmbedder(clip, resize_mode="longest")
    assert not torch.allclose(embedder.embed(pixels), embedder.embed(other_ends), atol=1e-3)


def test_prompts_are_embedded_as_open_clip_does(clip: Any) -> None:
    embedder = PromptEmbedder(clip, NAME, key="term.model")
    prompts = ["a red dog", "blue", "blue"]
    tokens = open_clip.tokenize(prompts, context_length=8)
    with torch.no_grad():
        expected = clip.encode_text(tokens, normalize=True)
    torch.testing.assert_close(embedder.embed(prompts), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(expected[0], expected[1], atol=1e-2)


def test_prompts_that_are_shared_go_through_the_tower_once(clip: Any) -> None:
    rows = []
    clip.token_embedding.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    PromptEmbedder(clip, NAME, key="term.model").embed(["a dog", "a cat", "a dog", "a dog"])
    assert rows == [2]


def test_prompts_that_are_cut_are_told_of_once(clip: Any, caplog: pytest.LogCaptureFixture) -> None:
    # Eight places, of which start and end take two.
    embedder = PromptEmbedder(clip, NAME, key="term.model")
    with caplog.at_level(logging.WARNING):
        embedder.embed(["a b c d e f", "a"])
        assert not caplog.records
        embedder.embed(["a", "a b c d e f g"])
        embedder.embed(["a b c d e f g h"])
    (record,) = caplog.records
    assert record.getMessage().startswith("term.model: the model reads 8 tokens;")
    assert "'a b c d e f g'" in record.getMessage()


def test_prompts_need_the_vocabulary_of_the_tokenizer(clip: Any, tmp_path: Path) -> None:
    config = {**MODEL_CONFIG, "text_cfg": {**MODEL_CONFIG["text_cfg"], "vocab_size": 32}}
    path = write_config(tmp_path, "clip_loading_test_small", config)
    architecture = find_architecture(path, key="term.model")
    with pytest.raises(RewardError, match=r"^term\.model .*vocab_size 32; .*needs 49408"):
        PromptEmbedder(clip, architecture, key="term.model")


def test_prompts_offline_say_which_tokenizer_is_missing(
    clip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*arguments: Any, **options: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("open_clip.factory.HFTokenizer", no_network)
    config = {**MODEL_CONFIG, "text_cfg": {**MODEL_CONFIG["text_cfg"], "hf_tokenizer_name": "o/n"}}
    path = write_config(tmp_path, "clip_loading_test_hub", config)
    architecture = find_architecture(path, key="term.model")
    with pytest.raises(RewardError, match=r"^term\.model .*no network.*hf download o/n\).*HF_HOME"):
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
