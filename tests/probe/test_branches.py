"""What the preview decides: the share of variance, and branches of real previews."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from glm_grpo.builders.models import build_models
from glm_grpo.builders.prompts import build_batch, build_prompts
from glm_grpo.builders.settings import collect_settings
from glm_grpo.config import compose_config
from glm_grpo.errors import ConfigError
from glm_grpo.models.glm_image.token_grid import token_layout
from glm_grpo.probe.branches import preview_share, score_branches
from glm_grpo.probe.command import probe_config
from glm_grpo.probe.page import list_figures
from glm_grpo.probe.probe import report_probe, sample_probe

CONFIG_DIR = Path(__file__).parents[2] / "configs"
SMALL = (
    "rollout.prompts_per_step=2",
    "rollout.group_size=3",
    "train.micro_batch_size=3",
    "reward.terms.lpips=null",
    "reward.terms.ocr=null",
    "reward.terms.aesthetic=null",
)


def made_scores(between: float, inside: float, *, prompts: int = 400, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    previews = torch.randn(prompts, 6, 1, generator=generator, dtype=torch.float64)
    targets = torch.randn(prompts, 6, 3, generator=generator, dtype=torch.float64)
    of_prompts = torch.randn(prompts, 1, 1, generator=generator, dtype=torch.float64)
    return 10 * of_prompts + between**0.5 * previews + inside**0.5 * targets


@pytest.mark.parametrize(("between", "inside"), [(0.7, 0.3), (0.2, 0.8), (0.0, 1.0), (1.0, 0.0)])
def test_the_share_is_that_of_the_variance_that_previews_make(between, inside):
    found = preview_share(made_scores(between, inside))
    assert found.share == pytest.approx(between, abs=0.04)
    assert found.low <= found.share <= found.high
    assert found.high - found.low < 0.12


def test_the_share_of_a_small_table_is_that_computed_by_hand():
    # Means of previews 2 and 6, of all 4: MSB = 2 * (4 + 4) / 1 = 16; MSW = (2 + 8) / 2 = 5.
    scores = torch.tensor([[[1.0, 3.0], [4.0, 8.0]]], dtype=torch.float64)
    found = preview_share(scores)
    assert found.share == pytest.approx((16 - 5) / (16 + 5))
    assert math.isnan(found.low)


def test_scores_that_do_not_vary_have_no_share():
    assert math.isnan(preview_share(torch.ones(3, 2, 2, dtype=torch.float64)).share)
    assert math.isnan(preview_share(torch.ones(0, 2, 2, dtype=torch.float64)).share)


@pytest.fixture(scope="module")
def tiny():
    """Config, models and a batch."""
    config = compose_config(CONFIG_DIR, "tiny", list(SMALL))
    models = build_models(config, Accelerator().device, needs_reference=False)
    return config, models, build_batch(config, build_prompts(config).training, 0)


def test_images_that_begin_with_given_tokens_have_those_and_others_after_them(tiny):
    _, models, batch = tiny
    first = models.policy.sample(batch, policy_step=0)
    n = token_layout(batch.height, batch.width).num_preview
    given = first.token_ids.flip(1)[..., :n]
    second = models.policy.sample(batch, policy_step=0, first_tokens=given)
    assert torch.equal(second.token_ids[..., :n], given)
    assert not torch.equal(second.token_ids[..., n:], first.token_ids[..., n:])
    # Their log-probabilities are those of the policy all the same.
    rows = torch.arange(6)
    replay = models.policy.replay(batch, second, rows).log_probs.detach()
    torch.testing.assert_close(replay, second.log_probs.flatten(0, 1), atol=1e-4, rtol=0)
    same = models.policy.sample(batch, policy_step=0, first_tokens=first.token_ids[..., :n])
    assert torch.equal(same.token_ids, first.token_ids)


def test_branches_are_scored_beside_the_image_they_begin_with(tiny):
    config, models, batch = tiny
    settings = collect_settings(config)
    samples = sample_probe(models, [batch], settings, noises=2, branches=3)
    assert samples.branches.shape == (2, 3, 3, 1)
    assert torch.equal(samples.branches[:, :, 0], samples.rewards.raw)
    report = report_probe(samples, mode="weighted_sum", shares=None, min_rank_correlation=0.9)
    listing = list_figures(report)[-1]
    assert listing.title == "what the preview decides"
    assert [row[0] for row in listing.rows] == ["ssim", "total"]
    # One term is the total.
    assert listing.rows[0][1:] == listing.rows[1][1:]
    again = score_branches(
        models,
        batch,
        models.policy.sample(batch, policy_step=0).token_ids,
        samples.rewards,
        branches=3,
    )
    assert torch.equal(again, samples.branches)


def test_edits_have_no_branches(tmp_path):
    config = compose_config(CONFIG_DIR, "tiny_edit", [])
    with pytest.raises(ConfigError, match=r"--branches 2: edits .* have no preview"):
        probe_config(
            config, num_prompts=1, noises=2, branches=2, shares={}, directory=tmp_path / "probe"
        )
