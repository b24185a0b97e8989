"""What is no GLM-Image pipeline is refused with value, rule and remedy."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from glm_grpo.errors import ConfigError
from glm_grpo.models.glm_image.loading import check_model, load_pipeline
from glm_grpo.models.glm_image.prompt_inputs import image_tokens


@pytest.mark.parametrize(
    ("dtype", "of_decoder"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.bfloat16)],
    ids=["bfloat16", "float16"],
)
def test_load_pipeline_loads_a_folder_in_the_dtype_asked_for(
    random_pipeline_folder, dtype, of_decoder
):
    pipeline = load_pipeline(str(random_pipeline_folder), dtype=dtype)

    model = pipeline.vision_language_encoder
    assert model.lm_head.weight.dtype == dtype
    decoder = (pipeline.text_encoder, pipeline.transformer, pipeline.vae)
    assert {part.dtype for part in decoder} == {of_decoder}
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("path", ["./nowhere", "nowhere"])
def test_load_pipeline_refuses_what_is_neither_folder_nor_hub_id(path):
    with pytest.raises(ConfigError, match=f"model.path is '{path}': .*zai-org/GLM-Image"):
        load_pipeline(path, dtype=torch.float32)


def test_load_pipeline_refuses_a_folder_without_an_index(tmp_path):
    with pytest.raises(ConfigError, match="model_index.json"):
        load_pipeline(str(tmp_path), dtype=torch.float32)


def test_load_pipeline_explains_a_hub_id_that_cannot_be_fetched(monkeypatch):
    def refuse(*_: object, **__: object) -> str:
        raise OSError("offline")

    monkeypatch.setattr("diffusers.GlmImagePipeline.download", refuse)
    monkeypatch.setattr("glm_grpo.models.glm_image.loading.snapshot_download", refuse)
    for load in (check_model, partial(load_pipeline, dtype=torch.float32)):
        with pytest.raises(ConfigError, match="'owner/model'.*offline.*hf download owner/model"):
            load("owner/model")


def test_a_hub_id_is_checked_by_its_small_files_and_loaded_whole(
    random_pipeline_folder, monkeypatch, tmp_path
):
    """Weights are fetched when the rest is known to be sound."""
    small = tmp_path / "small"
    shutil.copytree(random_pipeline_folder, small, ignore=shutil.ignore_patterns("*.safetensors"))
    asked = []

    def fetch(path: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.append((path, allow_patterns))
        return str(small)

    monkeypatch.setattr("glm_grpo.models.glm_image.loading.snapshot_download", fetch)
    monkeypatch.setattr(
        "diffusers.GlmImagePipeline.download", lambda *_, **__: str(random_pipeline_folder)
    )

    assert "<|image|>" in check_model("owner/model").in_prompts
    assert asked == [("owner/model", ["*.json", "*.jinja"])]
    loaded = load_pipeline("owner/model", dtype=torch.float32)
    stored = load_file(random_pipeline_folder / "vae" / "diffusion_pytorch_model.safetensors")
    assert torch.equal(loaded.vae.decoder.conv_in.bias, stored["decoder.conv_in.bias"])


@pytest.mark.parametrize("form", ["5.17", "5.18"])
def test_image_tokens_take_both_forms_of_upstream_features(random_pipeline, form):
    """Features of an image: patches x width in transformers 5.17, a grid from 5.18 on."""
    model, processor = random_pipeline.vision_language_encoder, random_pipeline.processor
    pixels = torch.randint(
        0, 256, (2, 3, 128, 192), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    expected = image_tokens(model, processor, pixels)
    upstream = model.get_image_features

    def features(*args: object, **kwargs: object) -> object:
        found = upstream(*args, **kwargs)
        grids = found.pooler_output
        rows = [each if each.ndim == 2 else each.flatten(1).T for each in grids]
        found.pooler_output = (
            tuple(rows)
            if form == "5.17"
            # 128 x 192 pixels are 4 x 6 tokens.
            else [each.T.reshape(-1, 4, 6) for each in rows]
        )
        return found

    model.get_image_features = features

    found = image_tokens(model, processor, pixels)

    assert found.shape == (2, 24)
    assert found.equal(expected)
    # Two images, neighbours in neither order: rows and columns are not mixed up.
    assert not found[0].equal(found[1])
    alone = image_tokens(model, processor, pixels[1:])
    assert found[1:].equal(alone)
