"""The self-checks pass on sound models of either family, and name what is wrong with others."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch

from glm_grpo.errors import SelfCheckError
from glm_grpo.models.glm_image import policy as policy_module
from glm_grpo.models.janus_pro.loading import JanusPro
from glm_grpo.models.janus_pro.network import JanusNetwork
from glm_grpo.models.offload import Offload
from glm_grpo.training.models import Models
from glm_grpo.training.replay_check import CHECKED_LAYERS, check_code_path, check_replay
from rewards.score import Scorer
from tests.factories import NoDecoder
from tests.janus_miniature import build_model, build_processor


def text_positions(layout: Any, first_position: Any) -> torch.Tensor:
    """What a plain forward pass takes generated tokens for."""
    return first_position + torch.arange(layout.num_tokens).expand(3, -1)


def models_of(policy: Any) -> Models:
    return Models(policy, NoDecoder(), Scorer([]), Offload({}))


def test_self_check_passes_on_policy(policy, batch, rollout):
    report = check_replay(policy, batch, rollout, rows=6)

    assert report.mean_gap < 1e-5
    assert report.mean_ratio == pytest.approx(1.0, abs=1e-5)
    assert report.effective_sample_size == pytest.approx(1.0)


def test_self_check_refuses_replay_with_positions_of_text(policy, batch, rollout, monkeypatch):
    monkeypatch.setattr(policy_module, "generated_positions", text_positions)

    with pytest.raises(SelfCheckError, match="differ: "):
        check_replay(policy, batch, rollout, rows=6)


def test_self_check_refuses_another_temperature(policy, batch, rollout, monkeypatch):
    monkeypatch.setattr(policy.network, "temperature", 0.9)

    with pytest.raises(SelfCheckError, match="mean ratio"):
        check_replay(policy, batch, rollout, rows=6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda ids, log_probs: (ids[..., :-1], log_probs[..., :-1]), "271 tokens.* 272"),
        (lambda ids, log_probs: (ids.clamp(max=510) + 2, log_probs), "512 entries"),
        (lambda ids, log_probs: (ids, log_probs * torch.nan), "nan nats"),
    ],
    ids=["a short grid", "ids outside the codebook", "log-probs that are no numbers"],
)
def test_self_check_refuses_a_rollout_that_is_none(policy, batch, rollout, change, said):
    token_ids, log_probs = change(rollout.token_ids, rollout.log_probs)
    changed = dataclasses.replace(rollout, token_ids=token_ids, log_probs=log_probs)

    with pytest.raises(SelfCheckError, match=said):
        check_replay(policy, batch, changed, rows=6)


@pytest.fixture(scope="module")
def deep_janus():
    """As many layers as Janus-Pro-1B has, in bf16."""
    return JanusPro(build_model(layers=24, width=128).to(torch.bfloat16), build_processor())


@pytest.fixture
def deep_policy(deep_janus, build_janus_policy):
    """With guidance, as published."""
    parts = JanusPro(copy.deepcopy(deep_janus.model), deep_janus.processor)
    return build_janus_policy(parts, adapter_rank=4)


def test_rounding_at_full_depth_is_measured_and_not_refused(deep_policy, janus_batch):
    # A bound of 5e-2 nats, right for few layers in bf16, would refuse a model without a fault.
    rollout = deep_policy.sample(janus_batch)

    report = check_replay(deep_policy, janus_batch, rollout, rows=9)

    assert report.mean_gap > 5e-2
    assert 0.9 < report.effective_sample_size < 0.99


def test_half_precision_is_refused_where_few_tokens_would_count(deep_policy, janus_batch):
    rollout = deep_policy.sample(janus_batch)
    noise = torch.randn(rollout.log_probs.shape, generator=torch.Generator().manual_seed(0))
    # Weights exp(1.2 z) have an effective sample size of exp(-1.44) = 0.24.
    off = dataclasses.replace(rollout, log_probs=rollout.log_probs + 1.2 * noise)

    with pytest.raises(SelfCheckError, match="bfloat16.*model.dtype=float32.*=float16"):
        check_replay(deep_policy, janus_batch, off, rows=9)


@pytest.fixture(params=["GLM-Image", "GLM-Image, in full", "Janus-Pro", "Janus-Pro, unguided"])
def half(request, small_preview, random_pipeline, build_policy, deep_janus, build_janus_policy):
    """A policy in bf16, and whether it is a GLM-Image."""
    adapter_rank = None if "full" in request.param else 4
    if request.param.startswith("GLM-Image"):
        random_pipeline.vision_language_encoder.to(torch.bfloat16)
        return build_policy(random_pipeline, adapter_rank=adapter_rank), True
    parts = JanusPro(copy.deepcopy(deep_janus.model), deep_janus.processor)
    scale = 1.0 if "unguided" in request.param else 5.0
    policy = build_janus_policy(parts, guidance_scale=scale, adapter_rank=4)
    return policy, False


def test_first_layers_in_float32_show_that_the_code_path_is_exact(half, batch, janus_batch):
    policy, is_glm_image = half
    used = batch if is_glm_image else janus_batch
    before = {name: tensor.clone() for name, tensor in policy.state_tensors().items()}
    depth = len(policy.network.language_model.layers)

    found = check_code_path(models_of(policy), used)

    assert re.search(rf"first {CHECKED_LAYERS} layers.* float32.*sample size 1\.000", found)
    # The policy itself is as it was.
    assert policy.dtype == torch.bfloat16
    assert len(policy.network.language_model.layers) == depth
    assert policy.network.language_model.config.num_hidden_layers == depth
    for name, tensor in policy.state_tensors().items():
        assert torch.equal(tensor, before[name])


def test_first_layers_have_the_faults_of_the_policy(half, batch, janus_batch, monkeypatch):
    policy, is_glm_image = half
    if is_glm_image:
        monkeypatch.setattr(policy_module, "generated_positions", text_positions)
    else:
        # Replay alone.
        monkeypatch.setattr(
            JanusNetwork, "logits", lambda network, states: 1.1 * network_logits(network, states)
        )

    with pytest.raises(SelfCheckError, match="first 2 layers"):
        check_code_path(models_of(policy), batch if is_glm_image else janus_batch)


network_logits = JanusNetwork.logits


def test_adapters_take_part_in_the_check_of_the_first_layers(deep_policy):
    # New adapters change nothing: their second factors are 0.
    first = deep_policy.first_layers(1)
    up = [tensor for name, tensor in first.state_tensors().items() if "lora_B" in name]
    assert len(up) == 7
    assert all(tensor.any() for tensor in up)
    assert not any(
        tensor.any() for name, tensor in deep_policy.state_tensors().items() if "lora_B" in name
    )


def test_float32_is_checked_at_full_depth_alone(make_janus_policy, janus_batch, monkeypatch):
    policy = make_janus_policy()
    copied = []
    monkeypatch.setattr(type(policy), "first_layers", lambda *given: copied.append(given))
    assert check_code_path(models_of(policy), janus_batch) == ""
    assert copied == []
