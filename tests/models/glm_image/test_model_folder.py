"""Damaged folders of a model: each refused by one error that names the file, none executed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm_grpo.errors import ModelError
from glm_grpo.models.find import find_model
from glm_grpo.models.glm_image.loading import check_model, load_pipeline

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5339212\n"
LANGUAGE = "vision_language_encoder/model.safetensors"
TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
TEMPLATE = "processor/chat_template.jinja"

Damage = Callable[[Path], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded model's, whose files are links: damage replaces them."""
    copy = tmp_path / "model"
    shutil.copytree(find_model("tiny").path, copy, copy_function=os.link)
    return copy


def write(content: str | bytes) -> Damage:
    """The file becomes this."""

    def damage(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return damage


def edit(*keys: str | int, to: object) -> Damage:
    """A value in a JSON file becomes this one."""

    def damage(path: Path) -> None:
        values = json.loads(path.read_text())
        inner: Any = values
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to
        write(json.dumps(values))(path)

    return damage


def without(*names: str) -> Damage:
    """Parameters are not in the file of weights any more."""
    return reweighed(lambda tensors: [tensors.pop(name) for name in names])


def reweighed(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """A file of weights is changed."""

    def damage(path: Path) -> None:
        tensors = load_file(path)
        change(tensors)
        path.unlink()
        save_file(tensors, path, {"format": "pt"})

    return damage


def cut(kept: float) -> Damage:
    """The file ends early."""

    def damage(path: Path) -> None:
        content = path.read_bytes()
        write(content[: int(len(content) * kept)])(path)

    return damage


def renamed(name: str) -> Damage:
    """The file has another name."""
    return lambda path: path.rename(path.with_name(name))


def indexed(*, name: str) -> Damage:
    """Weights come in shards that an index names; the only shard has this name."""

    def damage(path: Path) -> None:
        table = dict.fromkeys(load_file(path), name)
        path.unlink()
        index = path.with_name(f"{path.name}.index.json")
        index.write_text(json.dumps({"metadata": {}, "weight_map": table}))

    return damage


DAMAGES: dict[str, tuple[str, Damage, str]] = {
    # Weights: of transformers, and of diffusers.
    "no head": (LANGUAGE, without("lm_head.weight"), "vision_language_encoder: .*lm_head.weight"),
    "no part of the VAE": (VAE, without("decoder.conv_in.bias"), "vae: .*decoder.conv_in.bias"),
    "a head of another shape": (
        LANGUAGE,
        reweighed(lambda all_: all_.update({"lm_head.weight": torch.zeros(528, 64)})),
        "vision_language_encoder: .*mismatched_sizes",
    ),
    "truncated weights": (TRANSFORMER, cut(0.5), f"{TRANSFORMER}: "),
    "empty weights": (LANGUAGE, write(b""), f"{LANGUAGE}: "),
    "a pointer of git-lfs": (VAE, write(POINTER), f"{VAE}: .*git lfs pull"),
    "a pickle under another name": (
        TRANSFORMER,
        write(pickle.dumps({"weight": [1.0]})),
        f"{TRANSFORMER}: ",
    ),
    "a pickle alone": (LANGUAGE, renamed("pytorch_model.bin"), "model.safetensors"),
    "a shard that is not there": (LANGUAGE, indexed(name="gone.safetensors"), "gone.safetensors"),
    # Configs.
    "another class in the index": (
        "model_index.json",
        edit("transformer", to=["diffusers", "FluxTransformer2DModel"]),
        "model_index.json: transformer .*FluxTransformer2DModel.*GlmImageTransf",
    ),
    "another model type": (
        "vision_language_encoder/config.json",
        edit("model_type", to="glm4v"),
        "config.json: model_type .*'glm4v'.*'glm_image'",
    ),
    "no config": ("transformer/config.json", Path.unlink, "transformer/config.json: "),
    "a torn config": ("vae/config.json", cut(0.5), "vae/config.json: "),
    "a config no model can be built from": (
        "vae/config.json",
        edit("block_out_channels", to=[8, 8]),
        "vae/config.json: ",
    ),
    "tokens of an image beyond the vocabulary": (
        "vision_language_encoder/config.json",
        edit("image_start_token_id", to=10**6),
        "image tokens .1000000",
    ),
    # Tokenizers.
    "a torn tokenizer": ("processor/tokenizer.json", cut(0.5), "processor: "),
    "a token beyond the embedding": (
        "processor/tokenizer.json",
        edit("model", "vocab", "zebra", to=5000),
        "processor: .*'zebra' the id 5000.*788 entries",
    ),
    "no tokenizer of glyphs": (
        "tokenizer/tokenizer_config.json",
        Path.unlink,
        "tokenizer: ",
    ),
    "no chat template": (TEMPLATE, Path.unlink, "processor: .*chat_template.jinja"),
    "a template that drops the prompt": (TEMPLATE, write("hello"), "chat template"),
}


@pytest.mark.parametrize(("file", "damage", "said"), DAMAGES.values(), ids=[*DAMAGES])
def test_damaged_folders_are_refused_by_name(
    folder: Path, file: str, damage: Damage, said: str
) -> None:
    damage(folder / file)

    with pytest.raises(ModelError, match=said) as refused:
        load_pipeline(str(folder), dtype=torch.float32)

    assert str(folder) in str(refused.value)


def test_parts_that_do_not_go_together_are_refused(folder: Path) -> None:
    edit("prior_vq_quantizer_codebook_size", to=256)(folder / "transformer" / "config.json")
    reweighed(
        lambda all_: all_.update(
            {
                "prior_token_embedding.weight": all_["prior_token_embedding.weight"][
                    :256
                ].contiguous()
            }
        )
    )(folder / TRANSFORMER)

    with pytest.raises(ModelError, match="codebook 512, .*256"):
        check_model(str(folder))


@pytest.mark.parametrize("part", [LANGUAGE, TRANSFORMER])
def test_weights_in_shards_are_loaded(folder: Path, part: str) -> None:
    path = folder / part
    shutil.copyfile(path, path.with_name("one.safetensors"))
    indexed(name="one.safetensors")(path)

    loaded = load_pipeline(str(folder), dtype=torch.float32)

    stored = load_file(path.with_name("one.safetensors"))
    weights = getattr(loaded, Path(part).parent.name).state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in stored.items())


def test_a_fresh_pipeline_with_tied_weights_is_not_refused(random_pipeline_folder: Path) -> None:
    assert "<|image|>" in check_model(str(random_pipeline_folder)).in_prompts
