"""Build the trainer of a run, and restore its checkpoint if there is one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from accelerate import Accelerator
from rich.console import Console
from torch.optim import AdamW, Optimizer

from glm_grpo.builders.asynchronous import build_asynchronous_source
from glm_grpo.builders.prompts import Prompts, build_batch, build_evaluation_batches, build_spares
from glm_grpo.builders.settings import collect_settings, loop_settings, step_settings
from glm_grpo.collectors.ray_cluster import RayCluster
from glm_grpo.config import Config
from glm_grpo.data.prompts import PromptSource
from glm_grpo.models.base import Policy
from glm_grpo.models.offload import OptimizerPart
from glm_grpo.run.checkpoints import (
    Checkpoint,
    forget_checkpoints_after,
    prune_checkpoints,
)
from glm_grpo.run.config import read_config
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.optimizer_state import load_optimizer
from glm_grpo.run.recorder import Recorder
from glm_grpo.run.run_state import RunState
from glm_grpo.run.tables import read_metrics
from glm_grpo.training.distributed.processes import Processes
from glm_grpo.training.distributed.strategy import AccelerateStrategy, has_shards
from glm_grpo.training.learner import Learner
from glm_grpo.training.learning_rate import LearningRate
from glm_grpo.training.loop import Trainer
from glm_grpo.training.metrics import StepWork
from glm_grpo.training.monitors.hacking import HackingMonitor
from glm_grpo.training.monitors.recheck import Recheck, RecheckSettings
from glm_grpo.training.moving_average import MovingAverage
from glm_grpo.training.phase import Models
from glm_grpo.training.progress import Progress
from glm_grpo.training.records import RunRecorder
from glm_grpo.training.resume import OpenedRun, start_step
from glm_grpo.training.saver import CheckpointSaver
from glm_grpo.training.sources import ExperienceSource, SynchronousSource
from glm_grpo.training.steps import RewardStep, TargetStep
from glm_grpo.training.targets import TargetSource


@dataclass(frozen=True)
class Launch:
    """Processes of the run, and where it collects.

    Attributes:
        processes: The processes, which agree through this object.
        cluster: Cluster of the collectors; None if this process collects.
        work: Operations of the models on the run's devices; None if the devices' peaks are unknown.
    """

    accelerator: Accelerator
    processes: Processes
    cluster: RayCluster | None = None
    work: StepWork | None = None


def build_trainer(
    config: Config,
    models: Models,
    prompts: Prompts,
    opened: OpenedRun,
    launch: Launch,
    console: Console,
) -> Trainer:
    """Build optimizer, schedule, recorder and loop, and restore the checkpoint if there is one."""
    folder, processes = opened.folder, launch.processes
    learner = _build_learner(config, models, opened, launch)
    state = learner.state
    recheck = _build_recheck(config, models, state, processes)
    evaluation_batches = build_evaluation_batches(config, prompts.held_out, processes)
    recorder = RunRecorder(
        folder,
        processes,
        lambda: _open_files(config, folder, state),
        combine=config.reward.combine,
        work=launch.work,
    )
    progress = Progress(
        total=config.train.steps,
        done=state.step,
        console=console,
        eval_every=config.train.eval_every,
        checkpoint_every=config.train.checkpoint_every,
        untrained=next(iter(read_metrics(folder)), None),
    )
    saver = CheckpointSaver(
        folder,
        learner,
        processes=processes,
        keep=config.train.keep_checkpoints,
        finish_records=recorder.finish,
        announce=progress.phase,
    )
    # Last, because collectors start to work, and only the trainer ends them.
    source = _build_source(config, models, prompts.training, learner, recheck, launch)
    settings = step_settings(config)
    return Trainer(
        models,
        learner,
        step=TargetStep(models, learner, source, settings, recorder)
        if isinstance(source, TargetSource)
        else RewardStep(models, learner, source, recheck, settings, recorder, processes),
        evaluation_batches=evaluation_batches,
        settings=loop_settings(config),
        recorder=recorder,
        saver=saver,
        progress=progress,
        processes=processes,
    )


def _build_learner(config: Config, models: Models, opened: OpenedRun, launch: Launch) -> Learner:
    """Build the learner with a checkpoint's weights and state, in the order that engines need."""
    checkpoint = opened.checkpoint
    if has_shards(launch.accelerator) and launch.accelerator.mixed_precision != "no":
        # The engine would do this too, but after a checkpoint's weights lose what bf16 cannot hold.
        for weight in models.policy.trainable_parameters():
            weight.data = weight.data.float()
    if checkpoint is not None:
        # Before an engine shards them.
        with checkpoint.named():
            models.policy.load_state_tensors(checkpoint.tensors["policy"])
            models.policy.load_reference_tensors(checkpoint.tensors.get("reference", {}))
    with models.offload.phase("update"):
        strategy = AccelerateStrategy(models.policy, launch.accelerator, launch.processes)
        optimizer = _build_optimizer(config, models.policy)
    learning_rate = build_learning_rate(config, optimizer)
    device = launch.accelerator.device
    if config.offload == "modules_and_optimizer" and device.type != "cpu":
        models.offload.add("optimizer", OptimizerPart(optimizer, device=device))
    state = RunState()
    if checkpoint is not None:
        state = _restore(checkpoint, optimizer, learning_rate)
        if models.offload.moves("optimizer"):
            # Its moments were restored onto the device of the weights; move them to CPU memory.
            OptimizerPart(optimizer, device=device).evict()
    state.start_step = start_step(config)
    average = _build_average(config, models.policy, checkpoint)
    return Learner(optimizer, learning_rate, strategy, state, average)


def _build_optimizer(config: Config, policy: Policy) -> AdamW:
    return AdamW(
        policy.trainable_parameters(),
        lr=config.optim.learning_rate,
        betas=config.optim.betas,
        eps=config.optim.epsilon,
        weight_decay=config.optim.weight_decay,
    )


def build_learning_rate(config: Config, optimizer: Optimizer) -> LearningRate:
    """Build the schedule of a run's updates, at its beginning."""
    updates = config.train.updates_per_step
    return LearningRate(
        optimizer,
        peak=config.optim.learning_rate,
        schedule=config.optim.schedule,
        warmup_updates=config.optim.warmup_steps * updates,
        total_updates=config.train.steps * updates,
    )


def _build_average(
    config: Config, policy: Policy, checkpoint: Checkpoint | None
) -> MovingAverage | None:
    if config.eval.ema_decay is None:
        return None
    average = MovingAverage(policy, config.eval.ema_decay)
    if checkpoint is not None:
        average.load(checkpoint.tensors["average"])
    return average


def _build_recheck(
    config: Config, models: Models, state: RunState, processes: Processes
) -> Recheck:
    settings = RecheckSettings(
        every=config.decode.recheck_every,
        groups=config.decode.recheck_groups,
        min_rank_correlation=config.decode.min_rank_correlation,
    )
    return Recheck(models, collect_settings(config), settings, state, processes)


def _build_source(
    config: Config,
    models: Models,
    prompts: PromptSource,
    learner: Learner,
    recheck: Recheck,
    launch: Launch,
) -> ExperienceSource | TargetSource:
    """Build the source of a step's data: own samples, those of collectors, or target pictures."""
    state, learning_rate = learner.state, learner.learning_rate
    batch_for_step = partial(build_batch, config, prompts)
    if launch.cluster is not None:
        return build_asynchronous_source(
            config, models, batch_for_step, recheck, launch.cluster, first_step=state.step + 1
        )
    if config.train.method == "sft":
        return TargetSource(
            models,
            launch.processes,
            batch_for_step=batch_for_step,
            preview=config.anchor.preview,
        )
    spares = partial(build_spares, config, prompts) if config.rollout.refill_rounds else None
    return SynchronousSource(
        models,
        learner.strategy,
        launch.processes,
        batch_for_step=batch_for_step,
        settings_for_step=recheck.collect_settings,
        updates=lambda: learning_rate.updates,
        spares_for_step=spares,
    )


def _open_files(config: Config, folder: RunFolder, at: RunState) -> tuple[Recorder, HackingMonitor]:
    """Open the recorder, truncated to the step where the run resumes, and the hacking monitor."""
    recorder = Recorder(
        folder,
        trackers=config.trackers,
        config=config.model_dump(mode="json"),
        # A resumed run keeps its original name.
        about=read_config(folder).run,
        combine=config.reward.combine,
    )
    # First, because a checkpoint whose records are gone could not be resumed from.
    forget_checkpoints_after(folder, at.step)
    # A run that has finished no step repeats its evaluation of step 0.
    recorder.truncate_after(at.step if at.step > 0 else -1)
    # A kill may have come between writing a checkpoint and removing old ones.
    prune_checkpoints(folder, config.train.keep_checkpoints, at.best_step)
    return recorder, HackingMonitor(
        folder,
        watch=config.reward.watch,
        evaluated=[name for name, term in config.reward.terms.items() if term.when == "evaluation"],
        margin=config.reward.canary_margin,
    )


def _restore(checkpoint: Checkpoint, optimizer: Optimizer, learning_rate: LearningRate) -> RunState:
    """Restore a checkpoint's state, except the weights, into the objects of a run."""
    state = checkpoint.run_state()
    load_optimizer(optimizer, checkpoint.tensors["optimizer"], state.optimizer.model_dump())
    learning_rate.set(state.updates)
    return RunState(
        step=checkpoint.step,
        best_step=state.best_step,
        best_total=-torch.inf if state.best_total is None else state.best_total,
        skipped_in_a_row=state.skipped_in_a_row,
        full_decode_from=state.full_decode_from,
    )
