"""Watches whether rollouts that are decoded cheaply rank as those decoded in full.

The cheap decode takes fewer denoising steps. Every so many training steps the same tokens of a few
groups are decoded in full too; where the orders differ too much, the cheap decode ends.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from glm_grpo.training.checkpoint.run_state import RunState
from glm_grpo.training.collect import CollectSettings, decode_and_score, join_tables
from glm_grpo.training.data.prompts import part_of_batch
from glm_grpo.training.distributed.processes import ALONE, Processes
from glm_grpo.training.monitors.rank_agreement import RankAgreement, compare_ranks
from glm_grpo.training.phase import Models, PhaseClock
from glm_grpo.types import Experience

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecheckSettings:
    """When the cheap decode is rechecked, and when it ends.

    Attributes:
        every: Training steps from one recheck to the next, >= 1; the first is at step 1.
        groups: Prompts whose images are decoded in full too, >= 1, at most those of a step.
        min_rank_correlation: Of the totals inside groups; below it the cheap decode ends.
    """

    every: int
    groups: int
    min_rank_correlation: float


class Recheck:
    """The decode of a run's rollouts.

    Args:
        models: Of the run; their decoder is the full one.
        collect: How experience is made, with the denoising steps of rollouts.
        settings: Plain values.
        state: Keeps at which step the cheap decode ended.
        processes: That collect together.
    """

    def __init__(
        self,
        models: Models,
        collect: CollectSettings,
        settings: RecheckSettings,
        state: RunState,
        processes: Processes = ALONE,
    ) -> None:
        self._models = models
        self._collect = collect
        self._settings = settings
        self._at = state
        self._processes = processes

    def collect_settings(self, step: int) -> CollectSettings:
        """How a step, from 1, makes experience: in full once the cheap decode has ended."""
        if self._has_ended(step):
            return replace(self._collect, decode_steps=self._models.decoder.steps)
        return self._collect

    def compare(self, experience: Experience, step: int, clock: PhaseClock) -> dict[str, float]:
        """Rechecks where it is due; ends the cheap decode, with a warning, where it ranks badly.

        Args:
            experience: Of this step and process, made with `collect_settings`.
            step: From 1.
            clock: Gets the time, as phase `recheck`.

        Returns:
            `decode/is_cheap` for this step, and at a recheck `decode/rank_correlation/<term>` and
            `.../total`, NaN where no group has an order; nothing for runs without a cheap decode.

        Raises:
            RewardError: A term failed; names term, prompt and image.
            PeerError: Another process failed.
        """
        if self._collect.decode_steps == self._models.decoder.steps:
            return {}
        if self._has_ended(step):
            return {"decode/is_cheap": 0.0}
        if (step - 1) % self._settings.every != 0:
            return {"decode/is_cheap": 1.0}
        with clock.phase("recheck"):
            agreement = self._rank_agreement(experience)
        self._judge(agreement, step)
        correlations = {**agreement.terms, "total": agreement.total}
        return {
            "decode/is_cheap": 1.0,
            **{f"decode/rank_correlation/{name}": value for name, value in correlations.items()},
        }

    def _has_ended(self, step: int) -> bool:
        return self._at.full_decode_from is not None and step >= self._at.full_decode_from

    def _rank_agreement(self, experience: Experience) -> RankAgreement:
        """Of the first groups of the step, each decoded where it was sampled."""
        batch, table = experience.prompts, experience.rewards
        counts = self._processes.gather(len(batch.prompts))
        groups = self._settings.groups - sum(counts[: self._processes.rank])
        groups = min(max(groups, 0), len(batch.prompts))
        own = []
        with self._processes.together():
            if groups > 0:
                token_ids = experience.rollout.token_ids[:groups]
                some = part_of_batch(batch, range(groups))
                _, full = decode_and_score(self._models, some, token_ids)
                applies = table.is_applicable[:groups]
                cheap = replace(table, raw=table.raw[:groups], is_applicable=applies, notes={})
                own.append((cheap, full))
        pairs = [pair for part in self._processes.gather(own) for pair in part]
        cheap, full = (join_tables(tables) for tables in zip(*pairs, strict=True))
        return compare_ranks(cheap, full, mode=self._collect.combine)

    def _judge(self, agreement: RankAgreement, step: int) -> None:
        # NaN, where no group has an order, says nothing against the cheap decode.
        if not agreement.total < self._settings.min_rank_correlation:
            return
        # From a step on, not from now on: this step may yet fail and be taken again.
        self._at.full_decode_from = step + 1
        if not self._processes.is_main:
            return
        logger.warning(
            "step %d: decode.rollout_steps=%d ranks the images of a group unlike decode.steps=%d: "
            "correlation %.3f, and decode.min_rank_correlation asks for %.3f; from the next step "
            "on rollouts are decoded in full. For the next run raise decode.rollout_steps: "
            "`glm-grpo probe` shows how well it ranks",
            step,
            self._collect.decode_steps,
            self._models.decoder.steps,
            agreement.total,
            self._settings.min_rank_correlation,
        )
