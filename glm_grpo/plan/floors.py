"""Compute the minimum time of each phase on a device, from bytes moved and operations done.

A floor is the time at the device's published peak performance, without any loss. It is not a
prediction: real runs take longer, and everything omitted here (norms, softmax, adapters, optimizer,
kernel launches, reward networks) only adds to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from glm_grpo.config import Config
from glm_grpo.data.prompts import PromptSource
from glm_grpo.models.base import DTYPES
from glm_grpo.models.planning import LanguageShape, MemoryPlan, Planner
from glm_grpo.models.sampling import prompts_at_once
from glm_grpo.plan.devices import DeviceSpeed, find_device
from glm_grpo.plan.memory import BatchShape, read_bytes, training_batch
from glm_grpo.training.metrics import StepWork


@dataclass(frozen=True)
class PhaseFloor:
    """Minimum time of a phase.

    Attributes:
        seconds: Minimum time on one device.
        flops: Operations of the models on one device; 0 if nothing is computed.
    """

    seconds: float
    flops: float = 0.0


def step_floors(
    config: Config,
    planner: Planner,
    *,
    prompt_tokens: int,
    plan: MemoryPlan,
    device: DeviceSpeed,
    processes: int = 1,
) -> dict[str, PhaseFloor]:
    """Floors by phase; reward terms have none, because their work is unknown.

    Args:
        prompt_tokens: Tokens of the longest prompt; all are assumed to be as long.
        plan: Memory plan of the same config, which contains the bytes that offloading moves.
        processes: Processes that share the prompts, each on such a device; their communication is
            not counted.
    """
    device = device.in_dtype(config.model.dtype)
    batch = training_batch(config, prompt_tokens=prompt_tokens, processes=processes)
    work = _work(planner, config, batch, device.flops)
    rollout, decode, update = (
        batch.images * flops for flops in (work.rollout, work.decode, work.update)
    )
    floors = {
        "rollout": PhaseFloor(rollout_floor(planner, config, batch, device), rollout),
        "decode": PhaseFloor(decode / device.flops, decode),
        "update": PhaseFloor(update / device.flops, update),
    }
    if config.train.method == "sft":
        floors = {"update": floors["update"]}
    if plan.moved_in:
        floors["offload"] = PhaseFloor((plan.moved_in + plan.moved_out) / device.link)
    return floors


def step_work(
    config: Config,
    planner: Planner,
    *,
    prompt_tokens: int,
    device: DeviceSpeed,
    processes: int = 1,
) -> StepWork:
    """Operations per image in each phase, with the peak performance of a run's devices.

    Args:
        prompt_tokens: Tokens of a prompt; all are assumed to be as long.
    """
    batch = training_batch(config, prompt_tokens=prompt_tokens)
    return _work(planner, config, batch, device.in_dtype(config.model.dtype).flops * processes)


def _work(planner: Planner, config: Config, batch: BatchShape, peak_flops: float) -> StepWork:
    return StepWork(
        rollout=rollout_flops(planner, config, batch) / batch.images,
        decode=float(planner.decode_flops(config)),
        update=update_flops(planner, config, batch) / batch.images,
        peak_flops=peak_flops,
        skips_zero_std=config.train.skip_zero_std and config.loss.weighs_advantages_alone,
    )


def work_of_run(
    config: Config,
    planner: Planner | None,
    prompts: PromptSource,
    device: torch.device,
    processes: int,
) -> StepWork | None:
    """Work that a run's metrics count, assuming the median prompt length for all prompts.

    For an asynchronous run, only the update: collectors may use other devices.

    Args:
        planner: Planner of the model; None if its sizes are unknown.

    Returns:
        The work; None if the peak of the device or the sizes of the model are unknown.
    """
    speed = find_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if planner is None or speed is None:
        return None
    captions = sorted(prompts.captions(), key=len)
    tokens = planner.longest_prompt_tokens(
        [captions[len(captions) // 2]], height=config.rollout.height, width=config.rollout.width
    )
    work = step_work(
        config,
        planner,
        prompt_tokens=planner.usual_prompt_tokens if tokens is None else tokens,
        device=speed,
        processes=processes,
    )
    if config.train.mode == "async":
        return replace(work, rollout=0.0, decode=0.0)
    return work


def rollout_floor(
    planner: Planner, config: Config, batch: BatchShape, device: DeviceSpeed
) -> float:
    """Seconds to read the prompts and sample all tokens, each limited by memory or operations.

    A prompt's keys and values are read once per group.
    """
    return sum(
        max(read / device.bandwidth, flops / device.flops)
        for read, flops in _token_steps(planner, config, batch)
    )


def rollout_flops(planner: Planner, config: Config, batch: BatchShape) -> int:
    """Operations to read the prompts and sample all tokens; those of adapters are not counted."""
    return sum(flops for _, flops in _token_steps(planner, config, batch))


def _token_steps(planner: Planner, config: Config, batch: BatchShape) -> Iterator[tuple[int, int]]:
    """Bytes read and operations done: for the prompts, then for each token of every sample."""
    language, rows = planner.language, planner.rows_per_image(config.rollout)
    length, tokens = planner.sequence_tokens(config, batch.prompt_tokens)
    weights = read_bytes(language, config.model)
    a_token = language.cache_bytes(DTYPES[config.model.dtype])
    layers, head = 2 * language.layer_entries, 2 * language.head_entries
    reading = rows * (layers * length + _attention_flops(language, _causal_pairs(length))) + head
    at_once = prompts_at_once(batch.prompts, batch.group_size, config.rollout.batch_size)
    for start in range(0, batch.prompts, at_once):
        prompts = min(at_once, batch.prompts - start)
        images = prompts * batch.group_size
        yield weights, prompts * reading
        # The last token is sampled, but not processed further.
        for generated in range(1, tokens):
            read = prompts if language.is_prompt_shared else images
            cached = rows * (read * length + images * generated)
            flops = rows * (layers + _attention_flops(language, length + generated)) + head
            yield weights + cached * a_token, images * flops


def update_flops(planner: Planner, config: Config, batch: BatchShape) -> int:
    """Operations of replay, backward pass and reference, over all images of a step.

    A matrix costs 2 operations per entry and token: once forward, once for the gradient of its
    input, once for its own gradient (with adapters, gradients only flow through it), and once more
    if the forward pass is repeated by checkpointing. A trained head adds the logits beyond a chunk,
    which it computes again. Attention costs twice as much backward as forward. Minibatches but the
    first are scored once more before the updates.
    """
    language, rows, train = planner.language, planner.rows_per_image(config.rollout), config.train
    read, tokens = planner.sequence_tokens(config, batch.prompt_tokens)
    length = read + tokens - 1
    layers = rows * 2 * language.layer_entries * length
    head = 2 * language.head_entries * tokens
    attention = rows * _attention_flops(language, _causal_pairs(length))
    is_full, again = config.model.adapter is None, int(config.model.gradient_checkpointing)
    an_update = (2 + is_full + again) * layers + (2 + is_full) * head + (3 + again) * attention
    scored = config.needs_reference + 1 - 1 / train.minibatches
    per_image = train.epochs_per_rollout * an_update + scored * (layers + head + attention)
    return round(batch.images * per_image)


def _attention_flops(language: LanguageShape, pairs: int) -> int:
    """Two products per pair, query by key and weight by value, at 2 operations per entry."""
    return 4 * language.attention_width * pairs


def _causal_pairs(length: int) -> int:
    """Number of pairs of a token with itself or an earlier one."""
    return length * (length + 1) // 2
