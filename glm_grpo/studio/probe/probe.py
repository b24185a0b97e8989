"""Sample the base model, and score its images, the targets and the sources."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from glm_grpo.config import Config
from glm_grpo.data.prompts import part_of_batch, prompts_at
from glm_grpo.seeds import derive_seed
from glm_grpo.studio.probe.gradient import GradientProbe, with_advantage
from glm_grpo.training.collate import join_tables
from glm_grpo.training.collect import collect
from glm_grpo.training.generate import decode_and_score
from glm_grpo.training.models import Models
from glm_grpo.training.out_of_memory import (
    describe_decoding,
    describe_sampling,
    out_of_memory_explained,
)
from glm_grpo.training.phases import PhaseClock
from glm_grpo.types import ImageBatch, PromptBatch
from rewards.types import Prompt, RewardTable
from rewards.weighting import combine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FullDecode:
    """Samples of rollouts, decoded once more with all denoising steps.

    Attributes:
        scores: Their raw scores.
        steps: Denoising steps.
        cheap_steps: Fewer denoising steps, those of rollouts.
        timed_images: Number of images that were decoded both ways with nothing else running.
        cheap_seconds: For the same with the steps of the rollouts.
    """

    scores: RewardTable
    steps: int
    cheap_steps: int
    timed_images: int
    seconds: float
    cheap_seconds: float


def decode_in_full(
    models: Models,
    batch: PromptBatch,
    token_ids: Int64[Tensor, "P G T"],
    *,
    steps: int,
    cheap_steps: int,
) -> FullDecode:
    """Decode and score with all steps, and time the first group both ways.

    Args:
        models: With the full decoder.
        cheap_steps: Denoising steps of rollouts.

    Raises:
        MemoryLimitError: Memory ran out; names phase, size and remedy.
    """
    _, table = decode_and_score(models, batch, token_ids)
    single = part_of_batch(batch, range(1))
    # Both have run before, and no term is scoring meanwhile.
    clock = PhaseClock()
    with models.phase("decode", describe_decoding(single)):
        for number in (cheap_steps, steps):
            with clock.phase(str(number)):
                models.decoder.with_steps(number).decode(single, token_ids[:1])
    seconds = clock.seconds()
    return FullDecode(
        scores=table,
        steps=steps,
        cheap_steps=cheap_steps,
        timed_images=token_ids.shape[1],
        seconds=seconds[str(steps)],
        cheap_seconds=seconds[str(cheap_steps)],
    )


def join_decodes(parts: Sequence[FullDecode]) -> FullDecode:
    """Join decodes with the same steps in prompt order."""
    return replace(
        parts[0],
        scores=join_tables([part.scores for part in parts]),
        timed_images=sum(part.timed_images for part in parts),
        seconds=sum(part.seconds for part in parts),
        cheap_seconds=sum(part.cheap_seconds for part in parts),
    )


@dataclass(frozen=True)
class ProbeSamples:
    """Samples of the base model for N prompts, with their scores.

    Attributes:
        images: G samples per prompt.
        scores: Their raw scores.
        totals: Under the weights of the config.
        redrawn: Raw scores of the first sample's tokens, decoded under K other noises (a decoder
            of one pass has none) and scored each time.
        target: Raw scores of the target image itself; NaN where a prompt has no target, or a term
            does not apply or refused it.
        reconstruction: Raw scores of the decoded tokens of the target image; NaN likewise.
        reconstructed_pixels: Those images, in the order of the prompts that have a target.
        copies: Raw scores of the unchanged first source image; NaN where a prompt has none, or a
            term does not apply or refused it.
        full: The samples in the full decode; None where rollouts are decoded in full anyway.
    """

    prompts: tuple[Prompt, ...]
    images: ImageBatch
    scores: RewardTable
    totals: Float32[Tensor, "N G"]
    redrawn: Float32[Tensor, "N K R"]
    target: Float32[Tensor, "N R"]
    reconstruction: Float32[Tensor, "N R"]
    reconstructed_pixels: UInt8[Tensor, "M 3 H W"]
    copies: Float32[Tensor, "N R"]
    full: FullDecode | None


def sample_probe(
    models: Models,
    batches: Sequence[PromptBatch],
    config: Config,
    *,
    noises: int,
    gradient: GradientProbe | None = None,
) -> ProbeSamples:
    """Sample, decode and score, without training. Ctrl-C returns the batches that are done.

    Args:
        noises: K, number of other noises for the first sample of each prompt, >= 2.
        gradient: Gets the experience of every whole batch, with the credit that it needs.

    Raises:
        NonFiniteError: A gradient is not finite.
        MemoryLimitError: Memory ran out; names phase, size and remedy.
    """
    if gradient is None:
        # Only a gradient needs the reference.
        config = with_advantage(config.without_reference(), credit="image")
    else:
        config = with_advantage(config, credit=gradient.credit)
    whole = len(batches[0].prompts)
    parts: list[ProbeSamples] = []
    total, started = sum(len(batch.prompts) for batch in batches), time.monotonic()
    try:
        for batch in batches:
            of_gradient = gradient if len(batch.prompts) == whole else None
            parts.append(_probe_batch(models, batch, config, noises, of_gradient))
            done = sum(len(part.prompts) for part in parts)
            left = (time.monotonic() - started) * (total - done) / done
            logger.info(
                "probed %d of %d prompts, left %s", done, total, timedelta(seconds=round(left))
            )
    except KeyboardInterrupt:
        if not parts:
            raise
        logger.warning("interrupted: the report is on the prompts probed so far")
    table = join_tables([part.scores for part in parts])
    decodes = [part.full for part in parts if part.full is not None]
    return ProbeSamples(
        prompts=tuple(prompt for part in parts for prompt in part.prompts),
        images=ImageBatch(
            pixels=torch.cat([part.images.pixels for part in parts]),
            decode_seeds=tuple(seed for part in parts for seed in part.images.decode_seeds),
        ),
        scores=table,
        totals=combine(table, mode=config.reward.combine),
        redrawn=torch.cat([part.redrawn for part in parts]),
        target=torch.cat([part.target for part in parts]),
        reconstruction=torch.cat([part.reconstruction for part in parts]),
        reconstructed_pixels=torch.cat([part.reconstructed_pixels for part in parts]),
        copies=torch.cat([part.copies for part in parts]),
        full=join_decodes(decodes) if decodes else None,
    )


def _probe_batch(
    models: Models,
    batch: PromptBatch,
    config: Config,
    noises: int,
    gradient: GradientProbe | None,
) -> ProbeSamples:
    experience = collect(models, batch, config, clock=PhaseClock())
    if gradient is not None:
        gradient.add(experience)
    batch = experience.prompts
    # Only gradients need to know what places earned.
    table = experience.scores.without_places()
    token_ids = experience.rollout.token_ids
    full, steps, cheap_steps = None, models.decoder.steps, config.decode.training_steps
    if steps is not None and cheap_steps is not None and cheap_steps != steps:
        full = decode_in_full(models, batch, token_ids, steps=steps, cheap_steps=cheap_steps)
    models = models.with_decode_steps(cheap_steps)
    single = replace(batch, group_size=1)
    # A decoder of one pass has no noise, but a term may have.
    redrawn = [
        decode_and_score(models, _under_noise(single, number), token_ids[:, :1])[1].raw
        for number in range(noises)
    ]
    target, reconstruction, reconstructed_pixels = _decode_targets(models, single, len(table.names))
    return ProbeSamples(
        prompts=batch.prompts,
        images=experience.images,
        scores=table,
        totals=experience.totals,
        redrawn=torch.cat(redrawn, dim=1),
        target=target,
        reconstruction=reconstruction,
        reconstructed_pixels=reconstructed_pixels,
        copies=_score_copies(models, batch, len(table.names)),
        full=full,
    )


def _under_noise(batch: PromptBatch, number: int) -> PromptBatch:
    seeds = tuple(derive_seed(seed, "probe", number) for seed in batch.decode_seeds)
    return replace(batch, decode_seeds=seeds)


def _decode_targets(
    models: Models, batch: PromptBatch, num_terms: int
) -> tuple[Float32[Tensor, "P R"], Float32[Tensor, "P R"], UInt8[Tensor, "M 3 H W"]]:
    """Scores of the target images, and scores and images of their own tokens."""
    of_targets, of_tokens = (_unscored(batch, num_terms) for _ in range(2))
    rows = [row for row, prompt in enumerate(batch.prompts) if prompt.target is not None]
    if not rows:
        empty = torch.zeros(0, 3, batch.height, batch.width, dtype=torch.uint8)
        return of_targets, of_tokens, empty
    targets = torch.stack([prompt.target for prompt in batch.prompts if prompt.target is not None])
    with out_of_memory_explained("rollout", describe_sampling(batch, models.policy)):
        token_ids = models.policy.tokenize_images(targets, num_sources=batch.num_sources)
    some = prompts_at(batch, torch.tensor(rows))
    images, decoded = decode_and_score(models, some, token_ids.unsqueeze(1))
    with models.phase("reward", describe_decoding(some)):
        given = models.scorer.score(some.prompts, targets[:, None])
    for scores, table in ((of_targets, given), (of_tokens, decoded)):
        scores[rows] = _single_scores(table)
    return of_targets, of_tokens, images.pixels[:, 0]


def _score_copies(models: Models, batch: PromptBatch, num_terms: int) -> Float32[Tensor, "P R"]:
    """Scores of the first source images as they are."""
    if batch.num_sources == 0:
        return _unscored(batch, num_terms)
    sources = torch.stack([prompt.sources[0] for prompt in batch.prompts])
    with models.phase("reward", describe_decoding(batch)):
        return _single_scores(models.scorer.score(batch.prompts, sources[:, None]))


def _unscored(batch: PromptBatch, num_terms: int) -> Float32[Tensor, "P R"]:
    return torch.full((len(batch.prompts), num_terms), torch.nan, dtype=torch.float32)


def _single_scores(table: RewardTable) -> Float32[Tensor, "P R"]:
    """Scores of one image a prompt; NaN where a term does not apply or refused it."""
    return table.raw[:, 0].masked_fill(~table.is_applicable, torch.nan)
