"""Plan the memory and operations of a GLM-Image run by running its code on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import GlmImagePipeline
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.flop_counter import FlopCounterMode
from transformers import GlmImageForConditionalGeneration
from transformers.cache_utils import DynamicCache

from glm_grpo.models.glm_image.decoder import decoded_at_once
from glm_grpo.models.glm_image.fast.token_scores import score_tokens
from glm_grpo.models.glm_image.fast.token_step import TokenStep
from glm_grpo.models.glm_image.meta import (
    META,
    PartConfigs,
    build_decoder,
    build_language_model,
    built_on_meta,
    measured_on_meta,
    module_bytes,
    pinned_bytes,
    quantize_on_meta,
)
from glm_grpo.models.glm_image.policy import GlmImagePolicy
from glm_grpo.models.glm_image.prompt_inputs import PromptInputs, longest_prompt_tokens
from glm_grpo.models.glm_image.sampling import (
    PREFILLED_AT_ONCE,
    Truncation,
    pick_tokens,
    prefill,
    support_log_probs,
    truncation_mask,
)
from glm_grpo.models.glm_image.token_grid import token_layout
from glm_grpo.models.offload import NEEDED
from glm_grpo.models.planning import (
    OVERHEAD_BYTES,
    PHASES,
    UNDIVIDED,
    BatchSizes,
    LanguageWork,
    MemoryItem,
    MemoryPlan,
    ModelSettings,
    Offload,
    Parallelism,
    ScorerSizes,
)

_Found = TypeVar("_Found")

_FEW_LAYERS, _MORE_LAYERS = 4, 6
"""Layers are alike, so two depths determine the cost of each further one."""

_MOST_PROMPTS = 1024
"""Largest number of prompts for which a token step is measured; beyond, extrapolate per prompt."""

_FLOAT32, _HALF = 4, 2


def build_meta_policy(
    configs: PartConfigs, settings: ModelSettings, *, layers: int | None = None
) -> tuple[GlmImageForConditionalGeneration, GlmImagePolicy]:
    """Build the real policy around a model without values.

    Args:
        layers: None: all layers; a number: that many, and no reference in addition.
    """
    model = build_language_model(configs.language, settings.dtype, layers=layers)
    if settings.quantization.language is not None:
        quantize_on_meta(model)
    names = ("tokenizer", "processor", "scheduler", "text_encoder", "vae", "transformer")
    with built_on_meta():
        policy = GlmImagePolicy(
            GlmImagePipeline(vision_language_encoder=model, **dict.fromkeys(names)),
            temperature=1.0,
            adapter_rank=settings.adapter_rank,
            adapter_alpha=1.0,
            is_checkpointing=settings.is_checkpointing,
            needs_reference=settings.needs_reference and layers is None,
            seed=0,
        )
    return model, policy


def cache_token_bytes(model: GlmImageForConditionalGeneration, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers."""
    text = model.config.text_config
    attention = model.model.language_model.layers[0].self_attn
    heads = 2 * text.num_hidden_layers * text.num_key_value_heads
    return heads * attention.head_dim * dtype.itemsize


def gradient_bytes(policy: GlmImagePolicy) -> int:
    """Bytes of all trained weights in their own dtypes; the optimizer's moments take twice that."""
    return sum(p.numel() * p.element_size() for p in policy.trainable_parameters())


def rollout_bytes(configs: PartConfigs, settings: ModelSettings, sizes: BatchSizes) -> int:
    """Peak bytes of sampling besides weights, including the cache."""
    if sizes.prompts > _MOST_PROMPTS:
        half = _MOST_PROMPTS // 2
        few, many = (
            rollout_bytes(configs, settings, replace(sizes, prompts=prompts))
            for prompts in (half, _MOST_PROMPTS)
        )
        return many + (many - few) * (sizes.prompts - _MOST_PROMPTS) // half
    return max(_over_layers(configs, lambda layers: _rollout(configs, settings, sizes, layers)))


def update_bytes(configs: PartConfigs, settings: ModelSettings, sizes: BatchSizes) -> int:
    """Peak bytes of replay, backward pass and optimizer besides weights and optimizer state."""
    return max(_over_layers(configs, lambda layers: _update(configs, settings, sizes, layers)))


def backward_bytes(configs: PartConfigs, settings: ModelSettings, sizes: BatchSizes) -> int:
    """Peak bytes of replay and backward pass if gradients are freed as soon as they are made."""

    def measure(layers: int) -> tuple[int, ...]:
        _, policy = build_meta_policy(configs, settings, layers=layers)
        for parameter in policy.trainable_parameters():
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        with measured_on_meta() as memory:
            torch.autograd.backward(_replay(policy, sizes).sum())
        return (memory.peak_bytes,)

    return max(_over_layers(configs, measure))


def scoring_bytes(configs: PartConfigs, settings: ModelSettings, sizes: BatchSizes) -> int:
    """Peak bytes of replay without gradient, as for the reference."""

    def measure(layers: int) -> tuple[int, ...]:
        _, policy = build_meta_policy(configs, settings, layers=layers)
        with measured_on_meta() as memory, torch.no_grad():
            _replay(policy, sizes)
        return (memory.peak_bytes,)

    return max(_over_layers(configs, measure))


def sources_bytes(configs: PartConfigs, dtype: torch.dtype, height: int, width: int) -> int:
    """Peak bytes, besides weights, of encoding one source picture as tokens."""
    # Nothing is kept for a backward pass, so one layer needs as much as all.
    model = build_language_model(configs.language, dtype, layers=1).model
    tower = model.visual
    # The processor makes one patch from each token's pixels.
    rows, columns = token_layout(height, width, has_preview=False).target
    patches, side = rows * columns, tower.config.patch_size
    with measured_on_meta() as memory, torch.no_grad():
        pixels = torch.empty(patches, tower.config.in_channels * side**2, dtype=dtype, device=META)
        hidden_states = tower.embeddings(
            tower.patch_embed(pixels), _zeros(1), _zeros(1, 3), _zeros(patches), _zeros(patches)
        )
        # The code reads the values of lengths.
        lengths = torch.tensor([0, patches])
        hidden_states = tower.blocks[0](hidden_states, cu_seqlens=lengths)
        model.vqmodel.encode(hidden_states.T.reshape(1, -1, rows, columns))
    return memory.peak_bytes


def decode_bytes(configs: PartConfigs, settings: ModelSettings, sizes: BatchSizes) -> int:
    """Peak bytes of decoding one group besides weights; guidance runs its passes in turn."""
    # Nothing is kept for a backward pass, so two layers need as much as all.
    layers = min(2, configs.transformer.get("num_layers", 2))
    shallow = replace(configs, transformer=configs.transformer | {"num_layers": layers})
    transformer, vae, _ = build_decoder(shallow, settings.dtype)
    at_once = min(sizes.group_size, sizes.decode_batch_size or sizes.group_size)
    with measured_on_meta() as drawing, torch.no_grad():
        denoise_on_meta(transformer, vae, sizes, settings.dtype, images=at_once)
    rest = sizes.group_size % at_once or at_once
    turned = max(
        decoded_at_once(n, sizes.height, sizes.width, sizes.vae_batch_size) for n in (at_once, rest)
    )
    with measured_on_meta() as turning, torch.no_grad():
        decode_latents_on_meta(vae, sizes, settings.dtype, images=turned)
    # Slices decoded earlier wait, and are concatenated while all of them exist.
    picture = 3 * sizes.height * sizes.width * settings.dtype.itemsize
    turning_bytes = turning.peak_bytes + (at_once - turned) * picture
    # The transformer is cast one layer at a time.
    cast = 0
    if settings.quantization.decoder is not None:
        cast = max(weight.numel() for weight in transformer.parameters()) * settings.dtype.itemsize
    # Finished images wait for the rest of their group.
    waiting = (sizes.group_size - at_once) * picture
    return max(drawing.peak_bytes + cast, turning_bytes, 2 * at_once * picture) + waiting


def denoise_on_meta(
    transformer: Any, vae: Any, sizes: BatchSizes, dtype: torch.dtype, *, images: int
) -> None:
    """Run one pass of the diffusion transformer, after writing each source picture.

    `prompt_tokens` counts glyph tokens.
    """
    height, width = _latent_sides(vae, sizes)
    num_patches = height * width // transformer.config.patch_size**2
    latents: dict[str, Any] = {"dtype": dtype, "device": META}
    cache = GlmImageKVCache(num_layers=transformer.config.num_layers)

    def run(rows: int, glyphs: int) -> None:
        transformer(
            hidden_states=torch.empty(
                rows, transformer.config.in_channels, height, width, **latents
            ),
            encoder_hidden_states=torch.empty(
                rows, glyphs, transformer.config.text_embed_dim, **latents
            ),
            prior_token_id=_zeros(rows, num_patches),
            prior_token_drop=_zeros(rows, num_patches).bool(),
            timestep=_zeros(rows),
            target_size=_zeros(rows, 2).to(dtype),
            crop_coords=_zeros(rows, 2).to(dtype),
            kv_caches=cache,
            return_dict=False,
        )

    cache.set_mode("write")
    for _ in range(sizes.num_sources):
        run(1, 0)
    cache.set_mode("read" if sizes.num_sources else None)
    run(images, sizes.prompt_tokens)


def decode_latents_on_meta(vae: Any, sizes: BatchSizes, dtype: torch.dtype, *, images: int) -> None:
    """Decode latents to pixels."""
    channels = vae.config.latent_channels
    vae.decode(torch.empty(images, channels, *_latent_sides(vae, sizes), dtype=dtype, device=META))


def _latent_sides(vae: Any, sizes: BatchSizes) -> tuple[int, int]:
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    return sizes.height // factor, sizes.width // factor


def _over_layers(
    configs: PartConfigs, measure: Callable[[int], tuple[int, ...]]
) -> tuple[int, ...]:
    """Values at the model's depth, extrapolated from two smaller depths if it is deep."""
    layers = configs.num_layers
    if layers <= _MORE_LAYERS:
        return measure(layers)
    few, more = measure(_FEW_LAYERS), measure(_MORE_LAYERS)
    return tuple(
        low + (high - low) * (layers - _FEW_LAYERS) // (_MORE_LAYERS - _FEW_LAYERS)
        for low, high in zip(few, more, strict=True)
    )


def _rollout(
    configs: PartConfigs, settings: ModelSettings, sizes: BatchSizes, layers: int
) -> tuple[int, ...]:
    """Peaks of reading prompts, joining their caches, and sampling tokens."""
    model, policy = build_meta_policy(configs, settings, layers=layers)
    language_model = model.model.language_model
    read = min(sizes.prompts, PREFILLED_AT_ONCE)
    shape = (read, _read_tokens(sizes))
    joining = 0
    with measured_on_meta() as memory, torch.no_grad():
        # A mask would be checked for padding, but there are no values here.
        held, cache = prefill(
            language_model, _zeros(*shape), _zeros(3, *shape), attention_mask=None
        )
        reading = memory.peak_bytes
        if sizes.prompts > read:
            # Prompts are read in equal parts, one of which is read here. The cache of each part
            # waits, and is copied at the end. If the last part is smaller, this overestimates
            # slightly.
            rest = memory.live_bytes * (sizes.prompts - read) // read
            reading += rest
            a_cache = _read_tokens(sizes) * cache_token_bytes(model, settings.dtype)
            joining = memory.live_bytes + rest + sizes.prompts * a_cache
            held, cache = held.new_empty(sizes.prompts, held.shape[-1]), _widened(cache, sizes)
        memory.peak_bytes = memory.live_bytes
        step = TokenStep(
            language_model,
            _unpadded(sizes.prompts),
            cache,
            group_size=sizes.group_size,
            positions=_zeros(3, sizes.prompts, _tokens(sizes)),
        )
        logits = policy.network.codebook_logits(step(_zeros(sizes.images)))
        sampling_mask = (
            truncation_mask(logits, Truncation(top_p=0.5)) if sizes.is_truncated else None
        )
        pick_tokens(support_log_probs(logits, sampling_mask), _zeros(sizes.images).double())
    heads = model.config.text_config.num_attention_heads
    # At the last token: scores for prompt and generated tokens, both concatenated, their softmax in
    # fp32, in the model's dtype, and split again.
    scores = sizes.images * heads * (_read_tokens(sizes) + _tokens(sizes))
    return reading, joining, memory.peak_bytes + scores * (4 * settings.dtype.itemsize + 4)


def _widened(cache: DynamicCache, sizes: BatchSizes) -> DynamicCache:
    """Expand the keys and values of a few prompts to the shape of all."""
    joined = DynamicCache()
    for index, layer in enumerate(cache.layers):
        rows = (
            each.new_empty(sizes.prompts, *each.shape[1:]) for each in (layer.keys, layer.values)
        )
        joined.update(*rows, index)
    return joined


def _unpadded(prompts: int) -> PromptInputs:
    """Minimal inputs; only the mask has its real size, because its values are read."""
    return PromptInputs(
        input_ids=_zeros(prompts, 1),
        attention_mask=torch.ones(prompts, 1, dtype=torch.int64),
        position_ids=_zeros(3, prompts, 1),
        next_position=_zeros(prompts),
    )


def _update(
    configs: PartConfigs, settings: ModelSettings, sizes: BatchSizes, layers: int
) -> tuple[int, ...]:
    """Peaks of a backward pass and of an optimizer step, including gradients."""
    _, policy = build_meta_policy(configs, settings, layers=layers)
    parameters = policy.trainable_parameters()
    optimizer = AdamW(parameters, foreach=settings.is_on_accelerator)
    with measured_on_meta() as memory:
        if sizes.micro_batch_size < sizes.images:
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
        torch.autograd.backward(_replay(policy, sizes).sum())
        replaying = memory.peak_bytes
        optimizer.step()
        # The first step creates the state, which is counted separately.
        memory.peak_bytes = memory.live_bytes
        optimizer.step()
    return replaying, memory.peak_bytes - 2 * gradient_bytes(policy)


def _replay(policy: GlmImagePolicy, sizes: BatchSizes) -> Tensor:
    """Like `Policy.replay`, which reads input values that do not exist here."""
    language_model, head = policy.modules()
    rows, length = sizes.micro_batch_size, _read_tokens(sizes) + _tokens(sizes) - 1
    # A micro-batch that can contain prompts of different lengths needs a mask.
    is_padded = sizes.prompts > 1 and sizes.group_size % rows != 0
    language_model.train()
    hidden_states = language_model(
        input_ids=_zeros(rows, length),
        attention_mask=_zeros(rows, 1, length, length).bool() if is_padded else None,
        position_ids=_zeros(3, rows, length),
        use_cache=False,
    ).last_hidden_state
    entries = policy.codebook_size
    sampling_mask = _zeros(rows, _tokens(sizes), entries).bool() if sizes.is_truncated else None
    scores = score_tokens(
        hidden_states[:, -_tokens(sizes) :],
        head.weight,
        _zeros(rows, _tokens(sizes)),
        codebook_size=entries,
        temperature=policy.temperature,
        sampling_mask=sampling_mask,
    )
    return scores.log_probs


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=META)


@dataclass(frozen=True)
class ShardBytes:
    """Bytes of the policy in the process with the largest shards.

    Attributes:
        frozen: Weights that are not trained.
        trained: Trained weights; their gradients take as much, their moments twice as much.
        whole: All weights together, in the dtype of computation.
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


@dataclass(frozen=True)
class UpdateBytes:
    """Bytes of the update phase, besides weights that are always there.

    Attributes:
        whole: Weights and gradients that are gathered for a moment; 0 without shards.
    """

    gradients: int
    whole: int
    activations: int


def shard_bytes(policy: GlmImagePolicy, processes: Parallelism) -> ShardBytes:
    """Shard the policy along the first dimension of each weight, layer by layer.

    Args:
        policy: Unsharded policy, or one without values.
        processes: Processes that share it.
    """

    def kept(weight: Tensor) -> int:
        is_kept_in_full = processes.is_mixed and weight.requires_grad
        return _FLOAT32 if is_kept_in_full else weight.element_size()

    def part(weight: Tensor) -> int:
        # If rows cannot be distributed evenly, the first process has the most.
        return -(-weight.shape[0] // processes.count) * weight[0].numel() * kept(weight)

    def together(weights: Iterable[Tensor]) -> int:
        return sum(w.numel() * (_HALF if processes.is_mixed else w.element_size()) for w in weights)

    weights = [*policy.network.parameters()]
    layers = [together(layer.parameters()) for layer in policy.network.language_model.layers]
    whole = together(weights)
    return ShardBytes(
        frozen=sum(part(weight) for weight in weights if not weight.requires_grad),
        trained=sum(part(weight) for weight in weights if weight.requires_grad),
        whole=whole,
        layer=max(layers),
        root=whole - sum(layers),
        upcast=sum(weight.numel() * kept(weight) for weight in weights),
        widening=_FLOAT32 // _HALF if processes.is_mixed else 1,
    )


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
        (
            UpdateBytes(0, shards.whole, scoring),
            UpdateBytes(shards.trained, in_flight, backward),
            UpdateBytes(shards.trained, at_the_end, 0),
        ),
        key=lambda each: each.gradients + each.whole + each.activations,
    )


@dataclass(frozen=True)
class _Part:
    """Modules that move together: their bytes, and the bytes that training changes."""

    name: str
    needs: str
    size: int
    pinned: int
    trained: int = 0


class GlmImagePlanner:
    """Plans runs of one model; measurements for one plan are reused by the next.

    Args:
        folder: Folder of the model's tokenizers; None if they are not available.
    """

    def __init__(self, configs: PartConfigs, folder: Path | None = None) -> None:
        self._configs = configs
        self._folder = folder
        self._known: dict[tuple[object, ...], object] = {}

    def plan(
        self,
        model: ModelSettings,
        sizes: BatchSizes,
        scorers: ScorerSizes,
        offload: Offload,
        *,
        evaluation: BatchSizes | None = None,
        processes: Parallelism = UNDIVIDED,
    ) -> MemoryPlan:
        """Plan the memory of a run, or of each of its processes.

        Counts weights, gradients, optimizer state, caches and activations. Does not count the
        activations of the scorers, scratch space inside operations, memory that a caching allocator
        cannot use between its blocks, and the program with its libraries in CPU memory.

        Args:
            model: How the policy is loaded and trained.
            sizes: Sizes of this process's part of a step.
            scorers: Weights of the reward terms.
            offload: What waits in CPU memory; has no effect without an accelerator, nor for shards
                of the policy, which are never moved.
            evaluation: What an evaluation samples and decodes at once; None: no evaluation.
            processes: Processes that train together.
        """
        is_offloading = offload != "none" and model.is_on_accelerator
        is_state_moved = offload == "modules_and_optimizer" and model.is_on_accelerator
        held = replace(_without_update(model), needs_reference=model.needs_reference)
        language, policy = self._once(build_meta_policy, held)
        shards = shard_bytes(policy, processes) if processes.is_sharded else None
        update = self._update(model, sizes, policy, shards)
        parts = [
            *(_policy_parts(policy, model) if shards is None else []),
            *self._frozen_parts(model, policy, scorers, has_vision=_reads_pictures(sizes)),
        ]
        vision = 0 if _reads_pictures(sizes) else module_bytes(policy.source_modules())
        state = 2 * (gradient_bytes(policy) if shards is None else shards.trained)
        # DDP joins gradients in copies that it keeps.
        is_copying = processes.count > 1 and not processes.is_sharded
        items = [
            *([] if shards is None else _shard_items(shards, update)),
            *[_weights_item(part, is_offloading) for part in parts],
            MemoryItem("scorers on the CPU", {}, cpu=scorers.on_cpu),
            MemoryItem("vision tower and VQ", {}, cpu=vision),
            _state_item(state, is_moved=is_state_moved),
            MemoryItem("gradients", {"update": update.gradients}),
            MemoryItem("gradient buckets", _always(gradient_bytes(policy) if is_copying else 0)),
            *self._batch_items(model, sizes, evaluation or sizes, language, update),
            MemoryItem("experience", {}, cpu=_experience_bytes(sizes, policy.codebook_size)),
        ]
        moving = parts if is_offloading else []
        loading = _cpu_at_start(parts, shards, policy, is_offloading=is_offloading)
        return MemoryPlan(
            items=tuple(item for item in items if item.cpu or any(item.by_phase.values())),
            phases=PHASES if _reads_pictures(sizes) else PHASES[1:],
            is_on_accelerator=model.is_on_accelerator,
            overhead=OVERHEAD_BYTES if model.is_on_accelerator else 0,
            cpu_at_start=loading + vision + scorers.on_cpu,
            moved_in=sum(part.size for part in moving) + is_state_moved * state,
            moved_out=sum(part.trained for part in moving) + is_state_moved * state,
        )

    def sequence_tokens(self, sizes: BatchSizes) -> tuple[int, int]:
        """Tokens of the longest prompt with its source pictures, and T per image."""
        return _read_tokens(sizes), _tokens(sizes)

    def longest_prompt_tokens(
        self, captions: Sequence[str], *, height: int, width: int
    ) -> int | None:
        """Tokens of the longest caption with the chat template; None without a tokenizer."""
        if self._folder is None or not (self._folder / "processor").is_dir():
            return None
        try:
            return longest_prompt_tokens(str(self._folder), captions, height=height, width=width)
        except (OSError, ValueError):
            # Loading the model reports what is wrong with its files.
            return None

    def language_work(self, model: ModelSettings) -> LanguageWork:
        """Work per token of the language model as a run loads it.

        Adapters count among the bytes read, but their operations are not counted.
        """
        configs = self._configs
        # Unquantised, because matrix entries are counted, however a run stores them.
        plain = build_language_model(configs.language, model.dtype, layers=1)
        layer = plain.model.language_model.layers[0]
        head = plain.lm_head.weight
        drawn = plain.config.vq_config.num_embeddings
        held, policy = build_meta_policy(configs, model)
        text = held.config.text_config
        read = module_bytes(policy.modules())
        read -= module_bytes([held.model.language_model.embed_tokens])
        read -= (len(head) - drawn) * head.shape[1] * model.dtype.itemsize
        if model.adapter_rank is not None:
            # A step reads them in the model's dtype, to which they are cast once per rollout.
            read -= gradient_bytes(policy) * (_FLOAT32 - model.dtype.itemsize) // _FLOAT32
        return LanguageWork(
            # Layers are alike.
            layer_entries=configs.num_layers
            * sum(p.numel() for p in layer.parameters() if p.dim() > 1),
            head_entries=drawn * head.shape[1],
            attention_width=configs.num_layers
            * text.num_attention_heads
            * layer.self_attn.head_dim,
            read_bytes=read,
            cache_bytes=cache_token_bytes(held, model.dtype),
        )

    def decoder_flops(self, height: int, width: int) -> tuple[int, int]:
        """Operations for one image of a pass of the diffusion transformer, and of the VAE.

        Without glyphs, whose number is not in the config.

        """
        dtype, configs = torch.bfloat16, self._configs
        transformer, vae, _ = build_decoder(configs, dtype)
        sizes = BatchSizes(1, 1, height, width, 0, 1, is_truncated=False)
        return (
            _counted(lambda: denoise_on_meta(transformer, vae, sizes, dtype, images=1)),
            _counted(lambda: decode_latents_on_meta(vae, sizes, dtype, images=1)),
        )

    def _frozen_parts(
        self,
        model: ModelSettings,
        policy: GlmImagePolicy,
        scorers: ScorerSizes,
        *,
        has_vision: bool,
    ) -> list[_Part]:
        """Everything besides the policy that moves, in the order in which it is loaded."""
        vision = _part("vision tower and VQ", "vision", policy.source_modules())
        decoder = self._once(build_decoder, model.dtype, model.quantization.decoder is not None)
        return [
            *([vision] if has_vision else []),
            _part("reference copy", "reference", policy.reference_modules()),
            _part("decoder", "decoder", decoder),
            _Part("scorers", "rewards", scorers.movable, scorers.movable),
        ]

    def _batch_items(
        self,
        model: ModelSettings,
        sizes: BatchSizes,
        evaluation: BatchSizes,
        language: GlmImageForConditionalGeneration,
        update: UpdateBytes,
    ) -> list[MemoryItem]:
        """What the images of a step, or of an evaluation, need besides weights."""
        held, a_token = _without_update(model), cache_token_bytes(language, model.dtype)
        rollout, prompt_cache, sample_cache = max(
            self._rollout(held, each, a_token) for each in (sizes, evaluation)
        )
        drawn = replace(
            sizes,
            group_size=max(sizes.group_size, evaluation.group_size),
            micro_batch_size=1,
            prompts=1,
            is_truncated=False,
        )
        sources = 0
        if _reads_pictures(sizes):
            sources = self._once(sources_bytes, model.dtype, sizes.height, sizes.width)
        activations = {
            "sources": sources,
            "rollout": max(0, rollout - prompt_cache - sample_cache),
            "decode": self._once(decode_bytes, replace(held, adapter_rank=None), drawn),
            "update": update.activations,
        }
        return [
            MemoryItem("cache of the prompts", {"rollout": prompt_cache}),
            MemoryItem("cache of the samples", {"rollout": sample_cache}),
            MemoryItem("activations", activations),
        ]

    def _update(
        self,
        model: ModelSettings,
        sizes: BatchSizes,
        policy: GlmImagePolicy,
        shards: ShardBytes | None,
    ) -> UpdateBytes:
        sizes = replace(sizes, decode_batch_size=None, vae_batch_size=None)
        if shards is None:
            gradients = gradient_bytes(policy)
            replaying = self._once(update_bytes, model, sizes) - gradients
            return UpdateBytes(gradients, 0, max(0, replaying))
        return update_on_shards(
            shards,
            scoring=self._once(scoring_bytes, model, sizes),
            backward=self._once(backward_bytes, model, sizes),
        )

    def _rollout(
        self, held: ModelSettings, sizes: BatchSizes, a_token: int
    ) -> tuple[int, int, int]:
        """Peak bytes of sampling, and of its caches, where a group shares its prompt's cache."""
        drawn = replace(sizes, micro_batch_size=1, decode_batch_size=None, vae_batch_size=None)
        return (
            self._once(rollout_bytes, held, drawn),
            sizes.prompts * _read_tokens(sizes) * a_token,
            sizes.images * _tokens(sizes) * a_token,
        )

    def _once(self, find: Callable[..., _Found], *arguments: object) -> _Found:
        """Call `find` on the model and hashable arguments, and remember the result."""
        key = (find, *arguments)
        if key not in self._known:
            self._known[key] = find(self._configs, *arguments)
        found: _Found = self._known[key]  # type: ignore[assignment]
        return found


def _without_update(model: ModelSettings) -> ModelSettings:
    """Settings of an untrained policy, so that one measurement serves all plans."""
    return replace(model, is_checkpointing=False, needs_reference=False, is_on_accelerator=False)


def _part(name: str, needs: str, modules: Sequence[nn.Module]) -> _Part:
    return _Part(name, needs, module_bytes(modules), pinned_bytes(modules))


def _policy_parts(policy: GlmImagePolicy, model: ModelSettings) -> list[_Part]:
    """Frozen weights and adapters, or the whole policy if it is trained in full."""
    trained = gradient_bytes(policy)
    adapters = 0 if model.adapter_rank is None else trained
    frozen = module_bytes(policy.modules()) - adapters
    pinned = pinned_bytes(policy.modules())
    return [
        _Part("language model and head", "policy", frozen, pinned, trained - adapters),
        _Part("adapters", "policy", adapters, 0, adapters),
    ]


def _weights_item(part: _Part, is_offloading: bool) -> MemoryItem:
    if not is_offloading:
        return MemoryItem(part.name, _always(part.size))
    phases = [phase for phase, needed in NEEDED.items() if part.needs in needed]
    return MemoryItem(part.name, dict.fromkeys(phases, part.size), cpu=part.pinned)


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


def _reads_pictures(sizes: BatchSizes) -> bool:
    """Whether source or target images are encoded as tokens."""
    return sizes.num_sources > 0 or sizes.reads_targets


def _experience_bytes(sizes: BatchSizes, entries: int) -> int:
    """Bytes of images, token ids, log-probs, and the mask of tokens that could be sampled."""
    a_token = 8 + 4 + (entries if sizes.is_truncated else 0)
    return sizes.images * (3 * sizes.height * sizes.width + a_token * _tokens(sizes))


def _cpu_at_start(
    parts: Sequence[_Part],
    shards: ShardBytes | None,
    policy: GlmImagePolicy,
    *,
    is_offloading: bool,
) -> int:
    """Peak bytes in CPU memory at the start, where all weights are loaded before they move.

    Pinned copies of a part briefly exist in addition. A policy to be sharded stays until the others
    have moved.
    """
    staying, upcast = (0, 0) if shards is None else (module_bytes(policy.modules()), shards.upcast)
    loaded = sum(part.size for part in parts) + staying
    if not is_offloading:
        return max(loaded, upcast)
    peak = pinned = 0
    for part in parts:
        pinned += part.pinned
        peak = max(peak, loaded + pinned)
        loaded -= part.size
    return max(peak, pinned + upcast if shards is not None else 0)


def _tokens(sizes: BatchSizes) -> int:
    has_preview = sizes.num_sources == 0
    return token_layout(sizes.height, sizes.width, has_preview=has_preview).num_tokens


def _read_tokens(sizes: BatchSizes) -> int:
    """Tokens of the longest prompt, with source pictures between start and end tokens."""
    source = token_layout(sizes.height, sizes.width, has_preview=False).num_tokens + 2
    return sizes.prompt_tokens + sizes.num_sources * source


def _counted(work: Callable[[], None]) -> int:
    with torch.no_grad(), measured_on_meta(), FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())
