"""Build what learns: weights, engine, optimizer and state, restored from a checkpoint if any."""

from __future__ import annotations

import torch
from torch.optim import AdamW, Optimizer

from glm_grpo.config import Config
from glm_grpo.grpo.learning_rate import LearningRate
from glm_grpo.models.adapted_policy import AdaptedPolicy
from glm_grpo.models.offload import OptimizerPart
from glm_grpo.run.checkpoints import Checkpoint
from glm_grpo.run.finding import start_step
from glm_grpo.run.optimizer_state import load_optimizer
from glm_grpo.run.run_state import RunState
from glm_grpo.setup.prepared_run import PreparedRun
from glm_grpo.training.distributed.strategy import AccelerateStrategy, has_shards
from glm_grpo.training.learner import RunLearner
from glm_grpo.training.models import Models
from glm_grpo.training.moving_average import MovingAverage


def build_learner(prepared: PreparedRun, models: Models) -> RunLearner:
    """Build the learner of a run: at its beginning, or as its checkpoint stored it."""
    config, checkpoint = prepared.config, prepared.checkpoint
    strategy, optimizer = _distribute_policy(prepared, models)
    learning_rate = build_learning_rate(config, optimizer)
    state = RunState()
    if checkpoint is not None:
        state = _restore(checkpoint, optimizer, learning_rate, strategy)
    state.start_step = start_step(config)
    _offload_optimizer(config, models, optimizer, prepared.device)
    return RunLearner(
        policy=models.policy,
        optimizer=optimizer,
        learning_rate=learning_rate,
        strategy=strategy,
        max_grad_norm=config.optim.max_grad_norm,
        state=state,
        average=_build_average(config, models.policy, checkpoint),
    )


def _distribute_policy(prepared: PreparedRun, models: Models) -> tuple[AccelerateStrategy, AdamW]:
    """Load the weights, then let the engine wrap or shard them, then optimize what it made."""
    policy, accelerator, checkpoint = models.policy, prepared.accelerator, prepared.checkpoint
    if has_shards(accelerator) and accelerator.mixed_precision != "no":
        # The engine would do this too, but after a checkpoint's weights lose what bf16 cannot hold.
        for weight in policy.trainable_parameters():
            weight.data = weight.data.float()
    if checkpoint is not None:
        with checkpoint.named():
            policy.load_state_tensors(checkpoint.tensors["policy"])
            policy.reference.load_tensors(checkpoint.tensors.get("reference", {}))
    with models.offload.phase("update"):
        strategy = AccelerateStrategy(policy, accelerator, prepared.processes)
        return strategy, _build_optimizer(prepared.config, policy)


def _offload_optimizer(
    config: Config, models: Models, optimizer: Optimizer, device: torch.device
) -> None:
    """Let the optimizer's moments wait in CPU memory, if the config says so."""
    if config.offload != "modules_and_optimizer" or device.type == "cpu":
        return
    part = OptimizerPart(optimizer, device=device)
    # Restored moments lie on the device of the weights.
    part.evict()
    models.offload.add("optimizer", part)


def _build_optimizer(config: Config, policy: AdaptedPolicy) -> AdamW:
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
    config: Config, policy: AdaptedPolicy, checkpoint: Checkpoint | None
) -> MovingAverage | None:
    if config.eval.ema_decay is None:
        return None
    average = MovingAverage(policy, config.eval.ema_decay)
    if checkpoint is not None:
        average.load(checkpoint.tensors["average"])
    return average


def _restore(
    checkpoint: Checkpoint,
    optimizer: Optimizer,
    learning_rate: LearningRate,
    strategy: AccelerateStrategy,
) -> RunState:
    """Restore a checkpoint's state, except the weights, into the objects of a run."""
    state = checkpoint.run_state()
    if state.loss_scale is not None:
        strategy.loss_scale.value, strategy.loss_scale.finite_updates = state.loss_scale
    load_optimizer(optimizer, checkpoint.tensors["optimizer"], state.optimizer.model_dump())
    learning_rate.set(state.updates)
    return RunState(
        step=checkpoint.step,
        best_step=state.best_step,
        best_total=-torch.inf if state.best_total is None else state.best_total,
        skipped_in_a_row=state.skipped_in_a_row,
        canaries_outside=state.canaries_outside,
    )
