"""What is no GLM-Image pipeline is refused with value, rule and remedy."""

from __future__ import annotations

import json

import pytest
import torch

from glm_grpo.errors import ModelError
from glm_grpo.glm_image.loading import load_pipeline


def test_load_pipeline_loads_a_folder_in_the_dtype_asked_for(random_pipeline_folder):
    pipeline = load_pipeline(str(random_pipeline_folder), dtype=torch.bfloat16)

    model = pipeline.vision_language_encoder
    assert model.lm_head.weight.dtype == pipeline.transformer.dtype == torch.bfloat16
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c"])
def test_load_pipeline_refuses_what_is_neither_folder_nor_hub_id(path):
    with pytest.raises(ModelError, match="no such folder"):
        load_pipeline(path, dtype=torch.float32)


def test_load_pipeline_refuses_a_folder_without_an_index(tmp_path):
    with pytest.raises(ModelError, match="model_index.json"):
        load_pipeline(str(tmp_path), dtype=torch.float32)


def test_load_pipeline_refuses_another_pipeline(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))

    with pytest.raises(ModelError, match="FluxPipeline"):
        load_pipeline(str(tmp_path), dtype=torch.float32)


def test_load_pipeline_refuses_a_torn_index(tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class')

    with pytest.raises(ModelError, match="JSON"):
        load_pipeline(str(tmp_path), dtype=torch.float32)


def test_load_pipeline_explains_a_folder_without_weights(tmp_path, random_pipeline_folder):
    (tmp_path / "model_index.json").write_bytes(
        (random_pipeline_folder / "model_index.json").read_bytes()
    )

    with pytest.raises(ModelError, match="could not be loaded"):
        load_pipeline(str(tmp_path), dtype=torch.float32)
