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

from glm_grpo.builders.models import model_path
from glm_grpo.cli import main
from glm_grpo.errors import ModelError
from glm_grpo.models.glm_image.loading import check_model, load_pipeline
from glm_grpo.models.glm_image.meta import read_part_configs
from glm_grpo.models.glm_image.model_folder import refuse_missing

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5339212\n"
LANGUAGE = "vision_language_encoder/model.safetensors"
TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
GLYPHS = "text_encoder/model.safetensors"
TEMPLATE = "processor/chat_template.jinja"

Damage = Callable[[Path], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded model's, whose files are links: damage replaces them."""
    copy = tmp_path / "model"
    shutil.copytree(model_path("tiny"), copy, copy_function=os.link)
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


def indexed(*, name: str, weight_map: object = None) -> Damage:
    """Weights come in shards, named by an index; the only one is called so."""

    def damage(path: Path) -> None:
        names = load_file(path).keys()
        path.unlink()
        table = dict.fromkeys(names, name) if weight_map is None else weight_map
        index = path.with_name(f"{path.name}.index.json")
        index.write_text(json.dumps({"metadata": {}, "weight_map": table}))

    return damage


NESTED = "[" * 200_000
LOOP = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}"
DAMAGES: dict[str, tuple[str, Damage, str]] = {
    # Weights.
    "no head": (LANGUAGE, without("lm_head.weight"), "vision_language_encoder: .*lm_head.weight"),
    "no layer": (
        LANGUAGE,
        without("model.language_model.layers.3.mlp.down_proj.weight"),
        "down_proj",
    ),
    "no part of the decoder": (TRANSFORMER, without("proj_out.weight"), "lack proj_out.weight"),
    "no part of the VAE": (VAE, without("decoder.conv_in.bias"), "vae: .*decoder.conv_in.bias"),
    "no embedding of glyphs": (GLYPHS, without("shared.weight"), "text_encoder: .*shared.weight"),
    "a head of another shape": (
        LANGUAGE,
        reweighed(lambda all_: all_.update({"lm_head.weight": torch.zeros(528, 64)})),
        r"do not fit .*lm_head.weight .*\[528, 64\].*\[528, 160\]",
    ),
    "a VAE of another shape": (
        VAE,
        reweighed(lambda all_: all_.update({"decoder.conv_in.bias": torch.zeros(3)})),
        r"decoder.conv_in.bias .*\[3\]",
    ),
    "whole numbers for weights": (
        LANGUAGE,
        reweighed(lambda all_: all_.update({"lm_head.weight": all_["lm_head.weight"].char()})),
        "lm_head.weight .I8",
    ),
    "a shape that lies": (
        "vision_language_encoder/config.json",
        edit("text_config", "hidden_size", to=320),
        "vision_language_encoder: its weights do not fit its config.json",
    ),
    "truncated weights": (TRANSFORMER, cut(0.5), f"{TRANSFORMER}: cannot be used"),
    "a torn header": (GLYPHS, cut(0.0005), f"{GLYPHS}: cannot be used"),
    "empty weights": (LANGUAGE, write(b""), f"{LANGUAGE}: empty"),
    "a pointer of git-lfs": (VAE, write(POINTER), f"{VAE}: a pointer of git-lfs.*git lfs pull"),
    "a pointer for a tokenizer": ("processor/tokenizer.json", write(POINTER), "git lfs pull"),
    "a pickle under another name": (
        TRANSFORMER,
        write(pickle.dumps({"weight": [1.0]})),
        f"{TRANSFORMER}: cannot be used",
    ),
    "no weights": (LANGUAGE, Path.unlink, f"{LANGUAGE}: no such file.*programs"),
    "a shard that is not there": (LANGUAGE, indexed(name="gone.safetensors"), "gone.safetensors"),
    "a shard outside": (LANGUAGE, indexed(name="../vae/x.safetensors"), "not in this folder"),
    "an absolute shard": (TRANSFORMER, indexed(name="/etc/hostname"), "not in this folder"),
    "an index that is a list": (LANGUAGE, indexed(name="", weight_map=["a"]), "weight_map is no"),
    # Configs.
    "another class in the index": (
        "model_index.json",
        edit("transformer", to=["diffusers", "FluxTransformer2DModel"]),
        "model_index.json: transformer is .*FluxTransformer2DModel.*loads a GlmImageTransf",
    ),
    "a text for a part": ("model_index.json", edit("vae", to="x"), "model_index.json: vae is 'x'"),
    "a list for the index": ("model_index.json", write("[]"), "model_index.json: not a JSON obj"),
    "another model type": (
        "vision_language_encoder/config.json",
        edit("model_type", to="glm4v"),
        "config.json: model_type is 'glm4v', and must be 'glm_image'",
    ),
    "another class of decoder": (
        "transformer/config.json",
        edit("_class_name", to="SD3Transformer2DModel"),
        "_class_name is 'SD3Transformer2DModel'",
    ),
    "hidden size 0": (
        "vision_language_encoder/config.json",
        edit("text_config", "hidden_size", to=0),
        "config.json: hidden_size is 0",
    ),
    "a negative width": ("text_encoder/config.json", edit("d_ff", to=-128), "d_ff is -128"),
    "a billion layers": ("transformer/config.json", edit("num_layers", to=10**9), "num_layers is"),
    "a billion layers by another name": (
        "text_encoder/config.json",
        edit("num_hidden_layers", to=10**9),
        "text_encoder/config.json: num_hidden_layers is",
    ),
    "a size of 400 digits": (
        "vision_language_encoder/config.json",
        edit("text_config", "vocab_size", to=10**400),
        "vocab_size is 1000",
    ),
    "a text for a size": ("vae/config.json", edit("latent_channels", to="8"), "latent_channels"),
    "a number for a list": ("vae/config.json", edit("block_out_channels", to=8), "vae/config"),
    "a million blocks": (
        "vae/config.json",
        edit("block_out_channels", to=[8] * 10**6),
        "block_out_channels is",
    ),
    "a list for a section": (
        "vision_language_encoder/config.json",
        edit("vision_config", to=[]),
        "vision_config is not an object",
    ),
    "an unknown activation": (
        "vision_language_encoder/config.json",
        edit("text_config", "hidden_act", to="sin"),
        "vision_language_encoder/config.json: cannot be used",
    ),
    "deep nesting": ("vae/config.json", write(NESTED), "vae/config.json: cannot be used"),
    "a config that is not UTF-8": ("vae/config.json", write(b"\xff\xfe"), "vae/config.json: cann"),
    "no config": ("transformer/config.json", Path.unlink, "transformer/config.json: no such file"),
    "a list for a scheduler": (
        "scheduler/scheduler_config.json",
        write("[]"),
        "scheduler_config.json: not a JSON object",
    ),
    "a scheduler of 10^12 steps": (
        "scheduler/scheduler_config.json",
        edit("num_train_timesteps", to=10**12),
        "num_train_timesteps is",
    ),
    "decoder of another codebook": (
        "transformer/config.json",
        edit("prior_vq_quantizer_codebook_size", to=256),
        "transformer: its weights do not fit",
    ),
    "tokens of an image beyond the vocabulary": (
        "vision_language_encoder/config.json",
        edit("image_start_token_id", to=10**6),
        "image tokens .1000000",
    ),
    # Tokenizers.
    "no tokenizer": ("processor/tokenizer.json", Path.unlink, "tokenizer.json: no such file"),
    "a torn tokenizer": ("processor/tokenizer.json", cut(0.5), "tokenizer.json: cannot be used"),
    "a list for a tokenizer": ("processor/tokenizer.json", write("[]"), "tokenizer.json: not a"),
    "an empty tokenizer": ("processor/tokenizer.json", write("{}"), "tokenizer.json: cannot be"),
    "a deep tokenizer": ("processor/tokenizer.json", write(NESTED), "tokenizer.json: cannot be"),
    "a list for a vocabulary": (
        "processor/tokenizer.json",
        edit("model", "vocab", to=[]),
        "tokenizer.json: cannot be used",
    ),
    "a token beyond the embedding": (
        "processor/tokenizer.json",
        edit("model", "vocab", "zebra", to=5000),
        "processor: .*'zebra' the id 5000.*788 entries",
    ),
    "lists in the tokenizer's config": (
        "processor/tokenizer_config.json",
        write("[1]"),
        "processor/tokenizer_config.json: not a JSON object",
    ),
    "a tokenizer without the image token": (
        "processor/tokenizer_config.json",
        write('{"tokenizer_class": "TokenizersBackend"}'),
        "processor: cannot be used",
    ),
    "a list for the processor": ("processor/processor_config.json", write("[]"), "not a JSON obj"),
    "no tokenizer of glyphs": (
        "tokenizer/tokenizer_config.json",
        Path.unlink,
        "tokenizer/tokenizer_config.json: no such file",
    ),
    "a glyph beyond its embedding": (
        "tokenizer/tokenizer_config.json",
        edit("added_tokens_decoder", "9000", to={"content": "<far>", "special": True}),
        "tokenizer: its tokenizer gives '<far>' the id 9000.*384 entries",
    ),
    # Chat templates.
    "no template": (TEMPLATE, Path.unlink, "processor: holds no chat template"),
    "a template with a mistake": (TEMPLATE, write("{% for %}"), "processor: cannot be used"),
    "a template that drops the prompt": (TEMPLATE, write("hello"), "drops the prompt"),
    "a template that loops": (
        TEMPLATE,
        write(LOOP + "{% endfor %}{% endfor %}"),
        "processor: its chat template takes more",
    ),
    "a template that fills the memory": (
        TEMPLATE,
        write("{{ messages[0].role * 10 ** 10 }}"),
        "processor: its chat template takes more",
    ),
    "a template that writes much": (
        TEMPLATE,
        write("{{ messages[0].content[0].text * 10 ** 6 }}"),
        "processor: its chat template takes more",
    ),
}


@pytest.mark.parametrize(("file", "damage", "said"), DAMAGES.values(), ids=[*DAMAGES])
def test_damaged_folders_are_refused_by_name_before_weights_are_loaded(
    folder: Path, file: str, damage: Damage, said: str
) -> None:
    damage(folder / file)

    with pytest.raises(ModelError, match=said) as refused:
        load_pipeline(str(folder), dtype=torch.float32)

    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)


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

    with pytest.raises(ModelError, match="codebook 512, that of the transformer 256"):
        check_model(str(folder))


def test_every_parameter_is_asked_for_by_name() -> None:
    with pytest.raises(ModelError, match="lack a, b, c and 1 more"):
        refuse_missing(Path("part"), ["d", "c", "b", "a"], [])


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
    assert "<|image|>" in check_model(str(random_pipeline_folder)).language


def test_what_is_refused_after_loading_is_the_librarys_own_report(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should the headers be read wrongly, the last word is with who fills the model."""
    without("lm_head.weight")(folder / LANGUAGE)
    monkeypatch.setattr("glm_grpo.models.glm_image.loading.check_weights", lambda *_: None)

    with pytest.raises(ModelError, match="vision_language_encoder: its weights lack lm_head"):
        load_pipeline(str(folder), dtype=torch.float32)


def test_a_plan_names_the_config_that_no_model_can_be_built_from(folder: Path) -> None:
    edit("num_attention_heads", to=7)(folder / "text_encoder" / "config.json")
    edit("block_out_channels", to=[8, 8])(folder / "vae" / "config.json")

    with pytest.raises(ModelError, match="vae/config.json: cannot be used"):
        read_part_configs(str(folder))


@pytest.mark.parametrize("command", ["check", "plan"])
def test_commands_end_in_one_line_on_a_damaged_folder(
    folder: Path, command: str, configs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit("text_config", "num_hidden_layers", to=-4)(
        folder / "vision_language_encoder" / "config.json"
    )

    with pytest.raises(SystemExit) as ended:
        main([command, "--config-dir", str(configs_dir), f"model.path={folder}"])

    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "vision_language_encoder/config.json: num_hidden_layers is -4" in said
    assert "Traceback" not in said
