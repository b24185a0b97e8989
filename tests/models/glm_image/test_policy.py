"""Replay, reference, adapters: the links between what is sampled and what is learned."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from glm_grpo.models.glm_image.fast.stock_step import StockStep
from glm_grpo.models.sampling import Truncation
from glm_grpo.tiny.models import PolicySizes, build_policy_model
from tests.stock import stock_log_probs

ROWS = torch.tensor([0, 2, 4, 5])
"""Of 2 prompts x 3 samples: two of each prompt."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("truncation", [Truncation(), Truncation(top_k=40, top_p=0.9, min_p=0.01)])
def test_a_policy_samples_the_same_by_the_stock_step(
    make_policy, batch, truncation, device, small_preview
):
    policy = make_policy(adapter_rank=4, truncation=truncation, is_compiling=device == "cuda")
    for module in policy.modules():
        module.to(device)
    fast = policy.sample(batch)

    policy._build_step = StockStep
    stock = policy.sample(batch)

    assert torch.equal(stock.token_ids, fast.token_ids)
    assert torch.allclose(stock.log_probs, fast.log_probs, atol=1e-5)
    assert (fast.sampling_mask is not None) is truncation.is_active


def test_sampled_and_replayed_log_probs_equal_those_of_stock_generation(policy, batch):
    # With the preview of its true size, in an image that is not square.
    batch = replace(batch, height=64, width=128)
    rollout = policy.sample(batch)
    alone = replace(batch, prompts=batch.prompts[1:], decode_seeds=batch.decode_seeds[1:])

    (stock,) = stock_log_probs(policy, alone, rollout.token_ids[1:, 0])

    replay = policy.replay(batch, rollout, torch.tensor([3]))
    assert torch.allclose(replay.log_probs[0], stock, atol=1e-5)
    assert torch.allclose(rollout.log_probs[1, 0], stock, atol=1e-5)


def test_samples_of_one_prompt_are_replayed_without_a_mask(
    loaded_pipeline, build_policy, batch, rollout, monkeypatch
):
    pipeline = copy.copy(loaded_pipeline)
    shared = PolicySizes(key_value_heads=1)
    pipeline.vision_language_encoder = build_policy_model(seed=2, sizes=shared)
    policy = build_policy(pipeline)
    seen = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, **options):
        # Where keys and values are not repeated there are fewer of them than of queries.
        seen.append((attn_mask is None, options["is_causal"], key.shape[1]))
        return attend(query, key, value, attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    together = policy.replay(batch, rollout, ROWS).log_probs
    assert set(seen) == {(False, False, 5)}
    seen.clear()
    # The shorter prompt, which is padded among others.
    alone = policy.replay(batch, rollout, ROWS[:2]).log_probs

    assert set(seen) == {(True, True, 1)}
    assert torch.allclose(alone, together[:2], atol=1e-5)


def test_gradient_reaches_the_language_model_and_nothing_else(make_policy, batch, small_preview):
    policy = make_policy(is_checkpointing=True)
    rollout = policy.sample(batch)

    policy.replay(batch, rollout, ROWS).log_probs.mean().backward()

    for name, parameter in policy.model.named_parameters():
        is_trained = name.startswith(("model.language_model.", "lm_head."))
        assert parameter.requires_grad is is_trained, name
        assert (parameter.grad is not None and bool(parameter.grad.any())) is is_trained, name


def test_adapters_are_on_the_language_model_alone(make_policy):
    policy = make_policy(adapter_rank=4)

    trained = [name for name, p in policy.model.named_parameters() if p.requires_grad]

    # 6 linear layers x 4 decoder layers x 2 factors.
    assert len(trained) == 48
    assert all("model.language_model.layers." in name and ".lora_" in name for name in trained)


def test_encoding_leaves_no_stale_positions_on_the_model(policy, batch):
    # Another batch than the one it remembers.
    policy.encode(replace(batch, seed=0))
    inner = policy.model.model

    left = (inner.rope_deltas, inner._prefill_len, inner._cached_decode_position_ids)
    assert left == (None, None, None)


def test_encoded_preview_is_that_of_the_image_made_smaller(policy):
    # 24 x 24 tokens, a preview of 16 x 16: every 3 pixels become 2. Lines of one pixel become grey,
    # as in Pillow, which smooths whatever it makes smaller; without that they stay lines.
    lines = (torch.arange(768) % 2 * 255).to(torch.uint8).expand(3, 768, 768)
    small = Image.fromarray(lines.permute(1, 2, 0).numpy()).resize((512, 512), Image.BICUBIC)
    pixels = torch.from_numpy(np.array(small)).permute(2, 0, 1)

    tokens = policy.tokenize_images(lines[None], preview="encode")
    expected = policy.tokenize_images(pixels[None], num_sources=1)

    assert tokens.shape == (1, 16 * 16 + 24 * 24)
    assert torch.equal(tokens[:, :256], expected)
    assert torch.equal(tokens[:, 256:], policy.tokenize_images(lines[None], num_sources=1))
