"""Plan the memory of a run by phase, from the sizes of a model.

Weights, gradients, optimizer state and caches follow from shapes. Activations are counted in states
per token, with factors that were measured once on torch's meta device (LOG.md, "Memory plan by
formula" and "Janus-Pro"). Not counted are the activations of the scorers, scratch space inside
operations, memory that a caching allocator cannot use between its blocks, and the program with its
libraries in CPU memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from glm_grpo.config import Config
from glm_grpo.config.sections import ModelSection
from glm_grpo.data.prompts import evaluated_at_once
from glm_grpo.models.base import DTYPES
from glm_grpo.models.module_sizes import pinned
from glm_grpo.models.offload import NEEDED
from glm_grpo.models.planning import (
    OVERHEAD_BYTES,
    PHASES,
    UNDIVIDED,
    LanguageShape,
    MemoryItem,
    MemoryPlan,
    Parallelism,
    PartBytes,
    Planner,
)
from glm_grpo.models.sampling import PREFILLED_AT_ONCE, Truncation, prompts_at_once
from glm_grpo.models.token_scores import CHUNK_ENTRIES, TRAINED_CHUNK_ENTRIES
from glm_grpo.plan.scorers import scorer_sizes

_FLOAT32, _HALF = 4, 2
_IN_HALF, _IN_FULL = 4, 4
"""Further states of size D that a layer stores per token: in 16 bits, because norms compute in
fp32; and if its matrices are trained."""
_AT_HEAD = 9.5
"""States of size D per token between the last layer and the log-probabilities."""
_WITHOUT_GRADIENT = 4
"""States of size D, and of size M, per token in a layer that stores nothing."""
_CHUNK_BYTES = 8.5
"""Bytes per entry of a chunk of logits: in the model's dtype, in fp32, and their exponentials."""
_DRAWN_BYTES = 40
"""Bytes per code while a token is drawn: logits, log-probs, and their sums in fp64."""

BLOCK, SCALES_BLOCK = 64, 256
"""Matrix entries that share an 8-bit scale in 4 bits, and scales that share a scale."""
_TABLES = 16 + 256 + 1
"""fp32 numbers of each matrix in 4 bits: both tables of values, and the mean of its scales."""


@dataclass(frozen=True)
class BatchShape:
    """Images that a process works on together.

    Attributes:
        prompts: P.
        group_size: G, images per prompt.
        prompt_tokens: Tokens of the longest prompt, without source images.
    """

    prompts: int
    group_size: int
    prompt_tokens: int

    @property
    def images(self) -> int:
        """Number of images, P * G."""
        return self.prompts * self.group_size


def training_batch(config: Config, *, prompt_tokens: int, processes: int = 1) -> BatchShape:
    """A step's images in the process with the largest part of it.

    Args:
        processes: Number of processes that share the prompts.
    """
    prompts = math.ceil(config.rollout.prompts_per_step / processes)
    # One target image per prompt is learned, and nothing is sampled.
    group_size = 1 if config.train.method == "sft" else config.rollout.group_size
    return BatchShape(prompts, group_size, prompt_tokens)


def evaluation_batch(config: Config, *, prompt_tokens: int, processes: int = 1) -> BatchShape:
    """What an evaluation works on together, assuming that there are enough held-out prompts."""
    samples = config.eval.samples_per_prompt
    return BatchShape(evaluated_at_once(config.rollout, samples, processes), samples, prompt_tokens)


def plan_memory(
    planner: Planner,
    config: Config,
    *,
    prompt_tokens: int,
    is_on_accelerator: bool,
    parallelism: Parallelism = UNDIVIDED,
) -> MemoryPlan:
    """Plan the memory of a run, or of each of its processes, by phase.

    What waits in CPU memory (`offload`) has no effect without an accelerator, nor for shards of the
    policy, which are never moved.

    Args:
        prompt_tokens: Tokens of the longest prompt.
        is_on_accelerator: Whether there is an accelerator; it also selects the optimizer's
            implementation, as torch does.
    """
    language, model = planner.language, config.model
    dtype, scorers = DTYPES[model.dtype], scorer_sizes(config.reward.terms.values())
    batch, evaluation = (
        of(config, prompt_tokens=prompt_tokens, processes=parallelism.count)
        for of in (training_batch, evaluation_batch)
    )
    is_offloading = config.offload != "none" and is_on_accelerator
    is_state_moved = config.offload == "modules_and_optimizer" and is_on_accelerator
    shards = shard_bytes(language, model, parallelism) if parallelism.is_sharded else None
    trained = trained_bytes(language, model)
    if shards is None:
        update = _update_bytes(planner, config, batch, is_on_accelerator=is_on_accelerator)
    else:
        update = _sharded_update_bytes(planner, config, batch, shards)
    reads_images = config.data.sources > 0 or config.reads_targets
    vision = planner.vision(dtype)
    parts = [
        *(_policy_parts(language, model) if shards is None else []),
        *([_Part("vision tower and VQ", "vision", vision)] if reads_images else []),
        *(_reference_parts(language, model) if config.needs_reference else []),
        _Part("decoder", "decoder", planner.decoder(dtype, config.decode.quantization)),
        _Part("scorers", "rewards", PartBytes(scorers.movable, scorers.movable)),
    ]
    unused = 0 if reads_images else vision.size
    unplaced = planner.unplaced(dtype)
    state = 2 * (trained if shards is None else shards.trained)
    # DDP joins gradients in copies that it keeps.
    is_copying = parallelism.count > 1 and not parallelism.is_sharded
    items = [
        *([] if shards is None else _shard_items(shards, update)),
        *[_weights_item(part, is_offloading) for part in parts],
        MemoryItem("scorers on the CPU", {}, cpu=scorers.on_cpu),
        MemoryItem("vision tower and VQ", {}, cpu=unused),
        MemoryItem("parts for other tasks", {}, cpu=unplaced),
        _state_item(state, is_moved=is_state_moved),
        MemoryItem("gradients", {"update": update.gradients}),
        MemoryItem("gradient buckets", _always(trained if is_copying else 0)),
        *_batch_items(planner, config, batch, evaluation, update),
        MemoryItem("experience", {}, cpu=_experience_bytes(planner, config, batch)),
    ]
    moving = parts if is_offloading else []
    loading = _cpu_at_start(parts, language, model, shards, is_offloading=is_offloading)
    return MemoryPlan(
        items=tuple(item for item in items if item.cpu or any(item.by_phase.values())),
        phases=PHASES if reads_images else PHASES[1:],
        is_on_accelerator=is_on_accelerator,
        overhead=OVERHEAD_BYTES if is_on_accelerator else 0,
        cpu_at_start=loading + unused + unplaced + scorers.on_cpu,
        moved_in=sum(part.bytes.size for part in moving) + is_state_moved * state,
        moved_out=sum(part.trained for part in moving) + is_state_moved * state,
    )


def language_tensors(language: LanguageShape, model: ModelSection) -> list[int]:
    """Bytes of each weight of the language model and its head, without adapters."""
    matrices = [inputs * outputs for inputs, outputs in language.matrices]
    others = [*language.layer_vectors * language.layers, *language.outside]
    item = DTYPES[model.dtype].itemsize
    if model.quantization is None:
        others += matrices * language.layers
        return [entries * item for entries in others]
    return [
        *(size for entries in matrices * language.layers for size in bytes_in_4_bits(entries)),
        *(entries * item for entries in others),
    ]


def bytes_in_4_bits(entries: int) -> tuple[int, int, int]:
    """Bytes of a matrix in 4 bits, its scales, and their scales and tables, as in bitsandbytes."""
    blocks = math.ceil(entries / BLOCK)
    singles = math.ceil(blocks / SCALES_BLOCK) + _TABLES
    return math.ceil(entries / 2), blocks, _FLOAT32 * singles


def trained_bytes(language: LanguageShape, model: ModelSection) -> int:
    """Bytes of all trained weights; gradients take as much, the optimizer's moments twice that."""
    if model.adapter is None:
        return sum(language_tensors(language, model))
    return _FLOAT32 * language.adapter_entries(model.adapter)


def read_bytes(language: LanguageShape, model: ModelSection) -> int:
    """Bytes of all weights that a token step reads, adapters in the model's dtype."""
    item = DTYPES[model.dtype].itemsize
    read = sum(language_tensors(language, model)) - language.unread * item
    if model.adapter is not None:
        read += language.adapter_entries(model.adapter) * item
    return read


def rollout_bytes(planner: Planner, config: Config, batch: BatchShape) -> tuple[int, int, int]:
    """Bytes of sampling: the prompts' cache, the samples' cache, and the rest at the peak.

    The peak is either at reading the prompts, at joining their caches, which are copied if there
    are more than `PREFILLED_AT_ONCE`, or at the last token.
    """
    language, model, dtype = planner.language, config.model, DTYPES[config.model.dtype]
    item = dtype.itemsize
    read, tokens = planner.sequence_tokens(config, batch.prompt_tokens)
    rows = planner.rows_per_image(config.rollout)
    num_prompts = prompts_at_once(batch.prompts, batch.group_size, config.rollout.batch_size)
    images = num_prompts * batch.group_size
    a_token = rows * language.cache_bytes(dtype)
    prompts, samples = num_prompts * read * a_token, images * tokens * a_token
    if not language.is_prompt_shared:
        samples += images * read * a_token
    at_once = rows * min(num_prompts, PREFILLED_AT_ONCE) * read
    # A product with a matrix in 4 bits holds it in full.
    unpacked = 0
    if model.quantization is not None:
        unpacked = max(inputs * outputs for inputs, outputs in language.matrices) * item
    reading = _WITHOUT_GRADIENT * (language.width + language.mlp_width) * item * at_once + unpacked
    joining = prompts if num_prompts > PREFILLED_AT_ONCE else 0
    adapters = 0
    if model.adapter is not None:
        adapters = language.adapter_entries(model.adapter) * item
    # Scores for prompt and generated tokens, both concatenated, their softmax in fp32, in the
    # model's dtype, and split again.
    scores = rows * language.heads * (read + tokens) * (4 * item + _FLOAT32)
    drawing = adapters + unpacked + images * (_DRAWN_BYTES * language.drawn + scores)
    peak = max(prompts + reading, prompts + joining, prompts + samples + drawing)
    return prompts, samples, max(0, peak - prompts - samples)


def update_activations(planner: Planner, config: Config, batch: BatchShape) -> int:
    """Peak bytes of replay and backward pass, besides weights, gradients and optimizer state."""
    language, item = planner.language, DTYPES[config.model.dtype].itemsize
    read, generated = planner.sequence_tokens(config, batch.prompt_tokens)
    images = min(config.train.micro_batch_size, batch.images)
    rows = images * planner.rows_per_image(config.rollout)
    length = read + generated - 1
    tokens, is_full = rows * length, config.model.adapter is None
    is_checkpointing = config.model.gradient_checkpointing
    states = language.stored_states + _IN_HALF * (item == _HALF) + _IN_FULL * is_full
    stored = states * language.width + _WITHOUT_GRADIENT * language.mlp_width
    stored += 2 * language.kv_heads * language.head_size
    # A micro-batch that can contain prompts of different lengths needs a mask, and with a mask
    # every query head has its own keys and values.
    if batch.prompts > 1 and batch.group_size % images != 0:
        stored += 2 * (language.heads - language.kv_heads) * language.head_size + length
    a_layer = stored * item * tokens
    a_state = language.width * item * tokens
    kept = language.layers * (a_state if is_checkpointing else a_layer)
    backward = language.backward_states * a_state + is_checkpointing * a_layer
    scored = images * generated
    chunk = min(TRAINED_CHUNK_ENTRIES if is_full else CHUNK_ENTRIES, scored * language.drawn)
    head = _AT_HEAD * a_state + _CHUNK_BYTES * chunk
    peak = kept + max(backward, head)
    if Truncation.of(config.rollout).is_active:
        peak += scored * language.drawn
    if is_full:
        # The gradient of a weight exists beside the sum it is added to.
        peak += max(language.outside) * item
    return int(peak)


def _optimizer_bytes(
    language: LanguageShape, model: ModelSection, *, is_on_accelerator: bool
) -> int:
    """Scratch space of an optimizer step: of all weights at once on an accelerator."""
    trained = trained_bytes(language, model)
    if is_on_accelerator:
        return trained
    largest = max(language.outside) * DTYPES[model.dtype].itemsize
    return largest if model.adapter is None else trained // language.layers


@dataclass(frozen=True)
class ShardBytes:
    """Bytes of the policy in each process.

    Attributes:
        frozen: Weights that are not trained.
        trained: Trained weights; their gradients take as much, their moments twice as much.
        whole: All weights together, in the dtype of computation.
        layer: Weights of one layer, likewise.
        root: Weights outside the layers: embedding, head and last norm.
        upcast: All weights in CPU memory before they are sharded.
        widening: Factor by which gradients grow on their way to the other processes: 1, or 2 if 16
            bits become 32.
    """

    frozen: int
    trained: int
    whole: int
    layer: int
    root: int
    upcast: int
    widening: int


def shard_bytes(
    language: LanguageShape, model: ModelSection, parallelism: Parallelism
) -> ShardBytes:
    """Shard the policy over the processes, layer by layer."""
    item = _HALF if parallelism.is_mixed else DTYPES[model.dtype].itemsize
    kept = _FLOAT32 if parallelism.is_mixed else item
    base = language.layer_entries + language.layers * sum(language.layer_vectors)
    outside = sum(language.outside)
    adapters = 0 if model.adapter is None else language.adapter_entries(model.adapter)
    is_full = model.adapter is None
    trained = (base + outside) * kept if is_full else adapters * _FLOAT32
    frozen = 0 if is_full else (base + outside) * item
    layers = base * item + adapters * (_HALF if parallelism.is_mixed else _FLOAT32)
    return ShardBytes(
        frozen=math.ceil(frozen / parallelism.count),
        trained=math.ceil(trained / parallelism.count),
        whole=layers + outside * item,
        layer=layers // language.layers,
        root=outside * item,
        upcast=trained + frozen,
        widening=_FLOAT32 // _HALF if parallelism.is_mixed else 1,
    )


@dataclass(frozen=True)
class UpdateBytes:
    """Bytes of the update phase, besides weights that are always there.

    Attributes:
        whole: Weights and gradients that are gathered for a moment; 0 without shards.
    """

    gradients: int
    whole: int
    activations: int

    @property
    def total(self) -> int:
        """All three together."""
        return self.gradients + self.whole + self.activations


def update_on_shards(shards: ShardBytes, *, scoring: int, backward: int) -> UpdateBytes:
    """Largest of three moments: reading the reference, a backward pass, and the end of that.

    During a layer's backward pass, the next layer's weights are fetched, and the previous layer's
    gradients are sent to the other processes. Weights outside the layers are whole from the forward
    pass on; their gradients leave at the end, when no activations remain.

    Source: torch.distributed.fsdp._fully_shard._fsdp_param_group, of torch 2.15.

    Args:
        scoring: Activations without gradient.
        backward: Activations of a backward pass.
    """
    layer, root, on_their_way = shards.layer, shards.root, shards.widening
    in_flight = 2 * layer + layer + on_their_way * layer + root
    at_the_end = root + root + on_their_way * (root + layer)
    return max(
        UpdateBytes(0, shards.whole, scoring),
        UpdateBytes(shards.trained, in_flight, backward),
        UpdateBytes(shards.trained, at_the_end, 0),
        key=lambda moment: moment.total,
    )


def _update_bytes(
    planner: Planner, config: Config, batch: BatchShape, *, is_on_accelerator: bool
) -> UpdateBytes:
    language, model = planner.language, config.model
    step = _optimizer_bytes(language, model, is_on_accelerator=is_on_accelerator)
    activations = max(update_activations(planner, config, batch), step)
    return UpdateBytes(trained_bytes(language, model), 0, activations)


def _sharded_update_bytes(
    planner: Planner, config: Config, batch: BatchShape, shards: ShardBytes
) -> UpdateBytes:
    language, images = planner.language, min(config.train.micro_batch_size, batch.images)
    read, generated = planner.sequence_tokens(config, batch.prompt_tokens)
    tokens = images * planner.rows_per_image(config.rollout) * (read + generated - 1)
    a_token = _WITHOUT_GRADIENT * (language.width + language.mlp_width)
    scoring = a_token * DTYPES[config.model.dtype].itemsize * tokens
    backward = update_activations(planner, config, batch)
    return update_on_shards(shards, scoring=scoring, backward=backward)


@dataclass(frozen=True)
class _Part:
    """Modules that move together, the parts of `NEEDED` they belong to, and the trained bytes."""

    name: str
    needs: str
    bytes: PartBytes
    trained: int = 0


def _policy_parts(language: LanguageShape, model: ModelSection) -> list[_Part]:
    """Frozen weights and adapters, or the whole policy if it is trained in full."""
    weights, trained = language_tensors(language, model), trained_bytes(language, model)
    if model.adapter is None:
        held = PartBytes(sum(weights), pinned(weights))
        return [_Part("language model and head", "policy", held, trained)]
    factors = [entries * _FLOAT32 for entries in language.adapter_factors(model.adapter)]
    held = PartBytes(sum(weights), pinned([*weights, *factors * language.layers]))
    adapters = PartBytes(trained, 0)
    return [
        _Part("language model and head", "policy", held),
        _Part("adapters", "policy", adapters, trained),
    ]


def _reference_parts(language: LanguageShape, model: ModelSection) -> list[_Part]:
    """A frozen copy, if there are no adapters to switch off."""
    if model.adapter is not None:
        return []
    weights = language_tensors(language, model)
    return [_Part("reference copy", "reference", PartBytes(sum(weights), pinned(weights)))]


def _batch_items(
    planner: Planner,
    config: Config,
    batch: BatchShape,
    evaluation: BatchShape,
    update: UpdateBytes,
) -> Iterator[MemoryItem]:
    """What the images of a step, or of an evaluation, need besides weights."""
    prompts, samples, rest = max(
        (rollout_bytes(planner, config, each) for each in (batch, evaluation)), key=sum
    )
    largest = max(batch.group_size, evaluation.group_size)
    reads_images = config.data.sources > 0 or config.reads_targets
    activations = {
        "sources": planner.sources_bytes(config) if reads_images else 0,
        "rollout": rest,
        "decode": planner.decode_bytes(
            config, group_size=largest, prompt_tokens=batch.prompt_tokens
        ),
        "update": update.activations,
    }
    yield MemoryItem("cache of the prompts", {"rollout": prompts})
    yield MemoryItem("cache of the samples", {"rollout": samples})
    yield MemoryItem("activations", activations)


def _weights_item(part: _Part, is_offloading: bool) -> MemoryItem:
    if not is_offloading:
        return MemoryItem(part.name, _always(part.bytes.size))
    phases = [phase for phase, needed in NEEDED.items() if part.needs in needed]
    return MemoryItem(part.name, dict.fromkeys(phases, part.bytes.size), cpu=part.bytes.pinned)


def _shard_items(shards: ShardBytes, update: UpdateBytes) -> list[MemoryItem]:
    together = dict.fromkeys(("rollout", "decode", "reward"), shards.whole)
    return [
        MemoryItem("policy, own shards", _always(shards.frozen + shards.trained)),
        MemoryItem("policy, put together", {**together, "update": update.whole}),
    ]


def _state_item(state: int, *, is_moved: bool) -> MemoryItem:
    by_phase = {"update": state} if is_moved else _always(state)
    return MemoryItem("optimizer state", by_phase, cpu=state if is_moved else 0)


def _always(size: int) -> Mapping[str, int]:
    return dict.fromkeys(PHASES, size)


def _experience_bytes(planner: Planner, config: Config, batch: BatchShape) -> int:
    """Bytes of images, token ids, log-probs, and the mask of tokens that could be sampled."""
    rollout = config.rollout
    _, tokens = planner.sequence_tokens(config, batch.prompt_tokens)
    mask = planner.language.drawn if Truncation.of(rollout).is_active else 0
    return batch.images * (3 * rollout.height * rollout.width + (8 + 4 + mask) * tokens)


def _cpu_at_start(
    parts: Sequence[_Part],
    language: LanguageShape,
    model: ModelSection,
    shards: ShardBytes | None,
    *,
    is_offloading: bool,
) -> int:
    """Peak bytes in CPU memory at the start, where all weights are loaded before they move.

    Pinned copies of a part briefly exist in addition. A policy to be sharded stays until the others
    have moved.
    """
    staying, upcast = 0, 0
    if shards is not None:
        staying, upcast = sum(language_tensors(language, model)), shards.upcast
    loaded = sum(part.bytes.size for part in parts) + staying
    if not is_offloading:
        return max(loaded, upcast)
    peak = copied = 0
    for part in parts:
        copied += part.bytes.pinned
        peak = max(peak, loaded + copied)
        loaded -= part.bytes.size
    return max(peak, copied + upcast if shards is not None else 0)
