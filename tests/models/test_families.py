"""Which family a model is of, and which keys a family has."""

from __future__ import annotations

import json

import pytest

from glm_grpo.config import Config, compose_config
from glm_grpo.errors import ConfigError
from glm_grpo.models import find
from glm_grpo.models.find import find_model

PROMPTS = ["data.path=prompts.txt", "data.eval_path=held_out.txt"]


def janus_config(*overrides: str) -> Config:
    return compose_config(None, "janus_pro_1b_24gb", [*PROMPTS, *overrides])


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("tiny", "GLM-Image"),
        ("zai-org/GLM-Image", "GLM-Image"),
        ("deepseek-community/Janus-Pro-1B", "Janus-Pro"),
        ("deepseek-community/Janus-Pro-7B", "Janus-Pro"),
        ("no/such/folder", "GLM-Image"),
    ],
)
def test_a_family_is_known_by_its_published_ids(path, name):
    assert name == find_model(path).family.NAME


@pytest.mark.parametrize(
    ("file", "content", "name"),
    [
        ("model_index.json", {"_class_name": "GlmImagePipeline"}, "GLM-Image"),
        ("config.json", {"model_type": "janus"}, "Janus-Pro"),
        # GLM-Image says what is missing.
        ("other.json", {}, "GLM-Image"),
    ],
)
def test_a_family_is_known_by_the_files_of_a_folder(file, content, name, tmp_path):
    (tmp_path / file).write_text(json.dumps(content))
    assert name == find_model(str(tmp_path)).family.NAME


@pytest.mark.parametrize(
    ("file", "content", "kind"),
    [
        ("model_index.json", {"_class_name": "StableDiffusionPipeline"}, "StableDiffusionPipeline"),
        ("model_index.json", {"transformer": ["diffusers", "SomeModel"]}, None),
        ("config.json", {"model_type": "llama"}, "llama"),
    ],
)
def test_a_model_of_no_family_is_refused(file, content, kind, tmp_path):
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        find_model(str(tmp_path))
    rule = f"its kind is {kind!r}, and only GLM-Image and Janus-Pro can be trained"
    assert rule in str(caught.value)
    assert "a model like zai-org/GLM-Image or deepseek-community/Janus-" in str(caught.value)


def test_a_hub_id_is_known_by_its_config(tmp_path, monkeypatch):
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "janus"}')
    monkeypatch.setattr(find, "hf_hub_download", lambda path, name: str(config))
    assert find_model("someone/a-janus-of-their-own").family.NAME == "Janus-Pro"


@pytest.mark.parametrize("place", ["folder", "hub"])
def test_the_original_layout_is_refused_with_the_converted_one(place, tmp_path, monkeypatch):
    def refuse(path, name):
        raise OSError

    monkeypatch.setattr(find, "hf_hub_download", refuse)
    (tmp_path / "config.json").write_text('{"model_type": "multi_modality"}')
    path = str(tmp_path) if place == "folder" else "deepseek-ai/Janus-Pro-7B"
    with pytest.raises(ConfigError, match="deepseek-community/"):
        find_model(path)


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("+decode.steps=20", "decode.steps = 20\n.*Janus-Pro"),
        ("+decode.recheck_every=3", "decode.recheck_every = 3\n.*\n.*'~decode.recheck_every'"),
        ("+decode.vae_batch_size=2", "decode.vae_batch_size = 2"),
        ("sft.preview=repeat", "sft.preview = 'repeat'"),
        ("data.sources=1", "data.sources = 1"),
    ],
)
def test_janus_pro_refuses_keys_that_it_does_not_have(override, rule):
    config = janus_config(override)
    with pytest.raises(ConfigError, match=rule):
        find_model(config.model.path).family.check_keys(config)


def test_glm_image_refuses_guidance_between_tokens_and_asks_for_steps(configs_dir):
    words = ["+rollout.guidance_scale=5.0", "~decode.steps", "rollout.width=500"]
    config = compose_config(configs_dir, "tiny", words)
    with pytest.raises(ConfigError, match="3 problems") as caught:
        find_model("tiny").family.check_keys(config)
    for named in ("rollout.guidance_scale = 5.0", "decode.steps = None", "set rollout.width=512"):
        assert named in str(caught.value)


def test_layers_that_the_model_does_not_have_are_refused():
    words = [*PROMPTS, "model.adapter.target_modules=[q_proj,gate_proj]"]
    config = compose_config(None, "glm_image_24gb", words)
    with pytest.raises(ConfigError, match=r"\['q_proj', 'gate_proj'\]\n.*gate_up_proj"):
        find_model(config.model.path).family.check_keys(config)
    # Janus-Pro has it.
    config = compose_config(None, "janus_pro_1b_16gb", words)
    find_model(config.model.path).family.check_keys(config)


@pytest.mark.parametrize("name", ["janus_pro_1b_16gb", "janus_pro_7b_80gb", "glm_image_24gb"])
def test_packaged_configs_have_the_keys_of_their_family(name):
    config = compose_config(None, name, PROMPTS)
    find_model(config.model.path).family.check_keys(config)


def test_janus_pro_draws_one_size(janus_folder):
    family, config = find_model(str(janus_folder)).family, janus_config("rollout.height=32")
    with pytest.raises(ConfigError, match="rollout.width = 384\n.*must be 32"):
        family.check_sizes(str(janus_folder), config)
