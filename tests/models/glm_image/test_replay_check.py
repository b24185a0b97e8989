"""The self-check passes on a sound model and names what is wrong with an unsound one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from glm_grpo.errors import SelfCheckError
from glm_grpo.models.glm_image import policy as policy_module
from glm_grpo.training.replay_check import check_replay


@pytest.fixture
def policy(make_policy):
    return make_policy()


@pytest.fixture
def experience(policy, batch, as_experience):
    return as_experience(batch, policy.sample(batch, policy_step=0))


def test_self_check_passes_on_policy(policy, experience):
    report = check_replay(policy, experience, rows=6)

    assert report.mean_gap < 1e-5
    assert report.mean_ratio == pytest.approx(1.0, abs=1e-5)


def test_self_check_refuses_replay_with_positions_of_text(policy, experience, monkeypatch):
    def text_positions(layout, first_position):
        return first_position + torch.arange(layout.num_tokens).expand(3, -1)

    monkeypatch.setattr(policy_module, "generated_positions", text_positions)

    with pytest.raises(SelfCheckError, match="differ by"):
        check_replay(policy, experience, rows=6)


def test_self_check_refuses_another_temperature(policy, experience):
    policy.network.temperature = 0.9

    with pytest.raises(SelfCheckError, match="mean ratio"):
        check_replay(policy, experience, rows=6)


def test_self_check_refuses_a_short_grid(policy, experience):
    short = dataclasses.replace(
        experience.rollout,
        token_ids=experience.rollout.token_ids[..., :-1],
        log_probs=experience.rollout.log_probs[..., :-1],
    )

    with pytest.raises(SelfCheckError, match="271 tokens; .* need 272"):
        check_replay(policy, dataclasses.replace(experience, rollout=short), rows=6)


def test_self_check_refuses_ids_outside_the_codebook(policy, experience):
    token_ids = experience.rollout.token_ids.clone()
    token_ids[0, 0, 0] = 512
    rollout = dataclasses.replace(experience.rollout, token_ids=token_ids)

    with pytest.raises(SelfCheckError, match="512 entries"):
        check_replay(policy, dataclasses.replace(experience, rollout=rollout), rows=6)


def test_self_check_refuses_log_probs_that_are_not_numbers(policy, experience):
    log_probs = experience.rollout.log_probs * torch.nan
    rollout = dataclasses.replace(experience.rollout, log_probs=log_probs)

    with pytest.raises(SelfCheckError):
        check_replay(policy, dataclasses.replace(experience, rollout=rollout), rows=6)
