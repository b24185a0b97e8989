"""`glm-grpo probe`: sample the base model and report on each reward term."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from glm_grpo.config import Config
from glm_grpo.data.prompts import PromptSource, part_of_batch
from glm_grpo.models.quiet import quiet_libraries
from glm_grpo.output import counted, describe_bytes
from glm_grpo.plan.machine_memory import cpu_memory
from glm_grpo.setup.prepared_run import prepare
from glm_grpo.studio.probe.figures import ProbeReport, report_probe
from glm_grpo.studio.probe.gradient import (
    GradientProbe,
    check_batches,
    check_memory,
    credits_compared,
    gradient_bytes,
)
from glm_grpo.studio.probe.page import write_probe
from glm_grpo.studio.probe.probe import sample_probe
from glm_grpo.training.batches import build_batch
from glm_grpo.training.models import Models
from glm_grpo.types import PromptBatch
from rewards.base import has_needs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WrittenProbe:
    """Figures of a probe, and the page that shows them."""

    report: ProbeReport
    page: Path


def probe_config(
    config: Config,
    *,
    num_prompts: int,
    noises: int,
    weights: Sequence[float] | None,
    directory: Path,
) -> WrittenProbe:
    """Sample the base model, and show what each reward term measures on it.

    Args:
        num_prompts: Number of training prompts to sample, in batches of the size of a step; at most
            all, and the last batch may be smaller.
        noises: Noises one sample of each prompt is decoded under besides, >= 2.
        weights: Measure gradients with credit by image and by place, also with these values of
            `advantage.reward_to_go`; None: measure none.
    """
    quiet_libraries()
    prepared = prepare(config)
    config = prepared.config
    batches = probed_batches(config, prepared.prompts.training, num_prompts)
    if weights is None:
        prepared = replace(prepared, config=config.without_reference())
    else:
        check_batches(len(_whole(config, batches)), config.rollout.prompts_per_step)
    scorer = prepared.load_scorer()
    for line in prepared.check_scored(scorer):
        logger.warning("%s", line)
    models = prepared.load(scorer)
    gradient = None if weights is None else _build_gradient(config, models, batches, weights)
    if (directory / "index.html").exists():
        logger.warning(
            "%s holds a probe, which this one replaces when it is done; --output names another "
            "folder",
            directory,
        )
    samples = sample_probe(models, batches, config, noises=noises, gradient=gradient)
    found = None if gradient is None else gradient.report()
    report = report_probe(samples, config, found)
    return WrittenProbe(report, write_probe(report, samples, directory))


def has_credit_by_place(config: Config, batches: Sequence[PromptBatch]) -> bool:
    """Whether credit by place can differ from credit by image here."""
    if config.loss.kind == "gmpo":
        # It clips an image by the sign of its one advantage.
        return False
    prompts = [prompt for batch in batches for prompt in batch.prompts]
    return any(
        term.has_score_map()
        and term.weight != 0
        and any(has_needs(prompt, term.needs()) for prompt in prompts)
        for term in config.reward.terms.values()
    )


def _whole(config: Config, batches: Sequence[PromptBatch]) -> list[PromptBatch]:
    return [each for each in batches if len(each.prompts) == config.rollout.prompts_per_step]


def _build_gradient(
    config: Config, models: Models, batches: Sequence[PromptBatch], weights: Sequence[float]
) -> GradientProbe:
    """Build what measures gradients, and log what it costs."""
    whole = _whole(config, batches)
    by_place = has_credit_by_place(config, batches)
    weights = credits_compared(config.advantage.reward_to_go, weights) if by_place else ()
    needed = gradient_bytes(models.policy, batches=len(whole), weights=weights)
    check_memory(needed, cpu_memory(), batches=len(whole))
    images = len(whole) * config.rollout.prompts_per_step * config.rollout.group_size
    logger.info(
        "--gradient: computes %s of each of %d batches: replays %d images forwards and "
        "backwards besides the rest; %s of CPU memory. After the first batch, the time left is "
        "shown",
        counted(1 + len(weights), "gradient"),
        len(whole),
        (1 + len(weights)) * images,
        describe_bytes(needed),
    )
    return GradientProbe(models, config, weights)


def probed_batches(config: Config, prompts: PromptSource, num_prompts: int) -> list[PromptBatch]:
    """Batches of the first steps, cut to the number of prompts."""
    at_once = config.rollout.prompts_per_step
    if num_prompts > len(prompts):
        logger.info(
            "--prompts %d: there are only %d, so all are sampled", num_prompts, len(prompts)
        )
        num_prompts = len(prompts)
    steps = math.ceil(num_prompts / at_once)
    batches = [build_batch(config, prompts, step) for step in range(1, steps + 1)]
    rest = num_prompts - at_once * (len(batches) - 1)
    return [*batches[:-1], part_of_batch(batches[-1], range(rest))]
