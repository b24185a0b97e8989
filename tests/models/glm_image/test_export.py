"""Exported weights, loaded by stock classes, are the trained policy."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from email.message import Message
from pathlib import Path

import pytest
import torch
from diffusers import GlmImagePipeline
from huggingface_hub import ModelCardData, metadata_load
from PIL import Image

from glm_grpo.config.sections import DecodeSection, RolloutSection
from glm_grpo.models import export_page
from glm_grpo.models.export_page import (
    LABEL_HEIGHT,
    PROGRAM,
    README,
    Card,
    StockSettings,
    find_license,
    write_card,
)
from glm_grpo.models.glm_image.export import export_adapter, export_pipeline
from glm_grpo.models.glm_image.loading import load_pipeline

ROWS = torch.arange(6)


def shift(policy):
    with torch.no_grad():
        for index, parameter in enumerate(policy.trainable_parameters()):
            parameter.add_(0.01 * (1 + index % 3))


def log_probs_of(policy, experience):
    return policy.replay(experience.prompts, experience.rollout, ROWS).log_probs.detach()


@pytest.fixture
def trained(make_policy, batch, as_experience, small_preview):
    """Builds a policy, moves it off its start, and samples from it."""

    def build(adapter_rank):
        policy = make_policy(adapter_rank=adapter_rank)
        shift(policy)
        rollout = policy.sample(batch)
        return policy, as_experience(batch, rollout)

    return build


@pytest.fixture
def settings(random_pipeline_folder):
    return StockSettings(
        base=str(random_pipeline_folder),
        dtype="float32",
        rollout=RolloutSection(
            prompts_per_step=1, group_size=2, height=64, width=96, temperature=0.5, top_k=7
        ),
        decode=DecodeSection(steps=2, guidance_scale=1.25),
        license="mit",
        summary="A run.\n",
        results="## Held-out prompts\n",
        training="## How it was trained\n",
        prompt='a red sign that says "OPEN"',
        method=("grpo",),
    )


@pytest.mark.parametrize("adapter_rank", [None, 4])
def test_exported_pipeline_is_the_trained_policy(
    trained, random_pipeline, build_policy, adapter_rank, tmp_path, settings
):
    policy, experience = trained(adapter_rank)
    wanted = log_probs_of(policy, experience)

    export_pipeline(policy, random_pipeline, settings, tmp_path / "pipeline")

    loaded = build_policy(GlmImagePipeline.from_pretrained(tmp_path / "pipeline"))
    assert torch.allclose(log_probs_of(loaded, experience), wanted, atol=1e-4)


def test_exported_adapter_makes_the_trained_policy_of_the_base(
    trained, random_pipeline_folder, build_policy, tmp_path, settings
):
    policy, experience = trained(4)
    wanted = log_probs_of(policy, experience)

    export_adapter(policy.adapted_model, settings, tmp_path / "adapter")

    fresh = GlmImagePipeline.from_pretrained(random_pipeline_folder)
    base = log_probs_of(build_policy(fresh), experience)
    fresh.vision_language_encoder.load_adapter(tmp_path / "adapter")
    assert torch.allclose(log_probs_of(build_policy(fresh), experience), wanted, atol=1e-5)
    assert not torch.allclose(base, wanted, atol=1e-2)
    fresh.vision_language_encoder.disable_adapters()
    assert torch.equal(log_probs_of(build_policy(fresh), experience), base)


def run_program(folder, monkeypatch, *words):
    """Runs `generate.py` of an export in its folder; returns its names."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", [PROGRAM, *words])
    return runpy.run_path(PROGRAM)


CARD = Card(
    title="Adapter for base",
    metadata=ModelCardData(library_name="peft"),
    license="MIT.",
    notes=(),
    snippet="",
    imports="",
    load='def draw(): return Image.new("RGB", (8, 8))',
    to_base="",
    has_adapter=True,
)


@pytest.mark.parametrize("form", ['a SHAPE above|below the word "WORD"', None])
def test_the_program_of_a_miniature_says_which_prompts_it_knows(
    settings, tmp_path, monkeypatch, capsys, form
):
    write_card(tmp_path, CARD, replace(settings, known_form=form))
    run_program(tmp_path, monkeypatch, "a cat", "--base", settings.base)
    said = "" if form is None else f"note: the model knows only prompts of the form {form}\n"
    assert capsys.readouterr().err == said
    assert ("knows only prompts" in (tmp_path / README).read_text()) == (form is not None)


@pytest.mark.parametrize("has_adapter", [True, False])
def test_the_program_says_where_its_image_is_and_how_to_draw_the_base(
    settings, tmp_path, monkeypatch, capsys, has_adapter
):
    write_card(tmp_path, replace(CARD, has_adapter=has_adapter), settings)
    base = ["--base", settings.base]
    run_program(tmp_path, monkeypatch, *(base if has_adapter else []))
    saved, *hints = capsys.readouterr().out.splitlines()
    drawn = "base | trained" if has_adapter else "trained"
    assert saved == f"saved {tmp_path / 'image.png'} ({drawn})"
    assert [hint.count("--base") for hint in hints] == ([] if has_adapter else [1])
    run_program(tmp_path, monkeypatch, *base)
    assert "to draw the base" not in capsys.readouterr().out


def test_a_page_names_run_project_and_repository(settings, tmp_path, monkeypatch):
    stated = Message()
    stated["Project-URL"] = "Repository, https://example.org/glm-grpo"
    monkeypatch.setattr(export_page, "metadata", lambda _: stated)
    folder = tmp_path / "my adapter"
    folder.mkdir()

    write_card(folder, CARD, replace(settings, name="larger groups"))

    page = (folder / README).read_text()
    assert "\n# larger groups\n" in page
    assert "\nAdapter for base, trained by [glm-grpo](https://example.org/glm-grpo). MIT.\n" in page
    assert "\nhf download 'YOUR-NAME/my adapter' --local-dir 'my adapter'\n" in page

    # No address is invented.
    monkeypatch.setattr(export_page, "metadata", lambda _: Message())
    write_card(folder, CARD, settings)
    assert "\n# Adapter for base\n\nTrained by glm-grpo. MIT.\n" in (folder / README).read_text()


@pytest.mark.parametrize("kind", ["pipeline", "adapter"])
def test_the_page_of_an_export_loads_it_with_stock_classes(
    trained, random_pipeline, tmp_path, settings, monkeypatch, kind
):
    policy, _ = trained(4)
    # As the published one has, and the run has not.
    policy.model.generation_config.top_p = 0.75
    if kind == "adapter":
        export_adapter(policy.adapted_model, settings, tmp_path)
    else:
        export_pipeline(policy, random_pipeline, settings, tmp_path)
    monkeypatch.chdir(tmp_path)
    page = (tmp_path / README).read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    # No path of this machine.
    place = f"PATH/TO/{Path(settings.base).name}"
    assert settings.base not in page
    assert f"--base {place}" in page
    configs = [path.read_text() for path in tmp_path.rglob("*.json")]
    assert not any(settings.base in text or str(tmp_path) in text for text in configs)
    if kind == "adapter":
        assert settings.base not in (tmp_path / "adapter_config.json").read_text()
        snippet = snippet.replace(place, settings.base)

    exec(compile(snippet, README, "exec"), names)

    assert Image.open("image.png").size == (settings.rollout.width, settings.rollout.height)
    sampling = names["pipeline"].vision_language_encoder.generation_config
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 1.0)
    assert "temperature 0.5, top_k 7" in page
    assert names["pipeline"].num_timesteps == settings.decode.steps
    assert names["pipeline"].guidance_scale == settings.decode.guidance_scale
    # No base_model: the hub refuses the path of a folder.
    card = metadata_load(tmp_path / README)
    assert card.pop("tags") == ["glm-grpo", "grpo", *(["lora"] if kind == "adapter" else [])]
    assert card == {
        "license": "mit",
        "library_name": "peft" if kind == "adapter" else "diffusers",
        "pipeline_tag": "text-to-image",
    }


@pytest.mark.parametrize(
    ("kind", "num_sources"), [("pipeline", 0), ("adapter", 0), ("adapter", 1), ("pipeline", 2)]
)
def test_the_program_of_an_export_draws_base_and_trained_side_by_side(
    trained, random_pipeline, random_pipeline_folder, tmp_path, settings, monkeypatch, kind,
    num_sources,
):  # fmt: skip
    policy, _ = trained(4)
    # With random weights, tokens outside the codebook would not be rare.
    settings = replace(settings, num_sources=num_sources)
    for number in range(num_sources):
        Image.new("RGB", (50, 70), (99 * number, 200, 9)).save(
            tmp_path / f"source-{number + 1}.png"
        )
    if kind == "adapter":
        export_adapter(policy.adapted_model, settings, tmp_path)
    else:
        export_pipeline(policy, random_pipeline, settings, tmp_path)

    names = run_program(tmp_path, monkeypatch, "a cat", "--base", str(random_pipeline_folder))

    width, height = settings.rollout.width, settings.rollout.height
    both = Image.open("image.png")
    assert both.size == (2 * width, LABEL_HEIGHT + height)
    base, trained_image = (
        both.crop((left, LABEL_HEIGHT, left + width, both.height)) for left in (0, width)
    )
    assert base.tobytes() != trained_image.tobytes()
    # The base samples in the same way, and its images are those of the untouched pipeline.
    sampling = names["pipeline"].vision_language_encoder.generation_config
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 1.0)
    assert "image.png" in (tmp_path / README).read_text()
    if num_sources == 0:
        stock = GlmImagePipeline.from_pretrained(random_pipeline_folder)
        stock.vision_language_encoder.generation_config = sampling
        torch.manual_seed(0)
        (expected,) = stock(
            "a cat",
            height=height,
            width=width,
            num_inference_steps=2,
            guidance_scale=1.25,
            generator=torch.Generator().manual_seed(0),
        ).images
        assert base.tobytes() == expected.tobytes()


def test_the_program_of_a_pipeline_draws_it_alone_without_a_base(
    trained, random_pipeline, tmp_path, settings, monkeypatch, capsys
):
    policy, _ = trained(None)
    export_pipeline(policy, random_pipeline, settings, tmp_path)

    with pytest.raises(SystemExit):
        run_program(tmp_path, monkeypatch, "a cat", "--base", "PATH/TO/base")
    assert "--base PATH/TO/base" in capsys.readouterr().err
    run_program(tmp_path, monkeypatch, "a cat", "--output", "alone.png")

    assert Image.open("alone.png").width == settings.rollout.width


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("---\nlicense: mit\n---\n# A model", "mit"),
        ("---\nlicense: [mit]\n---\n", None),
        ("# A model", None),
        (None, None),
    ],
)
def test_find_license_reads_the_card_beside_the_base(content, expected, tmp_path):
    if content is not None:
        (tmp_path / README).write_text(content)
    assert find_license(str(tmp_path)) == expected


def test_the_page_of_a_float16_policy_keeps_its_decoder_in_bfloat16(
    random_pipeline_folder, build_policy, tmp_path, settings, monkeypatch
):
    pipeline = load_pipeline(str(random_pipeline_folder), dtype=torch.float16)
    policy = build_policy(pipeline, adapter_rank=4)
    export_adapter(policy.adapted_model, replace(settings, dtype="float16"), tmp_path)
    monkeypatch.chdir(tmp_path)
    (snippet,) = re.findall(r"```python\n(.*?)```", (tmp_path / README).read_text(), re.DOTALL)
    names = {}

    exec(
        compile(snippet.replace("PATH/TO/", f"{Path(settings.base).parent}/"), README, "exec"),
        names,
    )

    assert names["pipeline"].vision_language_encoder.dtype == torch.float16
    assert names["pipeline"].transformer.dtype == names["pipeline"].vae.dtype == torch.bfloat16
    assert Image.open("image.png").size == (settings.rollout.width, settings.rollout.height)
