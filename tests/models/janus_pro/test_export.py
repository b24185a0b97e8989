"""Exports are loaded by stock classes, and draw what was trained."""

from __future__ import annotations

import re
import runpy

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import JanusForConditionalGeneration

from glm_grpo.config.sections import DecodeSection, RolloutSection
from glm_grpo.models.export_page import LABEL_HEIGHT, PROGRAM, StockSettings
from glm_grpo.models.janus_pro import family
from glm_grpo.models.janus_pro.loading import JanusPro
from tests.janus_miniature import SIDE

ROWS = torch.arange(9)


@pytest.fixture
def settings(janus_folder):
    return StockSettings(
        base=str(janus_folder),
        dtype="float32",
        rollout=RolloutSection(
            prompts_per_step=1, group_size=2, height=SIDE, width=SIDE, temperature=0.5, top_p=0.9
        ),
        decode=DecodeSection(),
        license="mit",
        summary="A run.\n",
        results="## Held-out prompts\n",
        training="## How it was trained\n",
        prompt="a red cat",
    )


@pytest.fixture
def exported(make_janus_policy, janus_batch, loaded_janus, settings, tmp_path):
    """Exports a policy that has moved; returns what it drew, with its log-probs."""

    def export(kind, adapter_rank):
        policy = make_janus_policy(adapter_rank=adapter_rank, temperature=0.5)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in policy.trainable_parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        rollout = policy.sample(janus_batch)
        wanted = policy.replay(janus_batch, rollout, ROWS).log_probs.detach()
        parts = JanusPro(policy.model, loaded_janus.processor)
        family.export(policy, parts, settings, tmp_path, kind=kind)
        return rollout, wanted

    return export


def log_probs_of(model, loaded_janus, build, batch, rollout):
    """Log-probs by a policy around a stock model, without adapters of its own."""
    policy = build(JanusPro(model, loaded_janus.processor), temperature=0.5)
    return policy.replay(batch, rollout, ROWS).log_probs


def test_an_adapter_is_loaded_by_the_stock_class(
    exported, janus_batch, janus_folder, loaded_janus, build_janus_policy, tmp_path
):
    rollout, wanted = exported("adapter", 4)
    model = JanusForConditionalGeneration.from_pretrained(janus_folder).eval()
    args = (loaded_janus, build_janus_policy, janus_batch, rollout)
    before = log_probs_of(model, *args)
    model.load_adapter(tmp_path)
    assert torch.allclose(log_probs_of(model, *args), wanted, atol=1e-4)
    assert not torch.allclose(before, wanted, atol=1e-2)
    model.disable_adapters()
    assert torch.equal(log_probs_of(model, *args), before)


@pytest.mark.parametrize("adapter_rank", [None, 4])
def test_a_whole_folder_has_what_was_trained_and_every_other_part(
    exported, janus_batch, janus_folder, loaded_janus, build_janus_policy, adapter_rank, tmp_path
):
    rollout, wanted = exported("pipeline", adapter_rank)
    model = JanusForConditionalGeneration.from_pretrained(tmp_path).eval()
    args = (loaded_janus, build_janus_policy, janus_batch, rollout)
    assert torch.allclose(log_probs_of(model, *args), wanted, atol=1e-4)
    base = load_file(janus_folder / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert base.keys() == found.keys()
    changed = {name for name in base if not torch.equal(base[name], found[name])}
    assert changed
    assert all(name.startswith("model.language_model.") for name in changed)


@pytest.mark.parametrize("kind", ["adapter", "pipeline"])
def test_the_page_and_the_program_draw_images(exported, janus_folder, kind, tmp_path, monkeypatch):
    exported(kind, 4)
    card = (tmp_path / "README.md").read_text()
    assert "license_name: deepseek" in card
    (program,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(program.replace(f"PATH/TO/{janus_folder.name}", str(janus_folder)), names)
    assert Image.open("image.png").size == (SIDE, SIDE)
    assert names["model"].generation_config.temperature == (0.5 if kind == "pipeline" else None)
    assert "top_k=0" in program
    assert "top_p=0.9" in program

    monkeypatch.setattr("sys.argv", [PROGRAM, "a red cat", "--base", str(janus_folder)])
    runpy.run_path(PROGRAM)
    both = Image.open("image.png")
    assert both.size == (2 * SIDE, LABEL_HEIGHT + SIDE)
    base, trained = (
        both.crop((left, LABEL_HEIGHT, left + SIDE, both.height)) for left in (0, SIDE)
    )
    assert base.tobytes() != trained.tobytes()
