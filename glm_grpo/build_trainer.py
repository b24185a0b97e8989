"""Config -> optimizer, schedule, records and loop of a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from accelerate import Accelerator
from rich.console import Console
from torch.optim import AdamW, Optimizer

from glm_grpo.build import (
    Prompts,
    build_batch,
    build_evaluation_batches,
    collect_settings,
    loop_settings,
)
from glm_grpo.build_collectors import build_asynchronous_source
from glm_grpo.config import Config
from glm_grpo.models.glm_image.offload import OptimizerPart
from glm_grpo.models.glm_image.policy import Policy
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_evaluation, read_metrics
from glm_grpo.training.asynchronous.ray_cluster import RayCluster
from glm_grpo.training.checkpoint.files import (
    Checkpoint,
    forget_checkpoints_after,
    prune_checkpoints,
)
from glm_grpo.training.checkpoint.optimizer_state import load_optimizer
from glm_grpo.training.checkpoint.resume import OpenedRun
from glm_grpo.training.checkpoint.run_state import Progression
from glm_grpo.training.collect import Stage
from glm_grpo.training.distributed.processes import OnMain, Team
from glm_grpo.training.distributed.strategy import Engine, has_shards
from glm_grpo.training.learning_rate import LearningRate
from glm_grpo.training.loop import Trainer
from glm_grpo.training.monitors.hacking import Sentinel
from glm_grpo.training.monitors.recheck import Recheck, RecheckSettings
from glm_grpo.training.recording.progress import Progress
from glm_grpo.training.recording.recorder import Recorder
from glm_grpo.training.recording.records import Records
from glm_grpo.training.sources import ExperienceSource, SynchronousSource


@dataclass(frozen=True)
class Launch:
    """The processes of a run.

    Attributes:
        accelerator: Of this process.
        team: What they agree through.
        cluster: In which collectors run; None where this process collects.
    """

    accelerator: Accelerator
    team: Team
    cluster: RayCluster | None = None


def build_trainer(
    config: Config,
    stage: Stage,
    prompts: Prompts,
    opened: OpenedRun,
    launch: Launch,
    console: Console,
) -> Trainer:
    """Optimizer, schedule, records and loop, with the state of the checkpoint if there is one."""
    checkpoint, team = opened.checkpoint, launch.team
    if has_shards(launch.accelerator) and launch.accelerator.mixed_precision != "no":
        # As the engine would, but before a checkpoint's weights lose what bf16 cannot hold.
        for weight in stage.policy.trainable_parameters():
            weight.data = weight.data.float()
    if checkpoint is not None:
        # Before an engine cuts them up.
        with checkpoint.named():
            stage.policy.load_state_tensors(checkpoint.of("policy"))
    with stage.residency.phase("update"):
        engine = Engine(stage.policy, launch.accelerator, team)
        optimizer = _build_optimizer(config, stage.policy)
    learning_rate = _build_learning_rate(config, optimizer)
    device = launch.accelerator.device
    if config.offload == "modules_and_optimizer" and device.type != "cpu":
        stage.residency.add("optimizer", OptimizerPart(optimizer, device=device))
    progression = Progression()
    if checkpoint is not None:
        progression = _restore(checkpoint, optimizer, learning_rate)
        progression.best_total = _comparable_best(config, opened.folder, progression)
        if stage.residency.moves("optimizer"):
            # Its moments came back to where the weights are, and wait in CPU memory.
            OptimizerPart(optimizer, device=device).evict()
    recheck = Recheck(
        stage,
        collect_settings(config),
        RecheckSettings(
            every=config.decode.recheck_every,
            groups=config.decode.recheck_groups,
            min_rank_correlation=config.decode.min_rank_correlation,
        ),
        progression,
        team,
    )
    batch_for_step = partial(build_batch, config, prompts.training)
    source: ExperienceSource = SynchronousSource(
        stage,
        engine,
        team,
        batch_for_step=batch_for_step,
        settings_for_step=recheck.collect_settings,
        updates=lambda: learning_rate.updates,
    )
    folder = opened.folder
    evaluation_batches = build_evaluation_batches(config, prompts.held_out, team)
    records = OnMain(team, lambda: _open_records(config, folder, progression))
    progress = Progress(
        total=config.train.steps,
        done=progression.step,
        console=console,
        eval_every=config.train.eval_every,
        checkpoint_every=config.train.checkpoint_every,
        untrained=next(iter(read_metrics(folder)), None),
    )
    # Last: collectors begin to work, and the trainer ends them.
    if launch.cluster is not None:
        source = build_asynchronous_source(
            config,
            stage,
            batch_for_step,
            recheck,
            launch.cluster,
            first_step=progression.step + 1,
        )
    return Trainer(
        stage,
        optimizer,
        learning_rate,
        source=source,
        evaluation_batches=evaluation_batches,
        settings=loop_settings(config),
        folder=folder,
        records=records,
        recheck=recheck,
        progress=progress,
        progression=progression,
        engine=engine,
        team=team,
    )


def _build_optimizer(config: Config, policy: Policy) -> AdamW:
    return AdamW(
        policy.trainable_parameters(),
        lr=config.optim.learning_rate,
        betas=config.optim.betas,
        eps=config.optim.epsilon,
        weight_decay=config.optim.weight_decay,
    )


def _build_learning_rate(config: Config, optimizer: Optimizer) -> LearningRate:
    updates = config.train.updates_per_rollout
    return LearningRate(
        optimizer,
        peak=config.optim.learning_rate,
        schedule=config.optim.schedule,
        warmup_updates=config.optim.warmup_steps * updates,
        total_updates=config.train.steps * updates,
    )


def _open_records(config: Config, folder: RunFolder, at: Progression) -> Records:
    """The records of a run, without what was recorded after the step it goes on from."""
    recorder = Recorder(
        folder,
        trackers=config.trackers,
        config=config.model_dump(mode="json"),
        combine=config.reward.combine,
    )
    # First: a checkpoint whose records are gone could not be gone on from.
    forget_checkpoints_after(folder, at.step)
    # A run that has finished no step makes its evaluation of step 0 anew.
    recorder.truncate_after(at.step if at.step > 0 else -1)
    # A kill may have come between the checkpoint and the removal of those no longer kept.
    prune_checkpoints(folder, config.train.keep_checkpoints, at.best_step)
    sentinel = Sentinel(folder, watch=config.reward.watch, margin=config.reward.canary_margin)
    return Records(folder, recorder, sentinel, combine=config.reward.combine)


def _restore(
    checkpoint: Checkpoint, optimizer: Optimizer, learning_rate: LearningRate
) -> Progression:
    """Puts a checkpoint's state, save the weights, back into the objects of a run."""
    state = checkpoint.run_state()
    with checkpoint.named():
        load_optimizer(optimizer, checkpoint.of("optimizer"), state.optimizer.model_dump())
    learning_rate.set(state.updates)
    return Progression(
        step=checkpoint.step,
        best_step=state.best_step,
        best_total=-torch.inf if state.best_total is None else state.best_total,
        skipped_in_a_row=state.skipped_in_a_row,
        full_decode_from=state.full_decode_from,
    )


def _comparable_best(config: Config, folder: RunFolder, at: Progression) -> float:
    """The best total so far, on the scale that later evaluations have.

    Checkpoints may have been written when `normalize_then_sum` totals of evaluations were relative
    to their group.
    """
    if at.best_step is None or config.reward.combine == "weighted_sum":
        return at.best_total
    if not folder.evaluation_path(at.best_step).exists():
        return at.best_total
    totals = read_evaluation(folder, at.best_step)["total"].to_numpy()
    return torch.tensor(totals).mean().item()
