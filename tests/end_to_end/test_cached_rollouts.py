"""The cache of rollouts, which must not give what other weights or settings would not sample."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from glm_grpo.models.glm_image.policy import GlmImagePolicy
from tests.cached_rollouts import cached_sampling


@pytest.fixture
def samplings(monkeypatch):
    """Steps of the policy that were sampled, and not read."""
    samplings = []

    def sample(policy, batch, *, policy_step, count=None):
        samplings.append(policy_step)
        return len(samplings)

    monkeypatch.setattr(GlmImagePolicy, "sample", sample)
    return samplings


def test_only_equal_weights_settings_and_prompts_are_read(make_trainer, samplings, tmp_path):
    trainer, models, _ = make_trainer("model.adapter={rank: 4, alpha: 8.0}")
    policy = models.policy
    batch = trainer.source.batch_for_step(0)
    sample = cached_sampling(tmp_path / "cache")
    assert sample(policy, batch, policy_step=1, count=print) == 1
    assert sample(policy, batch, policy_step=1, count=repr) == 1
    assert samplings == [1]

    sample(policy, batch, policy_step=2)
    sample(policy, dataclasses.replace(batch, seed=batch.seed + 1), policy_step=1)
    sample(policy, trainer.source.batch_for_step(1), policy_step=1)
    policy.network.temperature = 0.9
    sample(policy, batch, policy_step=1)
    policy.network.temperature = 1.0
    layer = next(module for module in policy.model.modules() if hasattr(module, "lora_B"))
    (name,) = layer.scaling
    layer.scaling[name] *= 2
    sample(policy, batch, policy_step=1)
    layer.scaling[name] /= 2
    assert sample(policy, batch, policy_step=1) == 1
    # Trained weights, and those that are not.
    for weight in (layer.lora_B[name].weight, layer.get_base_layer().weight):
        with torch.no_grad():
            weight[0, 0] += 1e-2
        sample(policy, batch, policy_step=1)
    assert len(samplings) == 8
