"""Turn prompts into experience: sample, decode, score, and compare images within groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from glm_grpo.config import Config
from glm_grpo.config.sections import AdvantageSection
from glm_grpo.data.prompts import SparePrompts
from glm_grpo.grpo.advantages import group_advantages
from glm_grpo.grpo.credit import TokenPlaces, place_credit, token_advantages
from glm_grpo.grpo.losses import reference_penalty
from glm_grpo.training.collate import join_experiences
from glm_grpo.training.distributed.processes import ALONE, Processes
from glm_grpo.training.generate import decode, encode_sources, sample, wait_for_scores
from glm_grpo.training.models import Models
from glm_grpo.training.out_of_memory import describe_replay
from glm_grpo.training.phases import PhaseClock
from glm_grpo.types import Experience, PromptBatch, Rollout
from rewards.refusals import check_refusals, find_refusals, join_refusals
from rewards.score_map import Grid
from rewards.weighting import combine, placed_contributions


def collect(
    models: Models,
    batch: PromptBatch,
    config: Config,
    *,
    clock: PhaseClock,
    processes: Processes = ALONE,
    spares: SparePrompts | None = None,
) -> Experience:
    """Make the experience of one batch.

    If several processes each bring part of a batch, advantages are computed over the whole.

    With `rollout.dynamic_sampling_rounds`, zero-std groups are replaced by groups of spare prompts,
    and such replacements again, up to `dynamic_sampling_rounds` times; when spare prompts run out,
    a zero-std group stays. The experience contains all sampled groups and marks those that are
    discarded.
    Source: DAPO (arXiv 2503.14476), section 3.2, "dynamic sampling".

    Args:
        config: How images are decoded, scored and compared.
        spares: Spare prompts of the step, the same in all processes; None: replace nothing.

    Raises:
        MemoryLimitError: Memory ran out; the message names phase, size and remedy.
        PeerError: Another process failed.
    """
    with processes.together():
        by_place = config.advantage.credit == "place"
        places = models.policy.token_places(batch) if by_place else None
        grid = None if places is None else places.grid
        sampled = partial(_sample_and_score, models, config=config, clock=clock, grid=grid)
        experience = sampled(batch)
    if spares is not None:
        rounds = config.rollout.dynamic_sampling_rounds
        experience = _refill(experience, spares, sampled, rounds, processes)
    _check_refusals(experience, processes)
    return with_advantages(experience, config, places, processes)


def _sample_and_score(
    models: Models, batch: PromptBatch, *, config: Config, clock: PhaseClock, grid: Grid | None
) -> Experience:
    """Experience of some prompts, with advantages of 0 until all groups are sampled."""
    loss = config.loss
    batch = encode_sources(models, batch, clock)
    rollout = sample(models, batch, batch_size=config.rollout.batch_size, clock=clock)
    is_sampled_by_reference = loss.kl_coef > 0 and models.policy.reference.equals_policy()
    tokens = _SampledTokens(models, batch, rollout, config.train.micro_batch_size, clock)
    decoder = models.with_decode_steps(config.decode.training_steps)
    reference = None
    with decode(decoder, batch, rollout.token_ids, clock, grid=grid) as decoded:
        # While terms score, unless the policy has to be moved back for it.
        if loss.kl_coef > 0 and not models.offload.moves("policy"):
            reference = tokens.reference_log_probs()
        table = wait_for_scores(models, batch, decoded, clock)
    if loss.kl_coef > 0 and reference is None:
        reference = tokens.reference_log_probs()
    totals = combine(table, mode=config.reward.combine)
    penalties = torch.zeros_like(totals)
    if loss.kl_coef_in_reward > 0 and reference is not None and not is_sampled_by_reference:
        log_probs = rollout.log_probs
        if models.policy.dtype != torch.float32:
            # Summed over an image, what the sampler rounds differently would count as reward.
            log_probs = tokens.policy_log_probs()
        penalties = reference_penalty(log_probs, reference, kl_coef=loss.kl_coef_in_reward)
    return Experience(
        prompts=batch,
        rollout=rollout,
        images=decoded.images,
        scores=table,
        totals=totals,
        penalties=penalties,
        advantages=torch.zeros_like(totals)[..., None],
        reference_log_probs=reference,
        is_sampled_by_reference=is_sampled_by_reference,
    )


def _check_refusals(experience: Experience, processes: Processes) -> None:
    """Stop if a term refused too many images of the step, in all processes and rounds together."""
    table, pixels = experience.scores, experience.images.pixels
    parts = processes.gather(find_refusals(experience.prompts.prompts, table))
    with processes.together():
        if processes.is_main:
            check_refusals(join_refusals(parts), table, pixels)


def with_advantages(
    experience: Experience,
    config: Config,
    places: TokenPlaces | None,
    processes: Processes = ALONE,
) -> Experience:
    """The same experience with the advantages that the config gives.

    Args:
        experience: With parts of its scores, if credit is by place.
        config: Combination and advantages are used.
        places: Places of its tokens; None: credit by image.
    """
    rewards, mode, placed, credit = experience.rewards(), config.reward.combine, None, None
    if places is not None:
        placed = placed_contributions(experience.scores, places.grid, mode=mode)
        credit = place_credit(rewards, placed, places.grid)
    parts = processes.gather((rewards, placed))
    of_all = torch.cat([part for part, _ in parts])
    if places is None:
        advantages = image_advantages(of_all, config.advantage)[..., None]
    else:
        advantages = token_advantages(
            of_all,
            torch.cat([part for _, part in parts if part is not None]),
            places,
            reward_to_go=config.advantage.reward_to_go,
            normalization=config.advantage.normalization,
            std_floor=config.advantage.std_floor,
            clip=config.advantage.clip,
            is_standardised=mode == "normalize_then_sum",
        )
    own = advantages.split([len(part) for part, _ in parts])[processes.rank]
    return replace(experience, advantages=own, place_credit=credit)


def image_advantages(
    rewards: Float32[Tensor, "P G"], settings: AdvantageSection
) -> Float32[Tensor, "P G"]:
    """Advantages of images as a whole, which run folders store.

    With credit by image the policy learns from them; with credit by place, tokens have their own.

    Args:
        rewards: Totals minus penalties of all groups of a step, from all processes.
    """
    return group_advantages(
        rewards,
        normalization=settings.normalization,
        std_floor=settings.std_floor,
        clip=settings.clip,
    )


def _refill(
    first: Experience,
    spares: SparePrompts,
    sampled: Callable[[PromptBatch], Experience],
    rounds: int,
    processes: Processes,
) -> Experience:
    """Sample all rounds of groups, and choose which are trained on.

    Each process replaces its own groups, by spare prompts that only it takes.
    """
    parts = [first]
    # The groups that represent the prompts of the step, by their place among all sampled groups.
    trained = torch.arange(len(first.totals))
    zero_std = first.is_zero_std().nonzero().flatten()
    left = range(len(spares))
    for _ in range(rounds):
        wanted = processes.gather(len(zero_std))
        if not left or not any(wanted):
            break
        before = sum(wanted[: processes.rank])
        # The last zero-std groups stay if spare prompts run out.
        own, left = left[before : before + len(zero_std)], left[sum(wanted) :]
        replaced, zero_std = zero_std[: len(own)], zero_std[:0]
        with processes.together():
            if own:
                more = sampled(spares.batch(own))
                num_sampled = sum(len(part.totals) for part in parts)
                trained[replaced] = num_sampled + torch.arange(len(own))
                zero_std = replaced[more.is_zero_std()]
                parts.append(more)
    return replace(join_experiences(parts), trained=trained)


@dataclass(frozen=True)
class _SampledTokens:
    """Sampled tokens of some prompts, whose log-probs are computed for some rows at a time."""

    models: Models
    batch: PromptBatch
    rollout: Rollout
    micro_batch_size: int
    clock: PhaseClock

    def reference_log_probs(self) -> Float32[Tensor, "P G T"]:
        return self._of_all_rows(self.models.policy.reference_log_probs)

    @torch.no_grad()
    def policy_log_probs(self) -> Float32[Tensor, "P G T"]:
        return self._of_all_rows(lambda *scored: self.models.policy.replay(*scored).log_probs)

    def _of_all_rows(
        self,
        score: Callable[[PromptBatch, Rollout, Int64[Tensor, " N"]], Float32[Tensor, "N T"]],
    ) -> Float32[Tensor, "P G T"]:
        shape = self.rollout.token_ids.shape[:2]
        work = describe_replay(self.batch, self.models.policy, self.micro_batch_size)
        parts = []
        with self.models.phase("update", work, self.clock):
            micro_batches = torch.arange(shape.numel()).split(self.micro_batch_size)
            for done, rows in enumerate(micro_batches, start=1):
                parts.append(score(self.batch, self.rollout, rows).cpu())
                self.clock.count(done, len(micro_batches))
        log_probs: Tensor = torch.cat(parts).unflatten(0, shape)
        return log_probs
