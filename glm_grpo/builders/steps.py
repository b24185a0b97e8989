"""Build the step that a run repeats, with the source of what it learns from."""

from __future__ import annotations

from functools import partial

from glm_grpo.builders.asynchronous import build_asynchronous_source
from glm_grpo.builders.launch import Launch
from glm_grpo.builders.prompts import build_batch, build_spares
from glm_grpo.builders.settings import collect_settings, step_settings
from glm_grpo.config import Config
from glm_grpo.data.prompts import PromptSource
from glm_grpo.training.learner import Learner
from glm_grpo.training.monitors.recheck import Recheck, RecheckSettings
from glm_grpo.training.phase import Models
from glm_grpo.training.records import Records
from glm_grpo.training.sources import ExperienceSource, SynchronousSource
from glm_grpo.training.steps import RewardStep, Step, SupervisedStep
from glm_grpo.training.targets import TargetSource


def build_step(
    config: Config,
    models: Models,
    prompts: PromptSource,
    learner: Learner,
    records: Records,
    launch: Launch,
) -> Step:
    """Build the step; collectors start to work at once, and only the trainer ends them."""
    settings, processes = step_settings(config), launch.processes
    if config.train.method == "sft":
        targets = TargetSource(
            models,
            processes,
            batch_for_step=partial(build_batch, config, prompts),
            preview=config.anchor.preview,
        )
        return SupervisedStep(models, learner, targets, settings, records)
    rechecks = RecheckSettings(
        every=config.decode.recheck_every,
        groups=config.decode.recheck_groups,
        min_rank_correlation=config.decode.min_rank_correlation,
    )
    recheck = Recheck(models, collect_settings(config), rechecks, processes)
    source = _build_source(config, models, prompts, learner, launch)
    return RewardStep(models, learner, source, recheck, settings, records, processes)


def _build_source(
    config: Config,
    models: Models,
    prompts: PromptSource,
    learner: Learner,
    launch: Launch,
) -> ExperienceSource:
    """Build the source of experience: the run's own models, or collectors."""
    batch_for_step = partial(build_batch, config, prompts)
    if launch.cluster is not None:
        first_step = learner.state.step + 1
        return build_asynchronous_source(
            config, models, batch_for_step, launch.cluster, first_step=first_step
        )
    return SynchronousSource(
        models,
        learner.strategy,
        launch.processes,
        batch_for_step=batch_for_step,
        settings=collect_settings(config),
        spares_for_step=partial(build_spares, config, prompts)
        if config.rollout.refill_rounds
        else None,
    )
