"""Check a run before it starts, cheapest checks first.

Both the start of a run and `glm-grpo check` use these checks. What a type or a schema can refuse
was refused earlier, when the config was validated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm_grpo.builders.models import (
    begin_with,
    find_planner,
    find_start,
    hint_at_size,
    load_models,
)
from glm_grpo.builders.prompts import (
    Prompts,
    build_prompts,
    check_model,
    check_prompt_sets,
    check_tied,
    hint_at_prompts,
    list_texts,
)
from glm_grpo.collectors.ray_cluster import require_ray
from glm_grpo.config import Config, effective_config
from glm_grpo.errors import ConfigError, Errors
from glm_grpo.models.base import ReservedTokens
from glm_grpo.models.planning import UNDIVIDED, Parallelism, Planner
from glm_grpo.plan.fit import check_fit
from glm_grpo.run.trackers import check_trackers
from glm_grpo.training.distributed.processes import ALONE, Processes
from glm_grpo.training.phase import Models
from rewards.types import RewardError


@dataclass(frozen=True)
class Checked:
    """A config that can start, before its models are loaded.

    Attributes:
        config: Config whose memory and speed keys have values that work.
        note: Line about adjusted keys; empty if all work as given.
        prompts: All prompts, checked.
        planner: Planner of the model; None if its sizes are unknown.
        memory: Description of the memory needed and available.
        hints: Hints on sizes and prompts that are probably wrong.
        texts: Lines on the texts that the prompts ask for.
    """

    config: Config
    note: str
    prompts: Prompts
    planner: Planner | None
    memory: str
    hints: list[str]
    texts: list[str]


def check_before_loading(
    config: Config,
    device: torch.device,
    *,
    parallelism: Parallelism = UNDIVIDED,
    processes: Processes = ALONE,
) -> Checked:
    """Check what needs no model, and leave nothing behind.

    Args:
        config: Config as given.
        device: Device the run works on.
        parallelism: How the run is distributed.
        processes: Processes that check together.

    Raises:
        GlmGrpoError: A check failed; those of model, prompts and terms are reported together.
        PeerError: A check failed in another process.
    """
    check_trackers(config.trackers)
    if config.train.mode == "async":
        require_ray()
    effective = effective_config(
        config, processes=parallelism.count, is_sharded=parallelism.is_sharded
    )
    config = effective.config
    if config.train.resume is None:
        find_start(config)
    with processes.together():
        prompts = _check_parts(config)
        sources = (prompts.training, prompts.held_out)
        planner = find_planner(config.model.path)
        memory = check_fit(config, planner, sources, device, parallelism)
    return Checked(
        config=config,
        note=effective.note,
        prompts=prompts,
        planner=planner,
        memory=memory,
        hints=[*hint_at_size(config), *hint_at_prompts(config, prompts)],
        texts=list_texts(config, prompts),
    )


def _check_parts(config: Config) -> Prompts:
    """Check model, prompts and terms, none of which needs another."""
    errors, reserved = Errors(), ReservedTokens()
    with errors.kept():
        reserved = check_model(config)
    with errors.kept():
        prompts = build_prompts(config, reserved)
        check_tied(config, prompts)
    for term in config.reward.terms.values():
        with errors.kept():
            try:
                term.check()
            except RewardError as error:
                raise ConfigError(str(error)) from error
    errors.raise_all()
    return prompts


def load_checked(
    config: Config,
    prompts: Prompts,
    device: torch.device,
    *,
    is_sharded: bool = False,
    is_beginning: bool = True,
) -> tuple[Models, list[str]]:
    """Load the models, and check that they can work with the prompts.

    Args:
        config: `Checked.config`.
        prompts: `Checked.prompts`.
        device: Device the run works on.
        is_sharded: Whether the engine places the policy's weights in shards.
        is_beginning: Whether to load the weights that `model.start_from` names; a resumed run has
            its own.

    Returns:
        The models, and lines on terms that apply to few prompts.

    Raises:
        GlmGrpoError, RewardError: Loading failed, or a prompt cannot be rewarded.
    """
    models = load_models(
        config, device, needs_reference=config.needs_reference, is_sharded=is_sharded
    )
    if is_beginning:
        begin_with(models, find_start(config))
    return models, check_prompt_sets(config, models, prompts)
