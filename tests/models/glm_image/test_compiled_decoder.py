"""The compiled decoder draws what the eager one draws, or is not used."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest
import torch

from glm_grpo.models.glm_image.decoder import GlmImageDecoder
from glm_grpo.models.glm_image.fast.compiled_decoder import CompiledDecoder
from rewards.types import Prompt

TORCH_COMPILE = torch.compile


@pytest.fixture
def token_ids():
    return torch.randint(512, (2, 3, 272), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _forgetful():
    yield
    torch.compiler.reset()


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def decoder_with(backend, pipeline, monkeypatch):
    """A decoder whose networks are traced as for Inductor, and given to another backend."""
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: TORCH_COMPILE(function, backend=backend)
    )
    return GlmImageDecoder(pipeline, steps=2, guidance_scale=1.5, is_compiling=True)


def test_compiled_networks_are_used_where_they_draw_the_same(
    random_pipeline, batch, token_ids, monkeypatch, caplog
):
    expected = GlmImageDecoder(random_pipeline, steps=2, guidance_scale=1.5).decode(
        batch, token_ids
    )
    ran = []

    def backend(graph, _):
        def run(*inputs):
            ran.append(1)
            return graph(*inputs)

        return run

    decoder = decoder_with(backend, random_pipeline, monkeypatch)
    pixels = decoder.decode(batch, token_ids).pixels

    assert torch.equal(pixels, expected.pixels)
    assert warnings_of(caplog) == []
    before = len(ran)
    # 2 prompts, 2 steps, 2 passes, all blocks, and the VAE for each of 3 images.
    blocks = len(random_pipeline.transformer.transformer_blocks)
    decoder.with_steps(2).decode(batch, token_ids)
    assert len(ran) - before == 2 * (2 * 2 * blocks + 3)


def _raise(*_):
    raise FileNotFoundError("no compiler")


def _darken(graph, _):
    return lambda *inputs: [output * 0.9 for output in graph(*inputs)]


@pytest.mark.parametrize(
    ("backend", "reason"),
    [(_raise, "no compiler"), (_darken, r"differ by .* 0\.05 ")],
)
def test_networks_that_cannot_be_compiled_or_draw_otherwise_stay_eager(
    random_pipeline, batch, token_ids, monkeypatch, caplog, backend, reason
):
    expected = GlmImageDecoder(random_pipeline, steps=2, guidance_scale=1.5).decode(
        batch, token_ids
    )
    decoder = decoder_with(backend, random_pipeline, monkeypatch)

    pixels = [decoder.decode(batch, token_ids).pixels for _ in range(2)]

    assert all(torch.equal(each, expected.pixels) for each in pixels)
    (message,) = warnings_of(caplog)
    assert re.search(reason, message)


@pytest.mark.parametrize(("difference", "is_used"), [(0.015, True), (0.025, False)])
def test_twice_the_rounding_is_accepted(random_pipeline, caplog, difference, is_used):
    compiled = CompiledDecoder(random_pipeline.transformer, random_pipeline.vae)

    def draw(count):
        rounding = 0.01 if count == 1 else 0.0
        return torch.full((count, 3, 8, 8), difference if compiled.is_used else rounding)

    compiled.check(draw, 4)

    assert compiled.is_used == is_used
    assert bool(warnings_of(caplog)) != is_used


@pytest.mark.long
def test_inductor_draws_the_same_with_glyphs_of_many_lengths(random_pipeline, batch):
    texts = ['a "' + letters + '"' for letters in ("", *("ABCDEFGHIJK"[:n] for n in range(1, 12)))]
    prompts = tuple(Prompt(str(place), text) for place, text in enumerate(texts))
    several = replace(batch, prompts=prompts, group_size=2, decode_seeds=(*range(len(texts)),))
    token_ids = torch.randint(512, (12, 2, 272), generator=torch.Generator().manual_seed(1))
    eager, compiled = (
        GlmImageDecoder(random_pipeline, steps=2, guidance_scale=1.5, is_compiling=is_compiling)
        for is_compiling in (False, True)
    )
    expected = eager.decode(several, token_ids).pixels

    pixels = compiled.decode(several, token_ids).pixels

    assert compiled._compiled.is_used
    difference = (pixels.int() - expected.int()).abs()
    assert difference.max() <= 1
    assert difference.float().mean() < 1e-3
    frames = torch._dynamo.utils.counters["frames"]
    assert frames["ok"] == frames["total"]
    # Blocks for the empty text and for all others, and the VAE.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4
