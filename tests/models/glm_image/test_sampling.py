"""Drawing, truncation, and that what is recorded is what was drawn."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from glm_grpo.errors import NonFiniteError
from glm_grpo.models import drawing
from glm_grpo.models.drawing import Truncation, pick_tokens, truncation_mask
from glm_grpo.models.glm_image import sampling
from glm_grpo.types import PromptBatch
from rewards.types import Prompt


def test_draw_takes_the_entry_whose_interval_holds_the_number():
    # Intervals none, [0, .2), none, [.2, .7), [.7, 1): what has no probability is never drawn.
    log_probs = torch.tensor([[0.0, 0.2, 0.0, 0.5, 0.3]]).log().expand(6, -1)
    numbers = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, 1 - 1e-12], dtype=torch.float64)

    assert pick_tokens(log_probs, numbers).tolist() == [1, 1, 3, 3, 4, 4]


def test_draw_follows_the_distribution():
    probabilities = torch.tensor([0.1, 0.6, 0.3])
    numbers = torch.rand(20000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    sampled = pick_tokens(probabilities.log().expand(20000, -1), numbers)

    shares = torch.bincount(sampled, minlength=3) / 20000
    # Three standard deviations of a share are at most 3 * sqrt(.25 / 20000) = 0.011.
    assert torch.allclose(shares, probabilities, atol=0.011)


def test_draw_from_what_is_no_distribution_stays_in_range():
    # An index out of range is a failed assertion on an accelerator, which ends all work on it.
    log_probs = torch.full((3, 4), torch.nan)
    log_probs[1:] = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    log_probs[1, 2] = torch.nan
    numbers = torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64)

    sampled = pick_tokens(log_probs, numbers)

    assert sampled.min() >= 0
    assert sampled.max() <= 3
    # The sums of the last row are .1, .3, .6: what stands beside it changes nothing.
    assert sampled[2] == 2


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        (Truncation(top_k=1), [False, True, False, False]),
        # Most probable first: .4, .3, .2, .1; sums before each are 0, .4, .7, .9.
        (Truncation(top_p=0.65), [False, True, True, False]),
        (Truncation(top_p=0.75), [True, True, True, False]),
        # Inside the two most probable, the first alone has .4 / .7 = .57 of the mass.
        (Truncation(top_k=2, top_p=0.5), [False, True, False, False]),
        (Truncation(top_k=2, top_p=0.6), [False, True, True, False]),
        # Least probability .4 * .45 = .18, then .4 * .6 = .24.
        (Truncation(min_p=0.45), [True, True, True, False]),
        (Truncation(min_p=0.6), [False, True, True, False]),
        (Truncation(top_k=1, min_p=0.1), [False, True, False, False]),
    ],
)
def test_truncation_mask_follows_top_k_then_top_p_then_min_p(truncation, kept):
    logits = torch.tensor([[0.2, 0.4, 0.3, 0.1]]).log()

    assert truncation_mask(logits, truncation).tolist() == [kept]


@pytest.mark.parametrize(
    ("truncation", "is_active"),
    [
        (Truncation(), False),
        (Truncation(top_p=1.0), False),
        (Truncation(top_k=5), True),
        (Truncation(min_p=0.1), True),
    ],
)
def test_truncation_is_active_only_where_something_is_cut(truncation, is_active):
    assert truncation.is_active is is_active


def test_sample_gives_full_grids_inside_the_codebook(rollout):
    assert rollout.token_ids.shape == (2, 3, 256 + 16)
    assert 0 <= int(rollout.token_ids.min()) <= int(rollout.token_ids.max()) < 512
    assert rollout.sampling_mask is None


def test_logits_that_are_not_finite_draw_no_token(make_policy, batch, small_preview):
    policy = make_policy()
    with torch.no_grad():
        policy.model.model.language_model.norm.weight[3] = torch.nan

    with pytest.raises(NonFiniteError, match="rollout: .* token 0 of prompt .*, sample 0 is nan"):
        policy.sample(batch)


def test_sample_is_a_function_of_the_seed(policy, batch, small_preview):
    first = policy.sample(batch)
    again = policy.sample(batch)
    other = policy.sample(dataclasses.replace(batch, seed=12))

    assert torch.equal(first.token_ids, again.token_ids)
    assert torch.equal(first.log_probs, again.log_probs)
    assert not torch.equal(first.token_ids, other.token_ids)


def test_sample_of_a_prompt_does_not_depend_on_its_neighbours(policy, batch, small_preview):
    together = policy.sample(batch)
    alone = dataclasses.replace(batch, prompts=batch.prompts[1:], decode_seeds=(6,))

    single = policy.sample(alone)

    assert torch.equal(single.token_ids[0], together.token_ids[1])
    assert torch.allclose(single.log_probs[0], together.log_probs[1], atol=1e-4)


def test_samples_of_a_group_differ(rollout):
    assert not torch.equal(rollout.token_ids[0, 0], rollout.token_ids[0, 1])


def test_truncated_tokens_lie_in_the_kept_set(make_policy, batch, small_preview):
    rollout = make_policy(truncation=Truncation(top_k=7)).sample(batch)

    assert rollout.sampling_mask is not None
    assert (rollout.sampling_mask.sum(-1) == 7).all()
    assert rollout.sampling_mask.gather(-1, rollout.token_ids.unsqueeze(-1)).all()


def test_sample_returns_tensors_that_autograd_takes(make_policy, batch, small_preview):
    rollout = make_policy(truncation=Truncation(top_k=3)).sample(batch)

    factor = torch.ones((), requires_grad=True)
    (rollout.log_probs * factor).sum().backward()

    assert factor.grad == rollout.log_probs.sum()
    assert not any(
        part.is_inference()
        for part in (rollout.token_ids, rollout.log_probs, rollout.sampling_mask)
    )


def test_prompts_read_one_at_a_time_are_those_read_at_once(
    policy, batch, monkeypatch, small_preview
):
    expected = policy.sample(batch)
    monkeypatch.setattr(sampling, "PREFILLED_AT_ONCE", 1)

    found = policy.sample(batch)

    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.allclose(found.log_probs, expected.log_probs, atol=1e-5)


def test_each_prompt_has_random_numbers_of_its_own_that_no_neighbour_changes():
    prompts = (Prompt("a", "a sign"), Prompt("b", "a sign"))
    both = drawing.draw_uniforms(PromptBatch(prompts, 2, 32, 32, seed=0, decode_seeds=(0, 1)), 3)
    alone = drawing.draw_uniforms(PromptBatch(prompts[1:], 2, 32, 32, seed=0, decode_seeds=(1,)), 3)
    assert torch.equal(both[2:], alone)
    assert not torch.equal(both[:2], both[2:])
