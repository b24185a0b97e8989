"""The self-check passes on a sound model and names what is wrong with an unsound one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from glm_grpo.errors import SelfCheckError
from glm_grpo.models.glm_image import policy as policy_module
from glm_grpo.training.replay_check import check_replay


@pytest.fixture
def experience(batch, rollout, as_experience):
    return as_experience(batch, rollout)


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


def test_self_check_refuses_another_temperature(policy, experience, monkeypatch):
    monkeypatch.setattr(policy.network, "temperature", 0.9)

    with pytest.raises(SelfCheckError, match="mean ratio"):
        check_replay(policy, experience, rows=6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda ids, log_probs: (ids[..., :-1], log_probs[..., :-1]), "271 tokens; .* need 272"),
        (lambda ids, log_probs: (ids.clamp(max=510) + 2, log_probs), "512 entries"),
        (lambda ids, log_probs: (ids, log_probs * torch.nan), "nan nats"),
    ],
    ids=["a short grid", "ids outside the codebook", "log-probs that are no numbers"],
)
def test_self_check_refuses_a_rollout_that_is_none(policy, experience, change, said):
    token_ids, log_probs = change(experience.rollout.token_ids, experience.rollout.log_probs)
    changed = dataclasses.replace(experience.rollout, token_ids=token_ids, log_probs=log_probs)

    with pytest.raises(SelfCheckError, match=said):
        check_replay(policy, dataclasses.replace(experience, rollout=changed), rows=6)
