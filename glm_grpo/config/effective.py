"""Compute the values a run works with: adjust memory and speed keys that cannot work as given.

The run folder's `config.yaml` keeps the values as given; only the computing code reads these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glm_grpo.config.losses import ClippedLoss
from glm_grpo.config.root import Config
from glm_grpo.output import counted

_FIELDS: Mapping[str, str] = {"async": "asynchronous"}
"""Python names of sections whose name differs from the config key."""


@dataclass(frozen=True)
class EffectiveConfig:
    """The values a run works with.

    Attributes:
        config: The given config, with memory and speed keys adjusted where they cannot work as
            given.
        note: One line about the adjusted keys; empty if there are none.
    """

    config: Config
    note: str


@dataclass(frozen=True)
class _Adjustment:
    key: str
    given: object
    used: object
    reason: str


def effective_config(
    config: Config, *, processes: int = 1, is_sharded: bool = False
) -> EffectiveConfig:
    """Set memory and speed keys to the nearest value that works.

    Args:
        processes: Number of processes that train together.
        is_sharded: Whether the policy is sharded over them.
    """
    images = math.ceil(config.rollout.prompts_per_step / processes) * _images_each(config)
    adjustments = _adjustments(config, images, is_sharded=is_sharded)
    sections: dict[str, dict[str, Any]] = {}
    for each in adjustments:
        section, _, name = each.key.rpartition(".")
        sections.setdefault(_FIELDS.get(section, section), {})[name] = each.used
    # `offload` belongs to no section.
    changed: dict[str, Any] = dict(sections.pop("", {}))
    for field, values in sections.items():
        changed[field] = getattr(config, field).model_copy(update=values)
    notes = [
        f"{each.key}: {each.used} is used instead of {each.given} ({each.reason})"
        for each in adjustments
    ]
    size = config.train.micro_batch_size
    if size < images and images % size:
        notes.append(
            f"train.micro_batch_size {size} leaves {images % size} of {images} images for the last "
            f"of {math.ceil(images / size)} passes"
        )
    if config.optim.warmup_steps > config.train.steps:
        # Not truncated: steps may be added later.
        notes.append(
            f"optim.warmup_steps {config.optim.warmup_steps}: the run ends after train.steps "
            f"{config.train.steps}, before optim.learning_rate is reached"
        )
    notes += _without_effect(config)
    return EffectiveConfig(config.model_copy(update=changed), "; ".join(notes))


def _images_each(config: Config) -> int:
    """Images of each prompt that the update learns from."""
    return 1 if config.train.method == "sft" else config.rollout.group_size


def _without_effect(config: Config) -> list[str]:
    loss, train, notes = config.loss, config.train, []
    if train.method == "sft":
        return [
            "train.method sft: a step learns from target images; rollout.group_size, "
            "rollout.dynamic_sampling_rounds, advantage, loss, decode.rollout_steps and sft "
            "(except sft.preview) have no effect; rewards only score evaluations"
        ]
    is_on_policy = train.mode == "sync" and train.updates_per_step == 1
    of_ratios = []
    if loss.kind not in ("clipped", "custom"):
        of_ratios.append(f"loss.kind {loss.kind}")
    if isinstance(loss, ClippedLoss) and loss.ratio_level == "sequence":
        of_ratios.append("loss.ratio_level sequence")
    elif isinstance(loss, ClippedLoss):
        of_ratios += [
            f"loss.{name} {getattr(loss, name):g}"
            for name in ("clip_low", "clip_high")
            if getattr(loss, name) != ClippedLoss.model_fields[name].default
        ]
    if isinstance(loss, ClippedLoss) and loss.two_sided_clip is not None:
        of_ratios.append(f"loss.two_sided_clip {loss.two_sided_clip:g}")
    if is_on_policy and of_ratios:
        notes.append(
            f"{', '.join(of_ratios)}: no effect with one update per rollout, where all ratios are "
            "1 (train.epochs_per_rollout, train.minibatches)"
        )
    if config.rollout.dynamic_sampling_rounds and loss.kl_coef_in_reward > 0:
        notes.append(
            "rollout.dynamic_sampling_rounds: no effect when loss.kl_placement is reward, because "
            "the KL differs between images with equal scores"
        )
    if loss.reference_sync_steps is not None and loss.kl_coef == 0:
        notes.append("loss.reference_sync_steps: no effect when loss.kl_coef is 0")
    if train.skip_zero_std and not loss.weighs_advantages_alone:
        notes.append(
            "train.skip_zero_std: no effect when loss.kl_coef (in the loss), "
            "loss.kl_behaviour_coef, loss.entropy_coef or a custom loss also uses images with "
            "advantage 0"
        )
    return notes


def _adjustments(config: Config, images: int, *, is_sharded: bool) -> list[_Adjustment]:
    """Adjustments needed when the busiest process handles this many images."""
    prompts = config.rollout.prompts_per_step
    section, each = config.asynchronous, config.train.updates_per_step
    # Batches that may be in flight at once: the next step's batch, plus those that will not be too
    # old by the time earlier updates are done.
    at_once = section.max_policy_age // each + 1
    is_cheap = (
        config.decode.rollout_steps not in (None, config.decode.steps)
        and config.train.method == "grpo"
    )
    is_asynchronous = config.train.mode == "async"
    limits = [
        ("train.micro_batch_size", images, f"a step has only {counted(images, 'image')}", True),
        ("decode.recheck_groups", prompts, "a step has no more prompts", is_cheap),
        (
            "async.collectors",
            at_once,
            "async.max_policy_age allows no more batches in progress",
            is_asynchronous,
        ),
        (
            "async.push_every",
            at_once * each,
            "async.max_policy_age requires newer weights by then",
            is_asynchronous,
        ),
    ]
    found = []
    for key, limit, reason, is_read in limits:
        name, _, option = key.partition(".")
        given = getattr(getattr(config, _FIELDS.get(name, name)), option)
        if is_read and given > limit:
            found.append(_Adjustment(key, given, limit, reason))
    if is_sharded and config.offload == "modules_and_optimizer":
        reason = "the optimizer state is sharded"
        found.append(_Adjustment("offload", config.offload, "modules", reason))
    return found
