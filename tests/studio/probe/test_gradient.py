"""Gradients with credit by image and by place, of a policy that is a table of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from glm_grpo.commands.probe import has_credit_by_place
from glm_grpo.config import Config, compose_config
from glm_grpo.errors import ConfigError, NonFiniteError
from glm_grpo.grpo.credit import TokenPlaces, token_places
from glm_grpo.grpo.signal_to_noise import Agreement, Signal, compare_signals, measure_agreement
from glm_grpo.grpo.update import policy_gradient
from glm_grpo.models.offload import Offload
from glm_grpo.studio.probe.gradient import (
    GradientProbe,
    ProbedGradient,
    check_batches,
    check_memory,
    credits_compared,
    gradient_bytes,
    with_advantage,
)
from glm_grpo.training.collect import with_advantages
from glm_grpo.training.models import Models
from glm_grpo.types import Experience, Rollout
from rewards.score import Scorer, Term
from rewards.score_map import Grid
from rewards.types import Prompt, RewardTable
from tests.factories import NoDecoder, NoPolicy, advantage_settings, clipped_loss, tiny_config
from tests.grpo.table_policy import FLAT, TablePolicy, make_experience, make_logits, score

CONFIG_DIR = Path(__file__).parents[3] / "configs"
WEIGHTS = (0.0, 0.5, 1.0)
CONFIG = tiny_config(
    "train.micro_batch_size=10",
    "reward.combine=weighted_sum",
    advantage=advantage_settings(credit="place", reward_to_go=0.5),
    loss=clipped_loss(),
)
PROMPTS, GROUP = 3, 4


class PlacedPolicy(TablePolicy, NoPolicy):
    """Draws its four tokens, one a place."""

    def token_places(self, *_: Any, **__: Any) -> TokenPlaces:
        return token_places((Grid(2, 2),), Grid(2, 2))


class Plain:
    """A term that is never asked for scores."""

    def applies_to(self, prompt: Prompt) -> bool:
        return True

    def score(self, prompts: Sequence[Prompt], pixels: Tensor) -> Tensor:
        raise NotImplementedError

    def modules(self) -> tuple[nn.Module, ...]:
        return ()


def make_models() -> Models:
    scorer = Scorer([Term("only", Plain(), 1.0)])
    return Models(PlacedPolicy(make_logits()), NoDecoder(), scorer, Offload({}))


def draw(logits: Tensor, seed: int) -> Experience:
    """Every place earns 1 for a token of the lower half of the codebook, whatever the others."""
    generator = torch.Generator().manual_seed(seed)
    probabilities = logits.softmax(-1)
    token_ids = torch.multinomial(probabilities, PROMPTS * GROUP, True, generator=generator)
    token_ids = token_ids.T.reshape(PROMPTS, GROUP, 4)
    earned = (token_ids < 2).float()
    totals = earned.sum(dim=-1)
    return replace(
        make_experience(logits, FLAT),
        rollout=Rollout(token_ids, score(logits, token_ids), None),
        scores=RewardTable(
            names=("only",),
            raw=totals[..., None],
            is_applicable=torch.ones(PROMPTS, 1, dtype=torch.bool),
            weights=torch.ones(1),
            std_floors=torch.ones(1),
            score_map={"only": earned.view(PROMPTS, GROUP, 2, 2)},
        ),
        totals=totals,
        penalties=torch.zeros_like(totals),
        advantages=torch.zeros_like(totals)[..., None],
    )


def test_gradients_of_the_same_experience_are_compared_in_all_ways() -> None:
    models, logits = make_models(), make_logits()
    probe = GradientProbe(models, CONFIG, WEIGHTS)
    gradients: list[list[Tensor]] = [[] for _ in range(4)]
    for seed in range(5):
        assert probe.report() is None or seed >= 3
        experience = draw(logits, seed)
        probe.add(experience)
        for row, changes in zip(
            gradients,
            [{"credit": "image"}, *({"credit": "place", "reward_to_go": each} for each in WEIGHTS)],
            strict=True,
        ):
            config = with_advantage(CONFIG, **cast(Any, changes))
            places = (
                token_places((Grid(2, 2),), Grid(2, 2)) if changes["credit"] == "place" else None
            )
            credited = with_advantages(experience, config, places)
            (found,) = policy_gradient(models.policy, credited, config.loss, config.train)
            row.append(found.flatten().double())
    every = torch.stack([torch.stack(row) for row in gradients])
    expected = compare_signals(torch.einsum("aix,bjx->abij", every, every))
    report = probe.report()
    assert report is not None
    for found, wanted in zip([report.by_image, *report.by_place.values()], expected, strict=True):
        assert vars(found) == pytest.approx(vars(wanted), rel=1e-5, nan_ok=True)
    assert (*report.by_place,) == WEIGHTS
    assert (report.batches, report.prompts) == (5, PROMPTS)
    # The config trains by place, with reward_to_go 0.5: the third way.
    trained = torch.stack(gradients[2])
    assert vars(report.agreement) == pytest.approx(
        vars(measure_agreement(trained @ trained.T)), rel=1e-4
    )


def test_places_that_do_not_depend_on_each_other_have_a_clearer_gradient() -> None:
    probe = GradientProbe(make_models(), CONFIG, WEIGHTS)
    for seed in range(20):
        probe.add(draw(make_logits(), seed))
    report = probe.report()
    assert report is not None
    own, half, to_go = report.by_place.values()
    # An image's credit has the noise of four places, its own place that of one; what follows, of
    # one to four.
    assert own.low > 1.5
    assert own.relative > half.relative > to_go.relative > 1
    # Nothing else is learned.
    assert own.cosine == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("has_learned", "cosine", "low", "expected"),
    [
        (True, 0.9, 1.2, "advantage.credit=place advantage.reward_to_go=0.4"),
        (True, 0.9, 0.8, "keep advantage.credit=image"),
        # Of boxes by place where things stand anywhere, and the clearest of all.
        (True, -0.35, 4.0, "points elsewhere"),
        (False, -0.35, 4.0, "points elsewhere"),
        (False, 0.76, 4.0, "model.start_from"),
        (True, math.nan, math.nan, "too noisy"),
    ],
)
def test_the_cosine_decides_however_clear_the_gradient_is(
    has_learned: bool, cosine: float, low: float, expected: str
) -> None:
    signal = Signal(1.0, 2.0, low, 5.0, cosine, 1.2)
    same = Signal(0.5, 1.0, 1.0, 1.0, 1.0, 1.0)
    agreement = Agreement(0.5, 0.1, 0.9, 0.001)
    found = ProbedGradient(
        agreement, same, {0.4: signal}, batches=8, prompts=8, has_learned=has_learned
    )
    assert expected in found.verdict()


def test_a_gradient_that_is_not_finite_is_refused_and_an_interrupted_batch_does_not_count() -> None:
    models = make_models()
    probe = GradientProbe(models, CONFIG, WEIGHTS)
    for seed in range(3):
        probe.add(draw(make_logits(), seed))
    before = probe.report()
    with torch.no_grad():
        cast(Any, models.policy).logits[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="batch 4 "):
        probe.add(draw(make_logits(), 3))
    assert probe.report() == before


def test_credits_compared_are_those_of_the_config_reward_to_go_and_those_asked_for() -> None:
    assert credits_compared(0.2, ()) == (0.2, 1.0)
    assert credits_compared(1.0, (0.4, 0.0, 0.4)) == (0.0, 0.4, 1.0)


def test_gradients_may_take_half_of_the_free_memory() -> None:
    # By image and in two ways by place, of 4 tokens x 5 codes in float32, for 6 batches.
    needed = gradient_bytes(PlacedPolicy(make_logits()), batches=6, weights=(0.2, 1.0))
    assert needed == 6 * 3 * 20 * 4
    check_memory(needed, 2 * needed, batches=6)
    check_memory(needed, None, batches=6)
    told = r" 6 batches .*1\.44 KB.* half of the 1\.44 KB .*--prompts to 3 x"
    with pytest.raises(ConfigError, match=told):
        check_memory(needed, needed, batches=6)
    # Two batches would fit, but a probe needs three.
    with pytest.raises(ConfigError, match="model.adapter") as refused:
        check_memory(needed, needed - 1, batches=6)
    assert "--prompts" not in str(refused.value)


def config_of(*overrides: str) -> Config:
    return compose_config(CONFIG_DIR, "tiny", [*overrides])


def test_a_loss_that_learns_by_image_is_not_compared() -> None:
    assert not has_credit_by_place(config_of("loss=gmpo", "advantage.credit=image"), [])


def test_too_few_whole_batches_are_refused() -> None:
    told = r" 2 of rollout\.prompts_per_step = 8: .* 3.* --prompts 24 "
    with pytest.raises(ConfigError, match=told):
        check_batches(2, 8)
    check_batches(3, 8)


@pytest.mark.parametrize(
    ("has_target", "overrides", "is_compared"),
    [
        (True, (), True),
        (False, (), False),
        (True, ("lpips=0", "ssim=0", "psnr=1"), True),
        (True, ("lpips=0", "ssim=0", "psnr=0"), False),
        # Nobody knows what a function says.
        (False, ("+reward.terms.own={kind: custom, function: a:b, weight: 1}",), True),
    ],
)
def test_without_a_weighted_term_that_may_have_parts_nothing_is_compared(
    has_target: bool,
    overrides: tuple[str, ...],
    is_compared: bool,
) -> None:
    psnr = "+reward.terms.psnr={kind: psnr, weight: 0}"
    config = config_of("rollout.prompts_per_step=2", psnr, *overrides)
    batch = draw(make_logits(), 0).prompts
    target = torch.zeros(3, 32, 32, dtype=torch.uint8) if has_target else None
    batch = replace(batch, prompts=(replace(batch.prompts[0], target=target),) * 2)
    assert has_credit_by_place(config, [batch] * 3) == is_compared


def test_without_places_only_the_gradient_by_image_is_measured() -> None:
    # A function may have places, but returned none; or none was asked for.
    alone, unplaced = (GradientProbe(make_models(), CONFIG, each) for each in ((), WEIGHTS))
    assert (alone.credit, unplaced.credit) == ("image", "place")
    for seed in range(4):
        experience = draw(make_logits(), seed)
        alone.add(experience)
        scores = replace(experience.scores, score_map={})
        unplaced.add(replace(experience, scores=scores))
    report = alone.report()
    assert report is not None
    assert (report.by_place, report.batches) == ({}, 4)
    assert report.agreement.ratio == pytest.approx(report.by_image.ratio)
    # One gradient serves for all ways.
    assert unplaced.report() == report
