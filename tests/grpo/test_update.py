"""Updates of a policy that is nothing but a table of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glm_grpo.grpo.learning_rate import LearningRate
from glm_grpo.grpo.losses import LossInputs, grpo_loss
from glm_grpo.grpo.policy import Replay
from glm_grpo.grpo.strategy import Strategy
from glm_grpo.grpo.update import (
    Learner,
    UpdateReport,
    policy_gradient,
    update_on_targets,
    update_policy,
)
from glm_grpo.types import Experience, PromptBatch, Rollout, TargetTokens
from rewards.types import Prompt
from tests.factories import UpdateSections, changed
from tests.grpo.table_policy import (
    ADVANTAGES,
    CODEBOOK,
    FLAT,
    GROUP,
    PROMPTS,
    SETTINGS,
    TOKENS,
    TablePolicy,
    learn,
    make_experience,
    make_learner,
    make_logits,
)


def move_of(
    advantages: Tensor, settings: UpdateSections = SETTINGS, *, max_grad_norm: float = math.inf
) -> Tensor:
    """What one step of plain gradient descent at rate 1 changes: minus the gradient."""
    logits = make_logits()
    policy = TablePolicy(logits)
    experience = make_experience(logits, advantages, reference=make_logits(seed=5))
    learn(policy, experience, settings, learning_rate=1.0, max_grad_norm=max_grad_norm)
    return policy.logits.detach() - logits


def test_update_policy_moves_along_the_policy_gradient() -> None:
    # On-policy the gradient of the loss is -mean(advantage * (onehot - softmax)).
    experience = make_experience(make_logits(), ADVANTAGES)
    onehot = nn.functional.one_hot(experience.rollout.token_ids, CODEBOOK).float()
    score = onehot - make_logits().softmax(-1)
    expected = (ADVANTAGES[..., None, None] * score).sum((0, 1)) / (PROMPTS * GROUP * TOKENS)
    torch.testing.assert_close(move_of(ADVANTAGES), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("micro_batch_size", [1, 4, 100])
def test_update_policy_micro_batches_give_the_gradient_of_the_whole_batch(
    micro_batch_size: int,
) -> None:
    # 4 does not divide 6: the last, smaller micro-batch must weigh less.
    settings = changed(SETTINGS, kl_coef=0.3, kl_behaviour_coef=0.2)
    whole = move_of(ADVANTAGES, settings)
    parts = move_of(ADVANTAGES, changed(settings, micro_batch_size=micro_batch_size))
    assert whole.abs().max() > 0.01
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=0)


def test_update_policy_reports_the_same_for_any_micro_batch_size() -> None:
    settings = changed(SETTINGS, kl_coef=0.3, kl_behaviour_coef=0.2, epochs_per_rollout=2)
    logits = make_logits()
    experience = make_experience(logits, ADVANTAGES, reference=make_logits(seed=5))

    def reports(micro_batch_size: int) -> list[UpdateReport]:
        parts = changed(settings, micro_batch_size=micro_batch_size)
        return learn(TablePolicy(logits), experience, parts, 2.0)

    for whole, parts in zip(reports(6), reports(4), strict=True):
        assert parts.metrics == pytest.approx(whole.metrics, abs=1e-6, nan_ok=True)


def test_update_policy_on_policy_report() -> None:
    logits = make_logits()
    (report,) = learn(
        TablePolicy(logits), make_experience(logits, ADVANTAGES), SETTINGS, learning_rate=0.25
    )
    # Policy loss is minus the mean advantage, and advantages sum to 0.
    assert report.metrics["loss/policy"] == pytest.approx(0.0, abs=1e-7)
    assert report.metrics["loss/total"] == report.metrics["loss/policy"]
    assert report.metrics["ratio/mean"] == pytest.approx(1.0)
    assert report.metrics["ratio/clip_fraction"] == 0.0
    assert report.metrics["ratio/effective_sample_size"] == pytest.approx(1.0)
    assert report.metrics["policy/replay_gap"] == pytest.approx(0.0, abs=1e-6)
    assert report.metrics["kl/behaviour"] == pytest.approx(0.0, abs=1e-9)
    assert report.metrics["optim/learning_rate"] == 0.25
    assert report.metrics["optim/grad_norm"] == pytest.approx(
        move_of(ADVANTAGES).norm().item(), rel=1e-5
    )
    log_softmax = logits.log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1).mean().item()
    assert report.metrics["policy/entropy"] == pytest.approx(entropy, rel=1e-5)
    # Rows 0 to 5 have 0.00 to 0.05.
    assert report.metrics["policy/outside_codebook"] == pytest.approx(0.025)
    sampled = make_experience(logits, ADVANTAGES).rollout.log_probs
    assert report.metrics["policy/log_prob"] == pytest.approx(sampled.mean().item(), rel=1e-5)
    assert math.isnan(report.metrics["kl/reference"])
    assert not report.is_skipped


def test_update_policy_replay_gap_does_not_measure_learning() -> None:
    logits = make_logits()
    experience = make_experience(logits, ADVANTAGES)
    shifted = replace(experience.rollout, log_probs=experience.rollout.log_probs - 0.125)
    reports = learn(
        TablePolicy(logits),
        replace(experience, rollout=shifted),
        changed(SETTINGS, epochs_per_rollout=3),
    )
    assert [report.metrics["policy/replay_gap"] for report in reports] == pytest.approx(
        [0.125] * 3, rel=1e-5
    )


def test_update_policy_later_updates_stay_relative_to_the_first() -> None:
    logits = make_logits()
    policy = TablePolicy(logits)
    reports = learn(
        policy,
        make_experience(logits, ADVANTAGES),
        changed(SETTINGS, epochs_per_rollout=12, clip_low=0.05, clip_high=0.05),
        learning_rate=2.0,
    )
    assert reports[0].metrics["ratio/clip_fraction"] == 0.0
    assert reports[-1].metrics["ratio/clip_fraction"] > 0.1
    behaviour = [report.metrics["kl/behaviour"] for report in reports]
    assert behaviour[0] < behaviour[1] < behaviour[3]
    assert reports[-1].metrics["ratio/effective_sample_size"] < 1.0
    assert reports[-1].metrics["loss/policy"] < reports[1].metrics["loss/policy"] < 0.0


def test_update_policy_only_measures_a_reference_that_the_loss_does_not_weigh() -> None:
    logits = make_logits()
    experience = make_experience(logits, ADVANTAGES, reference=make_logits(seed=5))
    in_reward = changed(SETTINGS, kl_coef=0.1, kl_placement="reward")
    (report,) = learn(TablePolicy(logits), experience, in_reward)
    assert report.metrics["loss/kl"] == 0.0
    assert report.metrics["kl/reference"] > 0


def test_update_policy_kl_to_the_reference_pulls_the_policy_to_it() -> None:
    logits = make_logits()
    settings = changed(SETTINGS, kl_coef=1.0, kl_estimator="k3_corrected", epochs_per_rollout=20)
    experience = make_experience(logits, FLAT, reference=make_logits(seed=5))
    reports = learn(TablePolicy(logits), experience, settings, learning_rate=0.5)
    kls = [report.metrics["kl/reference"] for report in reports]
    assert min(kls) >= 0
    assert kls[-1] < 0.5 * kls[0]


def test_update_policy_clips_the_gradient_and_reports_its_norm_before() -> None:
    free = move_of(ADVANTAGES)
    clipped = move_of(ADVANTAGES, max_grad_norm=0.01)
    assert clipped.norm().item() == pytest.approx(0.01, rel=1e-3)
    torch.testing.assert_close(clipped, free * (0.01 / free.norm()), atol=1e-6, rtol=1e-3)
    logits = make_logits()
    experience = make_experience(logits, ADVANTAGES)
    (report,) = learn(TablePolicy(logits), experience, SETTINGS, max_grad_norm=0.01)
    assert report.metrics["optim/grad_norm"] == pytest.approx(free.norm().item(), rel=1e-5)


def warm_adam(policy: TablePolicy, experience: Experience) -> torch.optim.Optimizer:
    """An optimizer with momentum from an earlier rollout, and weight decay."""
    optimizer = torch.optim.AdamW([policy.logits], lr=0.1, weight_decay=0.1)
    update_policy(make_learner(policy, optimizer), experience, *SETTINGS)
    return optimizer


def test_update_policy_with_equal_rewards_changes_no_weight_despite_momentum() -> None:
    logits = make_logits()
    policy = TablePolicy(logits)
    optimizer = warm_adam(policy, make_experience(logits, ADVANTAGES))
    before = policy.logits.detach().clone()
    assert not torch.equal(before, logits)
    (report,) = update_policy(
        make_learner(policy, optimizer), make_experience(before, FLAT), *SETTINGS
    )
    assert torch.equal(policy.logits.detach(), before)
    assert report.metrics["optim/grad_norm"] == 0.0
    assert not report.is_skipped


@pytest.mark.parametrize("moved_by", ["nothing", "a_step", "entropy", "another_policy"])
def test_update_policy_takes_no_step_on_rounding_alone(moved_by: str) -> None:
    # The reference is the policy, read with an error in the last bits.
    logits = make_logits()
    policy = TablePolicy(logits)
    settings = changed(SETTINGS, kl_coef=0.1, minibatches=2)
    # The first prompt is the first minibatch.
    first = ADVANTAGES[0] if moved_by == "a_step" else FLAT[0]
    reference = logits * (1 + 1e-6)
    experience = make_experience(logits, torch.stack([first, FLAT[1]]), reference=reference)
    if moved_by == "entropy":
        settings = changed(settings, entropy_coef=0.1)
    experience = replace(experience, is_sampled_by_reference=moved_by != "another_policy")
    optimizer = torch.optim.Adam([policy.logits], lr=0.1)

    update_policy(make_learner(policy, optimizer), experience, *settings)

    steps = {int(state["step"]) for state in optimizer.state.values()}
    assert steps == (set() if moved_by == "nothing" else {2})
    assert torch.equal(policy.logits, logits) == (moved_by == "nothing")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_update_policy_skips_a_step_that_is_not_finite(bad: float) -> None:
    logits = make_logits()
    policy = TablePolicy(logits)
    optimizer = warm_adam(policy, make_experience(logits, ADVANTAGES))
    before = policy.logits.detach().clone()
    experience = make_experience(before, ADVANTAGES)
    values = ADVANTAGES.clone()
    values[1, 2] = bad
    broken = make_experience(before, values)
    (report,) = update_policy(make_learner(policy, optimizer), broken, *SETTINGS)
    assert report.is_skipped
    assert not (
        math.isfinite(report.metrics["loss/total"])
        and math.isfinite(report.metrics["optim/grad_norm"])
    )
    assert torch.equal(policy.logits.detach(), before)
    assert policy.logits.grad is None

    (report,) = update_policy(make_learner(policy, optimizer), experience, *SETTINGS)
    assert not report.is_skipped
    assert not torch.equal(policy.logits.detach(), before)
    assert torch.isfinite(policy.logits).all()


def test_update_policy_advances_the_schedule_when_no_step_is_taken() -> None:
    policy = TablePolicy(make_logits())
    optimizer = torch.optim.SGD([policy.logits])
    rate = LearningRate(optimizer, peak=1.0, schedule="constant", warmup_updates=4, total_updates=4)
    reports = update_policy(
        Learner(policy, optimizer, rate),
        make_experience(make_logits(), FLAT),
        *changed(SETTINGS, epochs_per_rollout=3),
    )
    assert [report.metrics["optim/learning_rate"] for report in reports] == [0.25, 0.5, 0.75]


def test_update_policy_counts_its_micro_batches() -> None:
    counts: list[tuple[int, int]] = []
    policy = TablePolicy(make_logits())
    update_policy(
        make_learner(policy, torch.optim.SGD([policy.logits], lr=0.1)),
        make_experience(make_logits(), ADVANTAGES),
        *changed(SETTINGS, epochs_per_rollout=2, micro_batch_size=4),
        on_progress=lambda done, total: counts.append((done, total)),
    )
    # Two passes over 6 sequences, 4 at a time.
    assert counts == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_update_policy_accumulates_through_the_given_engine() -> None:
    losses: list[float] = []
    is_last_of: list[bool] = []

    class Doubling(Strategy):
        """Doubles every gradient."""

        def accumulation(self, *, is_last: bool) -> AbstractContextManager[None]:
            is_last_of.append(is_last)
            return nullcontext()

        def backward(self, loss: Tensor) -> None:
            losses.append(loss.item())
            torch.autograd.backward(2.0 * loss)

    logits = make_logits()
    policy = TablePolicy(logits)
    optimizer = torch.optim.SGD([policy.logits], lr=1.0)
    update_policy(
        make_learner(policy, optimizer, Doubling()),
        make_experience(logits, ADVANTAGES),
        *changed(SETTINGS, micro_batch_size=3),
    )
    assert is_last_of == [False, True]
    # Both groups sum to 0, and each is one micro-batch.
    assert losses == pytest.approx([0.0, 0.0], abs=1e-7)
    torch.testing.assert_close(
        policy.logits.detach() - logits, 2.0 * move_of(ADVANTAGES), atol=1e-6, rtol=1e-5
    )


def bits_of(settings: UpdateSections, advantages: Tensor) -> tuple[Tensor, list[UpdateReport]]:
    """Logits after one rollout, and the reports."""
    logits = make_logits()
    policy = TablePolicy(logits)
    reports = learn(policy, make_experience(logits, advantages), settings)
    return policy.logits.detach(), reports


def test_minibatches_take_an_update_for_each_part_of_the_prompts() -> None:
    settings = changed(SETTINGS, minibatches=2, epochs_per_rollout=2)
    found, reports = bits_of(settings, ADVANTAGES)

    # The same by hand: the first prompt, the second, and both again, ratios to the same old policy.
    logits = make_logits()
    policy = TablePolicy(logits)
    optimizer = torch.optim.SGD([policy.logits], lr=0.1)
    experience = make_experience(logits, ADVANTAGES)
    stds = []
    for prompt in (0, 1, 0, 1):
        rows = torch.arange(GROUP) + prompt * GROUP
        replay = policy.replay(experience.prompts, experience.rollout, rows)
        old = experience.rollout.log_probs.flatten(0, 1)[rows]
        stds.append((replay.log_probs - old).double().mean(dim=1).std(correction=0).item())
        inputs = LossInputs(replay.log_probs, old, None, ADVANTAGES[prompt, :, None])
        optimizer.zero_grad()
        grpo_loss(inputs, SETTINGS.loss).total.backward()
        optimizer.step()
    torch.testing.assert_close(found, policy.logits.detach())
    assert len(reports) == 4
    # Of the log-probs before the first update: later ones would measure learning.
    assert all(report.metrics["policy/replay_gap"] < 1e-6 for report in reports)
    # Of the mean log-ratios of the three sequences, 0 where nothing was learned before.
    assert stds[0] < 1e-7 < 1e-4 < min(stds[1:])
    measured = [report.metrics["ratio/sequence_std"] for report in reports]
    assert measured == pytest.approx(stds, rel=1e-4, abs=1e-7)


def test_minibatches_do_not_depend_on_micro_batches() -> None:
    settings = changed(SETTINGS, minibatches=2)
    whole, _ = bits_of(settings, ADVANTAGES)
    parts, _ = bits_of(changed(settings, micro_batch_size=2), ADVANTAGES)
    torch.testing.assert_close(parts, whole, atol=1e-7, rtol=1e-6)


FLAT_AND_NOT = torch.tensor([[0.0, 0.0, 0.0], [-0.25, 1.0, -0.75]])


def skipped(advantages: Tensor, **changes: Any) -> tuple[Tensor, list[UpdateReport], list[int]]:
    policy = TablePolicy(make_logits())
    settings = changed(SETTINGS, skip_zero_std=True, **changes)
    experience = make_experience(make_logits(), advantages, reference=make_logits(seed=5))
    reports = learn(policy, experience, settings)
    return policy.logits.detach(), reports, policy.replayed


def test_flat_rows_are_skipped_and_the_weights_equal_to_the_bit() -> None:
    whole, expected = bits_of(changed(SETTINGS, micro_batch_size=GROUP), FLAT_AND_NOT)
    found, reports, replayed = skipped(FLAT_AND_NOT, micro_batch_size=GROUP)
    assert found.equal(whole)
    assert replayed == [3, 4, 5]
    for name in ("loss/total", "loss/policy", "optim/grad_norm"):
        assert reports[0].metrics[name] == expected[0].metrics[name]
    # Of the rows replayed alone: 0.03, 0.04 and 0.05.
    assert reports[0].metrics["policy/outside_codebook"] == pytest.approx(0.04)
    assert reports[0].metrics["ratio/mean"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "weighted",
    [{"kl_coef": 0.1}, {"kl_behaviour_coef": 0.1}],
)
def test_flat_rows_that_a_kl_weighs_are_replayed(weighted: dict[str, float]) -> None:
    _, _, replayed = skipped(FLAT_AND_NOT, **weighted)
    assert replayed == [*range(PROMPTS * GROUP)]


def test_where_all_is_flat_one_pass_is_made_for_its_figures() -> None:
    found, reports, replayed = skipped(FLAT, micro_batch_size=2)
    assert found.equal(make_logits())
    assert replayed == [0, 1]
    assert reports[0].metrics["loss/policy"] == 0.0
    assert reports[0].metrics["optim/grad_norm"] == 0.0
    assert reports[0].metrics["policy/entropy"] > 0
    assert not reports[0].is_skipped


def test_figures_of_preview_and_target_are_told_apart() -> None:
    class Staged(TablePolicy):
        def replay(self, prompts: PromptBatch, rollout: Rollout, rows: Tensor) -> Replay:
            return replace(super().replay(prompts, rollout, rows), num_preview=1)

    logits = make_logits()
    experience = make_experience(logits, ADVANTAGES, reference=make_logits(seed=5))
    (report,) = learn(Staged(logits), experience, changed(SETTINGS, kl_coef=0.1))
    metrics = report.metrics
    for name in ("policy/entropy", "kl/reference"):
        parts = metrics[f"{name}/preview"] / TOKENS + metrics[f"{name}/target"] * (1 - 1 / TOKENS)
        assert parts == pytest.approx(metrics[name], rel=1e-5)
        assert metrics[f"{name}/preview"] != pytest.approx(metrics[f"{name}/target"], rel=1e-3)
    assert metrics["ratio/clip_fraction/preview"] == 0
    assert "kl/reference_tokens" not in metrics


def make_targets(places: Sequence[int], *, weight: float = 0.5) -> TargetTokens:
    """Targets of some prompts of `make_experience`; for none of them, one that stands in."""
    rows = list(places) or [0]
    token_ids = torch.randint(
        CODEBOOK, (PROMPTS, TOKENS), generator=torch.Generator().manual_seed(7)
    )
    prompts = tuple(Prompt(prompt_id=str(row), prompt="a sign") for row in rows)
    return TargetTokens(
        prompts=PromptBatch(prompts, 1, 32, 32, seed=0, decode_seeds=(0,) * len(rows)),
        token_ids=token_ids[rows],
        prompt_indices=torch.tensor(list(places), dtype=torch.long),
        weight=weight,
    )


def sft_move(
    targets: TargetTokens | None, advantages: Tensor = FLAT, settings: UpdateSections = SETTINGS
) -> tuple[Tensor, list[UpdateReport]]:
    """Minus the gradient, and the reports."""
    logits = make_logits()
    policy = TablePolicy(logits)
    optimizer = torch.optim.SGD([policy.logits], lr=1.0)
    reports = update_policy(
        make_learner(policy, optimizer),
        make_experience(logits, advantages),
        *settings,
        targets=targets,
    )
    return policy.logits.detach() - logits, reports


def cross_entropy_gradient(targets: TargetTokens) -> Tensor:
    """Gradient of the mean over all target images and tokens."""
    onehot = nn.functional.one_hot(targets.token_ids, CODEBOOK).float()
    return -(onehot - make_logits().softmax(-1)).mean(dim=0) / TOKENS


def test_the_sft_term_moves_along_the_cross_entropy_of_its_tokens() -> None:
    targets = make_targets([0, 1])
    moved, (report,) = sft_move(targets)
    torch.testing.assert_close(moved, -0.5 * cross_entropy_gradient(targets), atol=1e-6, rtol=1e-5)
    expected = nn.functional.cross_entropy(
        make_logits().expand(2, -1, -1).flatten(0, 1), targets.token_ids.flatten()
    ).item()
    assert report.metrics["sft/cross_entropy"] == pytest.approx(expected, rel=1e-5)
    assert report.metrics["sft/weight"] == 0.5
    assert report.metrics["loss/total"] == pytest.approx(0.5 * expected, rel=1e-5)


def test_the_sft_term_adds_to_the_gradient_of_the_rollout() -> None:
    targets = make_targets([0, 1])
    both, _ = sft_move(targets, ADVANTAGES, changed(SETTINGS, micro_batch_size=1))
    alone, _ = sft_move(None, ADVANTAGES)
    torch.testing.assert_close(
        both - alone, -0.5 * cross_entropy_gradient(targets), atol=1e-6, rtol=1e-4
    )


def test_prompts_without_a_target_have_no_part_in_the_sft_term() -> None:
    moved, _ = sft_move(make_targets([1]))
    one = make_targets([1])
    torch.testing.assert_close(moved, -0.5 * cross_entropy_gradient(one), atol=1e-6, rtol=1e-5)
    none, (report,) = sft_move(make_targets([]), ADVANTAGES)
    plain, _ = sft_move(None, ADVANTAGES)
    assert torch.equal(none, plain)
    assert math.isnan(report.metrics["sft/cross_entropy"])
    assert not report.is_skipped


def test_minibatches_have_the_target_images_of_their_prompts() -> None:
    # Plain descent at a rate at which the second update sees the weights of the first.
    settings = changed(SETTINGS, minibatches=2)
    _, reports = sft_move(make_targets([1]), ADVANTAGES, settings)
    first, second = (report.metrics["sft/cross_entropy"] for report in reports)
    assert math.isnan(first)
    assert second > 0


def test_flat_groups_with_the_sft_term_learn_from_it_alone() -> None:
    settings = changed(SETTINGS, skip_zero_std=True)
    targets = make_targets([0])
    moved, _ = sft_move(targets, FLAT, settings)
    torch.testing.assert_close(moved, -0.5 * cross_entropy_gradient(targets), atol=1e-6, rtol=1e-5)


def supervised_move(
    targets: TargetTokens, settings: UpdateSections = SETTINGS
) -> tuple[Tensor, list[UpdateReport]]:
    """Minus the gradient, and the reports."""
    logits = make_logits()
    policy = TablePolicy(logits)
    reports = update_on_targets(
        make_learner(policy, torch.optim.SGD([policy.logits], lr=1.0)),
        targets,
        settings.train,
        num_prompts=PROMPTS,
    )
    return policy.logits.detach() - logits, reports


def test_supervised_updates_move_along_the_cross_entropy() -> None:
    targets = make_targets([0, 1], weight=1.0)
    moved, (report,) = supervised_move(targets, changed(SETTINGS, micro_batch_size=1))
    torch.testing.assert_close(moved, -cross_entropy_gradient(targets), atol=1e-6, rtol=1e-5)
    expected = nn.functional.cross_entropy(
        make_logits().expand(2, -1, -1).flatten(0, 1), targets.token_ids.flatten()
    ).item()
    assert report.metrics["loss/total"] == pytest.approx(expected, rel=1e-5)
    assert report.metrics["sft/cross_entropy"] == pytest.approx(expected, rel=1e-5)
    assert report.metrics["optim/grad_norm"] == pytest.approx(moved.norm().item(), rel=1e-5)


def test_supervised_minibatches_without_a_target_image_move_nothing() -> None:
    settings = changed(SETTINGS, minibatches=2)
    targets = make_targets([1], weight=1.0)
    moved, (first, second) = supervised_move(targets, settings)
    torch.testing.assert_close(moved, -cross_entropy_gradient(targets), atol=1e-6, rtol=1e-5)
    assert first.metrics["loss/total"] == 0.0
    assert math.isnan(first.metrics["sft/cross_entropy"])
    assert not first.is_skipped
    assert second.metrics["sft/cross_entropy"] > 0
    assert first.metrics.keys() == second.metrics.keys()


def test_discarded_groups_are_not_trained_on() -> None:
    logits = make_logits()
    plain = make_experience(logits, ADVANTAGES)
    # The same two groups, in another order, and one whose advantages are not even 0.
    rows = torch.tensor([1, 1, 0])
    whole = replace(
        plain,
        prompts=replace(
            plain.prompts,
            prompts=tuple(plain.prompts.prompts[row] for row in rows),
            decode_seeds=(0, 0, 0),
        ),
        rollout=replace(
            plain.rollout,
            token_ids=plain.rollout.token_ids[rows],
            log_probs=plain.rollout.log_probs[rows],
        ),
        images=replace(plain.images, pixels=plain.images.pixels[rows], decode_seeds=(0, 0, 0)),
        scores=replace(
            plain.scores,
            raw=plain.scores.raw[rows],
            is_applicable=plain.scores.is_applicable[rows],
        ),
        totals=plain.totals[rows],
        penalties=plain.penalties[rows],
        advantages=ADVANTAGES[rows][..., None],
        trained=torch.tensor([2, 0]),
    )
    settings = changed(SETTINGS, minibatches=2)
    policies = [TablePolicy(logits.clone()) for _ in range(2)]
    (*reports,) = (
        learn(policy, experience, settings)
        for policy, experience in zip(policies, (plain, whole), strict=True)
    )
    assert torch.equal(policies[0].logits, policies[1].logits)
    for one, other in zip(*reports, strict=True):
        # This policy gives it by the number of the row.
        assert one.metrics | {"policy/outside_codebook": 0} == pytest.approx(
            other.metrics | {"policy/outside_codebook": 0}, rel=0, abs=0, nan_ok=True
        )
    assert not torch.equal(policies[0].logits, logits)


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_policy_gradient_is_that_of_an_unclipped_step(kl_coef: float) -> None:
    settings = changed(SETTINGS, kl_coef=kl_coef, micro_batch_size=4)
    logits = make_logits()
    policy = TablePolicy(logits)
    policy.logits.grad = torch.ones_like(logits)
    passes = changed(settings, epochs_per_rollout=2, minibatches=2)
    experience = make_experience(logits, ADVANTAGES, reference=make_logits(seed=5))
    (gradient,) = policy_gradient(policy, experience, *passes)
    torch.testing.assert_close(gradient, -move_of(ADVANTAGES, settings))
    assert gradient.abs().max() > 0.01
    assert policy.logits.grad is None
    assert torch.equal(policy.logits, logits)
