"""The shipped Janus and its detector hold what their card states."""

from __future__ import annotations

from collections import Counter
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache, JanusForConditionalGeneration, JanusProcessor

from glm_grpo.models.janus_pro.prompt_inputs import image_tokens
from glm_grpo.tiny.objects import world
from glm_grpo.tiny.objects.detector import detect
from tools.tiny.objects import train_detector

WEIGHTS = Path(str(files("glm_grpo.tiny.objects") / "weights"))
THRESHOLD = 0.8


@pytest.fixture(scope="module")
def janus():
    model = JanusForConditionalGeneration.from_pretrained(WEIGHTS / "janus", dtype=torch.float32)
    return model.eval().requires_grad_(False)


def random_scenes(count):
    rng = np.random.default_rng(4)
    return [world.arrange(world.random_request(rng), rng) for _ in range(count)]


def test_shipped_weights_are_small_and_safe():
    shipped = [path for path in WEIGHTS.rglob("*") if path.is_file()]

    assert sum(path.stat().st_size for path in shipped) <= 12 * 10**6
    assert {path.suffix for path in shipped} <= {".safetensors", ".json", ".jinja", ".md"}


def test_encoder_and_decoder_give_images_back(janus):
    cells = torch.stack([world.scene_cells(shapes) for shapes in random_scenes(12)])
    drawn = world.draw_cells(cells)

    tokens = image_tokens(janus.model.vqmodel, drawn)
    decoded = ((janus.model.vqmodel.decode(tokens) + 1) * 127.5).clamp(0, 255)

    assert torch.equal(tokens, cells.flatten(1))
    assert (decoded - drawn.float()).abs().mean() < 4.0


def test_the_detector_finds_every_shape_with_its_colour():
    scenes = random_scenes(40)
    pixels = torch.stack([world.draw_cells(world.scene_cells(shapes)) for shapes in scenes])

    for shapes, found in zip(scenes, detect(pixels, world.SHAPES), strict=True):
        sure = [each for each in found if each.score > THRESHOLD]
        assert Counter((each.label, max(each.colours, key=each.colours.get)) for each in sure) == (
            Counter((each.shape, each.colour) for each in shapes)
        )


def test_the_detector_does_not_count_broken_shapes():
    rng = np.random.default_rng(5)
    examples = [train_detector.broken_example(rng) for _ in range(40)]
    pixels = torch.stack([torch.from_numpy(each.pixels) for each in examples]).permute(0, 3, 1, 2)

    is_exact = [
        Counter(each.label for each in found if each.score > THRESHOLD)
        == Counter(world.SHAPES[label] for label in example.labels)
        for example, found in zip(examples, detect(pixels, world.SHAPES), strict=True)
    ]
    assert np.mean(is_exact) > 0.9


def test_the_stock_model_draws_what_a_prompt_asks_for_with_its_own_guidance(janus):
    processor = JanusProcessor.from_pretrained(WEIGHTS / "janus")
    message = {"role": "user", "content": [{"type": "text", "text": "a photo of a circle"}]}
    inputs = processor.apply_chat_template(
        [[message]] * 8,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        processor_kwargs={"generation_mode": "image", "return_tensors": "pt"},
    )
    torch.manual_seed(0)
    tokens = janus.generate(
        **inputs,
        generation_mode="image",
        do_sample=True,
        top_k=0,
        past_key_values=DynamicCache(),
    )
    pixels = ((janus.decode_image_tokens(tokens) + 1) * 127.5).clamp(0, 255).to(torch.uint8)

    found = detect(pixels.permute(0, 3, 1, 2), world.SHAPES)
    right = [
        [each.label for each in some if each.score > THRESHOLD] == ["circle"] for some in found
    ]
    assert sum(right) >= 6
