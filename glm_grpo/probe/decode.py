"""Before a run: how well the cheap decode of rollouts ranks, and what it saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Int64
from torch import Tensor

from glm_grpo.probe.findings import ProbedDecode
from glm_grpo.training.collect import decode_and_score, join_tables
from glm_grpo.training.monitors.rank_agreement import compare_ranks
from glm_grpo.training.phase import Models, PhaseClock, decoding_size
from glm_grpo.types import PromptBatch
from rewards.reweigh import Mode
from rewards.types import RewardTable


@dataclass(frozen=True)
class FullDecode:
    """Samples of rollouts, decoded once more with all denoising steps.

    Attributes:
        rewards: Their raw scores.
        steps: Denoising steps.
        cheap_steps: Of the rollouts, fewer.
        timed_images: So many were drawn both ways with nothing else to do.
        seconds: For those.
        cheap_seconds: For the same with the steps of the rollouts.
    """

    rewards: RewardTable
    steps: int
    cheap_steps: int
    timed_images: int
    seconds: float
    cheap_seconds: float


def decode_in_full(
    models: Models, batch: PromptBatch, token_ids: Int64[Tensor, "P G T"], *, cheap_steps: int
) -> FullDecode:
    """Decodes and scores with all steps; times the first group alone, both ways.

    Args:
        models: Their decoder is the full one.
        batch: Prompts and seeds.
        token_ids: Sampled for it.
        cheap_steps: Denoising steps of rollouts.

    Raises:
        RewardError: A term failed.
        MemoryLimitError: Memory ran out; names phase, size and remedy.
    """
    _, table = decode_and_score(models, batch, token_ids)
    single = replace(batch, prompts=batch.prompts[:1], decode_seeds=batch.decode_seeds[:1])
    # Both are warm, and no term is scoring meanwhile.
    clock = PhaseClock()
    with models.phase("decode", decoding_size(single)):
        for steps in (cheap_steps, models.decoder.steps):
            with clock.phase(str(steps)):
                models.decoder.with_steps(steps).decode(single, token_ids[:1])
    seconds = clock.seconds()
    return FullDecode(
        rewards=table,
        steps=models.decoder.steps,
        cheap_steps=cheap_steps,
        timed_images=token_ids.shape[1],
        seconds=seconds[str(models.decoder.steps)],
        cheap_seconds=seconds[str(cheap_steps)],
    )


def join_decodes(parts: Sequence[FullDecode]) -> FullDecode:
    """Decodes with the same steps, prompts after prompts; at least one."""
    return replace(
        parts[0],
        rewards=join_tables([part.rewards for part in parts]),
        timed_images=sum(part.timed_images for part in parts),
        seconds=sum(part.seconds for part in parts),
        cheap_seconds=sum(part.cheap_seconds for part in parts),
    )


def report_decode(
    full: FullDecode, cheap: RewardTable, *, mode: Mode, min_rank_correlation: float
) -> ProbedDecode:
    """Turns two decodes of the same samples into figures.

    Args:
        full: Of the samples.
        cheap: Raw scores of the samples as rollouts decode them.
        mode: How terms are combined.
        min_rank_correlation: Below which a run would fall back to the full decode.
    """
    agreement = compare_ranks(cheap, full.rewards, mode=mode)
    return ProbedDecode(
        steps=full.cheap_steps,
        full_steps=full.steps,
        rank_correlations=tuple(agreement.terms.values()),
        total_rank_correlation=agreement.total,
        min_rank_correlation=min_rank_correlation,
        images_per_second=full.timed_images / full.cheap_seconds,
        full_images_per_second=full.timed_images / full.seconds,
    )
