"""Sampling and truncation."""

from __future__ import annotations

import pytest
import torch

from glm_grpo.models import sampling
from glm_grpo.models.sampling import Truncation, pick_tokens, truncation_mask
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


def test_each_prompt_has_random_numbers_of_its_own_that_no_neighbour_changes():
    prompts = (Prompt("a", "a sign"), Prompt("b", "a sign"))
    both = sampling.draw_uniforms(PromptBatch(prompts, 2, 32, 32, seed=0, decode_seeds=(0, 1)), 3)
    alone = sampling.draw_uniforms(
        PromptBatch(prompts[1:], 2, 32, 32, seed=0, decode_seeds=(1,)), 3
    )
    assert torch.equal(both[2:], alone)
    assert not torch.equal(both[:2], both[2:])
