"""Recompute totals and advantages under reward weights that move during a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from glm_grpo.grpo.advantages import AdvantageSettings
from glm_grpo.training.collect import batch_advantages, join_tables
from glm_grpo.training.distributed.processes import Processes
from glm_grpo.types import Experience
from rewards.reweigh import combine
from rewards.steering import MovingWeights, Steering, begin, move, weigh


@dataclass(frozen=True)
class Weighed:
    """An experience under the weights in force.

    Attributes:
        after: Where weights stand after this step; None where they do not move.
        metrics: `reward/<term>/weight`, `reward/<term>/multiplier`.
    """

    experience: Experience
    after: MovingWeights | None
    metrics: dict[str, float]


def weigh_experience(
    experience: Experience,
    at: MovingWeights | None,
    steering: Steering | None,
    advantage: AdvantageSettings,
    processes: Processes,
) -> Weighed:
    """Totals and advantages of an experience under the weights in force.

    All processes must call it, each with its part; weights move by the scores of all.

    Args:
        experience: As `collect` makes it, under the weights asked for.
        at: Where weights stand; None before the first step.
        steering: How they move; None: they do not, and the experience stays as it is.
        advantage: How totals become advantages.

    Raises:
        RewardError: A total is beyond what float32 holds.
    """
    if steering is None:
        return Weighed(experience, None, {})
    asked = experience.rewards
    whole = join_tables(processes.gather(replace(asked, notes={})))
    at = begin(whole) if at is None else at
    with processes.together():
        rewards = weigh(asked, at, steering)
        totals = combine(rewards, mode=steering.combine)
    advantages = batch_advantages(totals - experience.penalties, advantage, processes)
    weights = zip(rewards.names, rewards.weights.tolist(), strict=True)
    multipliers = dict(zip(asked.names, at.multipliers, strict=True))
    return Weighed(
        replace(experience, rewards=rewards, totals=totals, advantages=advantages),
        move(whole, at, steering),
        {
            **{f"reward/{name}/weight": weight for name, weight in weights},
            **{f"reward/{name}/multiplier": multipliers[name] for name in steering.at_least},
        },
    )
