"""Edits: prompts with source images are sampled, replayed and drawn as the stock classes do."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import pytest
import torch
from diffusers import GlmImagePipeline

from glm_grpo.models.glm_image.decoder import GlmImageDecoder
from glm_grpo.models.glm_image.token_grid import token_layout
from glm_grpo.tiny import world
from glm_grpo.types import PromptBatch
from rewards.types import Prompt
from tests.stock import stock_image, stock_inputs, stock_log_probs

SIZE = world.SIZE
EMBEDDED = files("glm_grpo.tiny") / "weights" / "pipeline"
ROWS = torch.arange(6)
LAYOUT = token_layout(SIZE, SIZE, has_preview=False)


@pytest.fixture(scope="module")
def pipeline():
    """The embedded model's."""
    pipeline = GlmImagePipeline.from_pretrained(EMBEDDED)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def policy(pipeline, build_policy):
    return build_policy(pipeline, adapter_rank=4)


@pytest.fixture(scope="module")
def edits(policy):
    """Two prompts of different length with a source each, three samples of each."""
    return edits_for(policy)


@pytest.fixture(scope="module")
def rollout(policy, edits):
    return policy.sample(edits)


def sign(index):
    words = ("KITE", "MOON", "LAMP", "RAFT", "STAR", "GOLD", "WIND", "PEAR", "BIRD")
    return world.draw_sign(world.signs_of_words(words, seed=3)[index])


def edits_for(policy):
    prompts = (
        Prompt("word", 'write "OPEN" instead', sources=(sign(0),)),
        Prompt("colours", "change the colours to red on white, please", sources=(sign(5),)),
    )
    batch = PromptBatch(prompts, 3, SIZE, SIZE, seed=11, decode_seeds=(5, 6))
    return policy.encode_sources(batch)


def two_sources(policy, batch):
    """The same prompts with a second source of equal size each."""
    prompts = [replace(p, sources=(*p.sources, sign(7 + i))) for i, p in enumerate(batch.prompts)]
    return policy.encode_sources(replace(batch, prompts=tuple(prompts)))


def assert_close(ours, theirs, *, is_trained):
    """To 1e-5 nats; large logits of trained weights are rounded by more, in a few tokens."""
    gap = (ours - theirs).abs()
    assert gap.mean() <= 1e-5
    assert gap.max() <= (2e-4 if is_trained else 1e-5)


# The logits of random weights are small, and so rounded by little.
@pytest.mark.parametrize(("count", "is_trained"), [(1, True), (2, False)])
def test_sampled_and_replayed_log_probs_are_those_of_generate(
    policy, make_policy, count, is_trained
):
    policy = policy if is_trained else make_policy(adapter_rank=4)
    edits = edits_for(policy)
    batch = edits if count == 1 else two_sources(policy, edits)

    rollout = policy.sample(batch)

    assert rollout.token_ids.shape == (2, 3, 16)
    assert batch.source_token_ids.shape == (2, count, 16)
    replayed = policy.replay(batch, rollout, ROWS).log_probs.unflatten(0, (2, 3))
    assert_close(replayed, rollout.log_probs, is_trained=is_trained)
    for sample in range(3):
        stock = stock_log_probs(policy, batch, rollout.token_ids[:, sample])
        assert_close(rollout.log_probs[:, sample], stock, is_trained=is_trained)


def test_positions_are_the_stock_ones(policy, edits):
    inputs = policy.encode(edits)
    stock = stock_inputs(policy, edits)
    names = ("input_ids", "image_grid_thw", "images_per_sample", "attention_mask")
    positions, _ = policy.model.model.get_rope_index(**{name: stock[name] for name in names})
    assert torch.equal(inputs.position_ids, positions)
    assert torch.equal(inputs.attention_mask, stock["attention_mask"])
    # The placeholders alone differ.
    differs = inputs.input_ids != stock["input_ids"]
    assert torch.equal(differs, stock["input_ids"] == policy.processor.image_token_id)


def gap(policy, edits, rollout, inputs):
    """By how much replay on these inputs misses what was sampled, nats a token."""
    policy._encoded = (edits, inputs)
    replayed = policy.replay(edits, rollout, ROWS).log_probs.unflatten(0, (2, 3))
    policy._encoded = None
    return float((replayed.detach() - rollout.log_probs).abs().mean())


def test_wrong_ways_to_read_a_source_are_far_from_what_was_sampled(policy, edits, rollout):
    inputs = policy.encode(edits)
    assert gap(policy, edits, rollout, inputs) < 1e-5

    as_text = inputs.attention_mask.cumsum(1).expand_as(inputs.position_ids) - 1
    text = replace(inputs, position_ids=as_text, next_position=as_text[0, :, -1] + 1)
    assert gap(policy, edits, rollout, text) > 0.1

    unread = stock_inputs(policy, edits)["input_ids"]
    assert gap(policy, edits, rollout, replace(inputs, input_ids=unread)) > 0.1

    # A plain forward pass, which takes generated tokens for text as well.
    rows = inputs.rows(ROWS // 3)
    token_ids = rollout.token_ids.flatten(0, 1)
    ids = torch.cat([rows.input_ids, token_ids[:, :-1]], dim=1)
    mask = torch.cat([rows.attention_mask, torch.ones_like(token_ids[:, :-1])], dim=1)
    with torch.no_grad():
        hidden = policy.model.model.language_model(
            input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).expand(3, -1, -1)
        ).last_hidden_state[:, -token_ids.shape[1] :]
        logits = policy.model.lm_head(hidden)[..., : policy.codebook_size]
    plain = logits.log_softmax(-1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    assert float((plain - rollout.log_probs.flatten(0, 1)).abs().mean()) > 0.1


def test_reference_of_a_base_policy_reads_the_sources_too(policy, edits, rollout):
    reference = policy.reference_log_probs(edits, rollout, ROWS).unflatten(0, (2, 3))
    assert_close(reference, rollout.log_probs, is_trained=True)


@pytest.mark.parametrize(("count", "guidance_scale"), [(1, 1.5), (2, 1.0)])
def test_drawn_group_equals_the_stock_pipeline(pipeline, policy, edits, guidance_scale, count):
    batch = edits if count == 1 else two_sources(policy, edits)
    rollout = policy.sample(batch)
    decoder = GlmImageDecoder(pipeline, steps=3, guidance_scale=guidance_scale)

    images = decoder.decode(batch, rollout.token_ids)

    for prompt, sample in ((0, 0), (0, 2), (1, 1)):
        stock = stock_image(
            pipeline, batch, rollout, prompt, sample, guidance_scale=guidance_scale, steps=3
        )
        ours = images.pixels[prompt, sample].int()
        assert int((ours - (stock * 255).round().int()).abs().max()) <= 1


class Calls:
    """Counts the passes of the transformer by what they do with sources."""

    def __init__(self, pipeline):
        self.modes = []
        self.handle = pipeline.transformer.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module, arguments, inputs):
        self.modes.append(inputs["kv_caches"][0].mode)


def test_a_source_is_written_once_a_group_and_skipped_by_unconditional_passes(
    pipeline, edits, rollout
):
    calls = Calls(pipeline)
    decoder = GlmImageDecoder(pipeline, steps=2, guidance_scale=1.5, batch_size=2)

    decoder.decode(edits, rollout.token_ids)

    # Three images in parts of two and one, two steps each.
    assert calls.modes == ["write", *["read", "skip"] * 4] * 2
    decoder.decode(replace_sources(edits), with_preview(rollout.token_ids))
    calls.handle.remove()
    assert {*calls.modes[18:]} == {None}


def replace_sources(batch):
    prompts = tuple(replace(p, sources=()) for p in batch.prompts)
    return replace(batch, prompts=prompts, source_token_ids=None)


def with_preview(token_ids):
    return torch.cat([token_ids.new_zeros(2, 3, 256), token_ids], dim=2)


def test_sources_are_freed_after_an_error(pipeline, edits, rollout):
    decoder = GlmImageDecoder(pipeline, steps=2, guidance_scale=1.0)

    def fail(*arguments):
        raise RuntimeError("out of memory")

    handle = pipeline.vae.decoder.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        decoder.decode(edits, rollout.token_ids)
    handle.remove()
    assert decoder._transformer._sources is None
