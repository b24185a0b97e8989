"""A reference that follows the policy, with adapters and with full parameters."""

from __future__ import annotations

import pytest
import torch

ROWS = torch.arange(3)


@pytest.fixture(params=[None, 4], ids=["full", "adapters"])
def moved(request, make_policy, batch, small_preview):
    """A policy that has moved, and what it drew before."""
    policy = make_policy(adapter_rank=request.param, needs_reference=True)
    rollout = policy.sample(batch)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return policy, rollout


def of_policy(policy, batch, rollout):
    with torch.no_grad():
        return policy.replay(batch, rollout, ROWS).log_probs


def test_reference_becomes_the_policy_with_a_mix_of_1(moved, batch):
    policy, rollout = moved
    own = of_policy(policy, batch, rollout)
    before = policy.reference_log_probs(batch, rollout, ROWS)
    assert (before - own).abs().max() > 1e-3
    assert policy.reference_tensors() == {}

    policy.mix_reference(1.0)

    torch.testing.assert_close(policy.reference_log_probs(batch, rollout, ROWS), own)
    # The policy is what it was, to the bit, and the reference stays when it moves on.
    assert of_policy(policy, batch, rollout).equal(own)
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight *= 1.1
    torch.testing.assert_close(policy.reference_log_probs(batch, rollout, ROWS), own)


def test_policy_is_its_reference_until_it_moves_and_where_the_reference_follows(moved):
    policy, _ = moved
    assert not policy.is_reference()
    policy.mix_reference(1.0)
    assert policy.is_reference()
    with torch.no_grad():
        policy.trainable_parameters()[-1][-1, -1] += 1e-3
    assert not policy.is_reference()


def test_mix_is_that_of_the_weights(moved):
    policy, _ = moved
    policy.mix_reference(0.5)
    first = {name: value.clone() for name, value in policy.reference_tensors().items()}
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight += 1.0
    policy.mix_reference(0.25)
    for name, value in policy.state_tensors().items():
        expected = 0.75 * first[name] + 0.25 * value
        torch.testing.assert_close(policy.reference_tensors()[name], expected)


def test_stored_reference_is_put_back(moved, batch):
    policy, rollout = moved
    policy.mix_reference(0.5)
    stored = {name: value.clone() for name, value in policy.reference_tensors().items()}
    expected = policy.reference_log_probs(batch, rollout, ROWS)
    policy.mix_reference(1.0)
    assert not policy.reference_log_probs(batch, rollout, ROWS).equal(expected)

    policy.load_reference_tensors(stored)

    assert policy.reference_log_probs(batch, rollout, ROWS).equal(expected)
