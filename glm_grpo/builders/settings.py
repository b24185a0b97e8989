"""Turn sections of the config into the plain values that the loop receives."""

from __future__ import annotations

from glm_grpo.config import Config
from glm_grpo.grpo.update import UpdateSettings
from glm_grpo.training.collect import CollectSettings
from glm_grpo.training.loop import LoopSettings
from glm_grpo.training.steps import StepSettings


def collect_settings(config: Config) -> CollectSettings:
    """Plain values for collecting experience."""
    return CollectSettings(
        combine=config.reward.combine,
        advantage=config.advantage,
        loss=config.loss,
        micro_batch_size=config.train.micro_batch_size,
        decode_steps=config.decode.rollout_steps or config.decode.steps,
        refill_rounds=config.rollout.refill_rounds,
    )


def update_settings(config: Config) -> UpdateSettings:
    """Plain values for learning from experience."""
    return UpdateSettings(
        loss=config.loss,
        max_grad_norm=config.optim.max_grad_norm,
        micro_batch_size=config.train.micro_batch_size,
        updates_per_rollout=config.train.updates_per_rollout,
        minibatches_per_rollout=config.train.minibatches_per_rollout,
        is_skipping_flat=config.train.skip_flat,
    )


def loop_settings(config: Config) -> LoopSettings:
    """Plain values for the loop."""
    return LoopSettings(
        steps=config.train.steps,
        eval_every=config.train.eval_every,
        checkpoint_every=config.train.checkpoint_every,
        is_stopping_on_hacking=config.reward.on_hacking == "stop",
    )


def step_settings(config: Config) -> StepSettings:
    """Plain values for a step."""
    return StepSettings(
        steps=config.train.steps,
        update=update_settings(config),
        sft_term=config.anchor,
        reference_mix=config.loss.reference_mix,
        reference_sync_every=config.loss.reference_sync_every if config.needs_reference else None,
    )
