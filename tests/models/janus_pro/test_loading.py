"""What is loaded, and what is refused before it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.janus_folder import BEGIN, PAD
from glm_grpo.config import compose_config
from glm_grpo.errors import ConfigError, ModelError
from glm_grpo.models.janus_pro import family
from glm_grpo.models.janus_pro.loading import check_model, load_pipeline
from glm_grpo.models.janus_pro.prompt_inputs import encode_prompts, special_ids
from tests.janus_miniature import TEMPLATE, build_model, build_processor


@pytest.fixture
def folder(janus_folder, tmp_path):
    """A copy to damage."""
    return shutil.copytree(janus_folder, tmp_path / "copy")


def change(folder, name, **values):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_folder_is_loaded_whole_in_the_dtype_asked_for(janus_folder):
    parts = load_pipeline(str(janus_folder), dtype=torch.bfloat16)
    stored = load_file(janus_folder / "model.safetensors")
    weights = parts.model.state_dict()
    assert stored.keys() <= weights.keys()
    assert all(weight.dtype == torch.bfloat16 for weight in parts.model.parameters())
    assert not parts.model.training
    assert not any(weight.requires_grad for weight in parts.model.parameters())
    assert "0.1 M parameters" in family.describe(parts)


def test_special_tokens_and_roles_cannot_be_written_in_a_prompt(janus_folder):
    reserved = check_model(str(janus_folder))
    needed = {BEGIN, PAD, "<begin_of_image>", "<image_placeholder>", "<|User|>", "<|Assistant|>"}
    assert needed <= reserved.in_prompts
    assert reserved.text_rule is None


def test_weights_that_lack_a_parameter_are_refused(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.generation_head.vision_head.bias"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="model.generation_head.vision_head.bias"):
        load_pipeline(str(folder), dtype=torch.float32)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"text_config": {"attention_dropout": 0.1}}, "attention_dropout"),
        ({"text_config": {"model_type": "qwen2"}}, "'qwen2'.*llama"),
        ({"vision_config": {"num_image_tokens": 9, "image_size": 32, "patch_size": 8}}, "9 tokens"),
        (
            {"vision_config": {"num_image_tokens": 4, "image_size": 32, "patch_size": 16}},
            " 32 pixels, .*16",
        ),
        ({"vq_config": {"projection_dim": 32}}, " 64 .*32"),
    ],
    ids=str,
)
def test_a_config_whose_parts_do_not_match_is_refused(folder, values, said):
    stored = json.loads((folder / "config.json").read_text())
    merged = {
        key: stored[key] | value if isinstance(value, dict) else value
        for key, value in values.items()
    }
    change(folder, "config.json", **merged)
    with pytest.raises(ModelError, match=said):
        check_model(str(folder))


def test_a_folder_without_template_or_with_a_pointer_is_refused(folder):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="chat_template.jinja"):
        check_model(str(folder))
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match="git lfs pull"):
        check_model(str(folder))


def test_the_published_template_makes_the_prompt_that_tests_use(assets_dir, loaded_janus):
    path = assets_dir / "janus_pro_published" / "chat_template.jinja"
    message = [{"role": "user", "content": [{"type": "text", "text": "a red cat"}]}]
    processor = loaded_janus.processor
    ours, published = (
        processor.apply_chat_template(message, chat_template=each, add_generation_prompt=True)
        for each in (processor.chat_template, path.read_text())
    )
    assert ours == published == "<|User|>: a red cat\n\n<|Assistant|>:"


@pytest.mark.long
def test_the_layers_alone_are_stored_in_4_bits(
    build_janus_policy, janus_batch, loaded_janus, monkeypatch, tmp_path
):
    module = pytest.importorskip("bitsandbytes")
    # See tests/models/glm_image/test_quantization.py.
    monkeypatch.setattr(module.nn.modules, "has_avx512bf16", lambda: False)
    build_model(width=128).save_pretrained(tmp_path)
    loaded_janus.processor.save_pretrained(tmp_path)
    parts = load_pipeline(str(tmp_path), dtype=torch.bfloat16, quantization="nf4")

    quantised = [
        name for name, each in parts.model.named_modules() if isinstance(each, module.nn.Linear4bit)
    ]
    assert len(quantised) == 2 * 7
    assert all(name.startswith("model.language_model.layers.") for name in quantised)
    policy = build_janus_policy(parts, adapter_rank=4)
    rollout = policy.sample(janus_batch)
    replay = policy.replay(janus_batch, rollout, torch.arange(9)).log_probs
    assert (replay - rollout.log_probs.flatten(0, 1)).abs().mean() < 5e-2


@pytest.mark.parametrize("begin", ["", BEGIN, "{{ bos_token }}"])
def test_a_prompt_begins_once_whoever_writes_the_first_token(loaded_janus, begin):
    processor = build_processor(begin + TEMPLATE)
    ids = special_ids(loaded_janus.model, processor)
    inputs = encode_prompts(processor, ["a red cat", "x"], ids)
    assert ((inputs.input_ids == ids.begin).sum(dim=1) == 1).all()


def test_a_hub_id_is_planned_and_checked_by_its_config_in_the_cache(
    janus_folder, tmp_path, monkeypatch
):
    snapshot = tmp_path / "models--me--janus" / "snapshots" / "0"
    shutil.copytree(janus_folder, snapshot)
    (tmp_path / "models--me--janus" / "refs").mkdir()
    (tmp_path / "models--me--janus" / "refs" / "main").write_text("0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert family.knows_sizes("me/janus")
    planner = family.build_planner("me/janus")
    assert planner.language.drawn == 96
    assert planner.longest_prompt_tokens(["a red cat"], height=32, width=32) > 20
    words = ["data.path=a.txt", "data.eval_path=b.txt", "model.path=me/janus"]
    config = compose_config(None, "janus_pro_1b_24gb", words)
    with pytest.raises(ConfigError, match="rollout.width = 384\n.*must be 32"):
        family.check_sizes("me/janus", config)


def test_images_of_another_size_have_no_tokens(make_janus_policy):
    with pytest.raises(ValueError, match="32 x 32"):
        make_janus_policy().tokenize_images(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
