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
from glm_grpo.models.memory import read_bytes
from glm_grpo.models.planning import (
    BatchSizes,
    MemoryPlan,
    ModelSettings,
    Planner,
)
from glm_grpo.plan.devices import DeviceSpeed, find_device
from glm_grpo.plan.fit import batch_sizes, model_settings
from glm_grpo.training.metrics import StepWork


@dataclass(frozen=True)
class SequenceSizes:
    """Sizes of one step's sampling and replay.

    Attributes:
        prompts: P, prompts of the step.
        at_once: Prompts whose images are sampled at once; None: all.
        group_size: G, images per prompt.
        tokens: T, generated tokens per image.
    """

    prompts: int
    group_size: int
    prompt_tokens: int
    tokens: int
    at_once: int | None = None

    @property
    def images(self) -> int:
        """Number of images, P * G."""
        return self.prompts * self.group_size


@dataclass(frozen=True)
class LanguageWork:
    """Work of the language model per token.

    Attributes:
        layer_entries: Entries of all matrices of all layers; every token is multiplied by each.
        head_entries: Entries of the head's rows that can be drawn; used only for generated tokens.
        attention_width: Layers x query heads x head size.
        read_bytes: Bytes of all weights that a token step reads: all but the token embedding, of
            which it only looks up rows.
        cache_bytes: Bytes of the keys and values of one token.
        rows: Rows for each image: 2 with guidance between tokens, whose scores share one pass of
            the head.
        is_prompt_shared: Whether the samples of a prompt share its keys and values.
    """

    layer_entries: int
    head_entries: int
    attention_width: int
    read_bytes: int
    cache_bytes: int
    rows: int = 1
    is_prompt_shared: bool = True


def language_work(planner: Planner, model: ModelSettings) -> LanguageWork:
    """Work per token as a run loads the model; operations of adapters are not counted."""
    language = planner.language
    return LanguageWork(
        layer_entries=language.layer_entries,
        head_entries=language.head_entries,
        attention_width=language.attention_width,
        read_bytes=read_bytes(language, model),
        cache_bytes=language.cache_bytes(model.dtype),
        rows=planner.rows_per_image(model),
        is_prompt_shared=language.is_prompt_shared,
    )


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
    sizes = batch_sizes(config, prompt_tokens=prompt_tokens, processes=processes)
    language, sequences = _language(config, planner, sizes)
    work = _work(config, planner, language, sequences, device.flops)
    rollout, decode, update = (
        sizes.images * flops for flops in (work.rollout, work.decode, work.update)
    )
    floors = {
        "rollout": PhaseFloor(rollout_floor(language, sequences, device), rollout),
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
    sizes = batch_sizes(config, prompt_tokens=prompt_tokens)
    peak_flops = device.in_dtype(config.model.dtype).flops * processes
    return _work(config, planner, *_language(config, planner, sizes), peak_flops)


def _work(
    config: Config,
    planner: Planner,
    language: LanguageWork,
    sequences: SequenceSizes,
    peak_flops: float,
) -> StepWork:
    learned = update_flops(
        language,
        sequences,
        updates=config.train.updates_per_rollout,
        minibatches=config.train.minibatches_per_rollout,
        is_full=config.model.adapter is None,
        is_checkpointing=config.model.gradient_checkpointing,
        needs_reference=config.needs_reference,
    )
    return StepWork(
        rollout=rollout_flops(language, sequences) / sequences.images,
        decode=float(planner.decode_flops(config)),
        update=learned / sequences.images,
        peak_flops=peak_flops,
        is_skipping_flat=config.train.skip_flat and config.loss.weighs_advantages_alone,
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


def _language(
    config: Config, planner: Planner, sizes: BatchSizes
) -> tuple[LanguageWork, SequenceSizes]:
    read, generated = planner.sequence_tokens(sizes)
    work = language_work(planner, model_settings(config, is_on_accelerator=True))
    return work, SequenceSizes(
        prompts=sizes.prompts,
        group_size=sizes.group_size,
        prompt_tokens=read,
        tokens=generated,
        at_once=sizes.sampled_at_once,
    )


def rollout_floor(work: LanguageWork, sizes: SequenceSizes, device: DeviceSpeed) -> float:
    """Seconds to read the prompts and sample all tokens, each limited by memory or operations.

    A prompt's keys and values are read once per group.
    """
    return sum(
        max(read / device.bandwidth, flops / device.flops)
        for read, flops in _token_steps(work, sizes)
    )


def rollout_flops(work: LanguageWork, sizes: SequenceSizes) -> int:
    """Operations to read the prompts and sample all tokens."""
    return sum(flops for _, flops in _token_steps(work, sizes))


def _token_steps(work: LanguageWork, sizes: SequenceSizes) -> Iterator[tuple[int, int]]:
    """Bytes read and operations done: for the prompts, then for each token of every sample."""
    at_once = sizes.at_once or sizes.prompts
    for start in range(0, sizes.prompts, at_once):
        prompts = min(at_once, sizes.prompts - start)
        images = prompts * sizes.group_size
        reading = _forward_flops(work, sizes.prompt_tokens, scored=1)
        yield work.read_bytes, prompts * reading
        # The last token is sampled, but not processed further.
        for generated in range(1, sizes.tokens):
            read = prompts if work.is_prompt_shared else images
            cached = work.rows * (read * sizes.prompt_tokens + images * generated)
            attention = _attention_flops(work, sizes.prompt_tokens + generated)
            flops = work.rows * (2 * work.layer_entries + attention) + 2 * work.head_entries
            yield work.read_bytes + cached * work.cache_bytes, images * flops


def update_flops(
    work: LanguageWork,
    sizes: SequenceSizes,
    *,
    updates: int,
    is_full: bool,
    is_checkpointing: bool,
    needs_reference: bool,
    minibatches: int = 1,
) -> int:
    """Operations of replay, backward pass and reference, over all images of a step.

    A matrix costs 2 operations per entry and token: once forward, once for the gradient of its
    input, once for its own gradient, and once more if the forward pass is repeated by
    checkpointing. A trained head adds the logits beyond a chunk, which it computes again. Attention
    costs twice as much backward as forward.

    Args:
        updates: Optimizer updates per rollout.
        is_full: Whether all matrices get gradients; if not, these only flow through them to
            adapters.
        is_checkpointing: Whether the backward pass recomputes layers.
        needs_reference: Whether a KL to the reference has a weight.
        minibatches: Parts of a rollout; all but the first are scored once more before the updates.
    """
    length = sizes.prompt_tokens + sizes.tokens - 1
    layers = work.rows * 2 * work.layer_entries * length
    head = 2 * work.head_entries * sizes.tokens
    attention = work.rows * _attention_flops(work, _causal_pairs(length))
    again = int(is_checkpointing)
    an_update = (2 + is_full + again) * layers + (2 + is_full) * head + (3 + again) * attention
    scored = needs_reference + 1 - 1 / minibatches
    return round(sizes.images * (updates * an_update + scored * (layers + head + attention)))


def _forward_flops(work: LanguageWork, length: int, *, scored: int) -> int:
    layers = 2 * work.layer_entries * length + _attention_flops(work, _causal_pairs(length))
    return work.rows * layers + 2 * work.head_entries * scored


def _attention_flops(work: LanguageWork, pairs: int) -> int:
    """Two products per pair, query by key and weight by value, at 2 operations per entry."""
    return 4 * work.attention_width * pairs


def _causal_pairs(length: int) -> int:
    """Number of pairs of a token with itself or an earlier one."""
    return length * (length + 1) // 2
