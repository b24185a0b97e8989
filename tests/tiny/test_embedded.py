"""The shipped model holds what its card states."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import GlmImagePipeline

from glm_grpo.tiny import world
from rewards.terms.aesthetic import AestheticConfig
from rewards.types import Prompt
from tools.tiny.measure import Embedded
from tools.tiny.train_quality import degrade

WEIGHTS = Path(str(files("glm_grpo.tiny") / "weights"))


@pytest.fixture(scope="module")
def embedded():
    embedded = Embedded(WEIGHTS / "pipeline", steps=4)
    # Half of the words that were held out.
    embedded.prompts, embedded.originals = embedded.prompts[::2], embedded.originals[::2]
    return embedded


def test_shipped_weights_are_small_and_safe():
    shipped = [path for path in WEIGHTS.rglob("*") if path.is_file()]

    assert sum(path.stat().st_size for path in shipped) <= 25 * 10**6
    assert {path.suffix for path in shipped} <= {".safetensors", ".json", ".jinja", ".md", ".txt"}


def test_stock_pipeline_loads_the_folder_and_draws():
    pipeline = GlmImagePipeline.from_pretrained(WEIGHTS / "pipeline")
    pipeline.set_progress_bar_config(disable=True)

    image = pipeline(
        'white on red: a circle above the word "KITE"',
        height=128,
        width=128,
        num_inference_steps=4,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(3),
        output_type="pt",
    ).images[0]

    # Of the three colours of such a sign, two are there; a blank or grey image has neither.
    red = (image[0] - image[2] > 0.4).float().mean()
    white = (image.amin(dim=0) > 0.8).float().mean()
    assert float(red) > 0.4
    assert float(white) > 0.05


def test_reconstruction_give_the_image_back(embedded):
    drawn = embedded.draw(embedded.prompts, embedded.reconstruction())

    originals = embedded.read(embedded.prompts, embedded.originals)
    assert embedded.similarity(drawn).mean() >= 0.85
    assert embedded.read(embedded.prompts, drawn).similarity >= 0.9 * originals.similarity
    assert originals.similarity >= 0.95


def test_base_model_reads_between_0_4_and_0_8(embedded):
    reading = embedded.sample(group_size=1)

    assert 0.4 <= reading.similarity <= 0.8


def test_quality_falls_with_degradation():
    folder = "pkg://glm_grpo/tiny/weights/quality_clip"
    term = AestheticConfig(
        kind="aesthetic",
        weight=1.0,
        clip_model=f"{folder}/config.json",
        clip_weights=f"{folder}/model.safetensors",
        head=f"{folder}/head.safetensors",
    ).build(torch.device("cpu"))
    signs = world.signs_of_words(world.HELD_OUT_WORDS[:32], seed=9)
    clean = torch.stack([world.draw_sign(sign) for sign in signs]).float() / 255
    generator = torch.Generator().manual_seed(0)
    degraded, quality = degrade(clean, np.random.default_rng(0), generator)
    prompts = [Prompt(sign.word, world.caption(sign)) for sign in signs]

    scores = term.score(prompts, (degraded * 255).round().to(torch.uint8))

    wanted = (quality - 1) / 9
    assert float(scores[wanted == 1].mean()) > 0.9
    assert float(torch.corrcoef(torch.stack([scores, wanted]))[0, 1]) > 0.8
