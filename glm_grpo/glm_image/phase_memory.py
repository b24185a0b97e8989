"""What phases of a step take besides weights, measured on the meta device with the real code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from diffusers import GlmImagePipeline
from torch import Tensor
from torch.optim import AdamW
from transformers import GlmImageForConditionalGeneration

from glm_grpo.glm_image.meta_memory import META, measured_on_meta
from glm_grpo.glm_image.meta_models import PartConfigs, build_language_model
from glm_grpo.glm_image.meta_quantization import quantize_on_meta
from glm_grpo.glm_image.policy import Policy, support_log_probs
from glm_grpo.glm_image.prompt_inputs import PromptInputs
from glm_grpo.glm_image.quantization import AS_PUBLISHED, Quantization
from glm_grpo.glm_image.sampling import Truncation, draw, kept_entries, prefill
from glm_grpo.glm_image.token_grid import generated_positions, token_layout
from glm_grpo.glm_image.token_scores import score_tokens
from glm_grpo.glm_image.token_step import TokenStep

_FEW_LAYERS, _MORE_LAYERS = 4, 6
"""Layers are alike: two depths tell what a further one takes."""


@dataclass(frozen=True)
class ModelSettings:
    """How the policy is held.

    Attributes:
        dtype: Of weights and activations.
        adapter_rank: Of LoRA; None trains language model and head in full.
        is_checkpointing: Activations are computed again in the backward pass.
        needs_reference: A KL to the reference is weighed.
        is_on_accelerator: Chooses the optimizer's form as torch does.
        quantization: Which weights are held in fewer bits.
    """

    dtype: torch.dtype
    adapter_rank: int | None
    is_checkpointing: bool
    needs_reference: bool
    is_on_accelerator: bool
    quantization: Quantization = AS_PUBLISHED


@dataclass(frozen=True)
class BatchSizes:
    """What one step works on.

    Attributes:
        prompts: P.
        group_size: G.
        height: Pixels.
        width: Pixels.
        prompt_tokens: Of the longest prompt.
        micro_batch_size: Images a forward and backward pass.
        is_truncated: By top-k or top-p.
        decode_batch_size: Images of a group that are drawn at once; None: all.
    """

    prompts: int
    group_size: int
    height: int
    width: int
    prompt_tokens: int
    micro_batch_size: int
    is_truncated: bool
    decode_batch_size: int | None = None

    @property
    def images(self) -> int:
        """P * G."""
        return self.prompts * self.group_size

    @property
    def drawn_at_once(self) -> int:
        """Images the decoder works on."""
        return min(self.group_size, self.decode_batch_size or self.group_size)

    @property
    def tokens(self) -> int:
        """T."""
        return token_layout(self.height, self.width).num_tokens


def build_meta_policy(
    configs: PartConfigs, settings: ModelSettings, *, layers: int | None = None
) -> tuple[GlmImageForConditionalGeneration, Policy]:
    """The real policy around a model without values; `layers` as in `build_language_model`."""
    model = build_language_model(configs.language, settings.dtype, layers=layers)
    if settings.quantization.language is not None:
        quantize_on_meta(model)
    policy = Policy(
        GlmImagePipeline(
            tokenizer=None,
            processor=None,
            text_encoder=None,
            vision_language_encoder=model,
            vae=None,
            transformer=None,
            scheduler=None,
        ),
        temperature=1.0,
        adapter_rank=settings.adapter_rank,
        adapter_alpha=1.0,
        is_checkpointing=settings.is_checkpointing,
        needs_reference=settings.needs_reference,
        seed=0,
    )
    return model, policy


def cache_bytes(
    model: GlmImageForConditionalGeneration, sizes: BatchSizes, dtype: torch.dtype
) -> tuple[int, int]:
    """Keys and values of the prompts, kept once a group, and of the generated tokens."""
    per_token = cache_token_bytes(model, dtype)
    prompts = sizes.prompts * sizes.prompt_tokens
    return prompts * per_token, sizes.images * sizes.tokens * per_token


def cache_token_bytes(model: GlmImageForConditionalGeneration, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    text = model.config.text_config
    attention = model.model.language_model.layers[0].self_attn
    heads = 2 * text.num_hidden_layers * text.num_key_value_heads
    return heads * attention.head_dim * dtype.itemsize


def rollout_bytes(configs: PartConfigs, settings: ModelSettings, sizes: BatchSizes) -> int:
    """Most that sampling takes besides weights, cache included."""
    return max(over_layers(configs, lambda layers: _rollout(configs, settings, sizes, layers)))


def update_bytes(configs: PartConfigs, settings: ModelSettings, sizes: BatchSizes) -> int:
    """Most that replay, backward pass and optimizer take besides weights and optimizer state."""
    return max(over_layers(configs, lambda layers: _update(configs, settings, sizes, layers)))


def optimizer_state_bytes(policy: Policy) -> int:
    """Two moments of every trained weight."""
    return 2 * gradient_bytes(policy)


def gradient_bytes(policy: Policy) -> int:
    """Of every trained weight, in its own type."""
    return sum(p.numel() * p.element_size() for p in policy.trainable_parameters())


def over_layers(configs: PartConfigs, measure: Callable[[int], tuple[int, int]]) -> tuple[int, int]:
    """Two figures at the model's depth, from two smaller depths where it is deep."""
    layers = configs.num_layers
    if layers <= _MORE_LAYERS:
        return measure(layers)
    few, more = measure(_FEW_LAYERS), measure(_MORE_LAYERS)
    first, second = (
        low + (high - low) * (layers - _FEW_LAYERS) // (_MORE_LAYERS - _FEW_LAYERS)
        for low, high in zip(few, more, strict=True)
    )
    return first, second


def _rollout(
    configs: PartConfigs, settings: ModelSettings, sizes: BatchSizes, layers: int
) -> tuple[int, int]:
    """Peaks while prompts are read, and while tokens are drawn."""
    model, policy = build_meta_policy(
        configs, replace(settings, needs_reference=False), layers=layers
    )
    language_model = model.model.language_model
    inputs = _prompt_inputs(sizes)
    later = generated_positions(token_layout(sizes.height, sizes.width), 0).unsqueeze(1)
    positions = later + inputs.next_position.view(1, -1, 1)
    with measured_on_meta() as memory, torch.no_grad():
        # A mask would be looked into for padding, and there are no values here.
        _, cache = prefill(
            language_model,
            inputs.input_ids.to(META),
            inputs.position_ids.to(META),
            attention_mask=None,
        )
        reading = memory.peak_bytes
        memory.peak_bytes = memory.live_bytes
        step = TokenStep(
            language_model, inputs, cache, group_size=sizes.group_size, positions=positions
        )
        logits = policy.codebook_logits(step(_zeros(sizes.images)))
        is_kept = kept_entries(logits, Truncation(top_p=0.5)) if sizes.is_truncated else None
        draw(support_log_probs(logits, is_kept), _zeros(sizes.images).double())
    heads = model.config.text_config.num_attention_heads
    # At the last token: scores for prompt and generated tokens, the two joined, their softmax in
    # fp32, in the model's type, and taken apart again.
    scores = sizes.images * heads * (sizes.prompt_tokens + sizes.tokens)
    return reading, memory.peak_bytes + scores * (4 * settings.dtype.itemsize + 4)


def _update(
    configs: PartConfigs, settings: ModelSettings, sizes: BatchSizes, layers: int
) -> tuple[int, int]:
    """Peaks of a backward pass, and of an optimizer step, gradients included."""
    _, policy = build_meta_policy(configs, replace(settings, needs_reference=False), layers=layers)
    parameters = policy.trainable_parameters()
    optimizer = AdamW(parameters, foreach=settings.is_on_accelerator)
    with measured_on_meta() as memory:
        if sizes.micro_batch_size < sizes.images:
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
        torch.autograd.backward(replay_on_meta(policy, sizes).sum())
        replaying = memory.peak_bytes
        optimizer.step()
        # The first step makes the state, which is counted by itself.
        memory.peak_bytes = memory.live_bytes
        optimizer.step()
    return replaying, memory.peak_bytes - optimizer_state_bytes(policy)


def replay_on_meta(policy: Policy, sizes: BatchSizes) -> Tensor:
    """As `Policy.replay`, which reads values of its inputs that there are none of here."""
    language_model, head = policy.modules()
    rows, length = sizes.micro_batch_size, sizes.prompt_tokens + sizes.tokens - 1
    language_model.train()
    hidden_states = language_model(
        input_ids=_zeros(rows, length),
        attention_mask=_zeros(rows, 1, length, length).bool() if _has_padding(sizes) else None,
        position_ids=_zeros(3, rows, length),
        use_cache=False,
    ).last_hidden_state
    entries = policy.codebook_size
    is_kept = _zeros(rows, sizes.tokens, entries).bool() if sizes.is_truncated else None
    scores = score_tokens(
        hidden_states[:, -sizes.tokens :],
        head.weight,
        _zeros(rows, sizes.tokens),
        codebook_size=entries,
        temperature=policy.temperature,
        is_kept=is_kept,
    )
    return scores.log_probs


def _has_padding(sizes: BatchSizes) -> bool:
    """Whether a micro-batch can hold prompts of different lengths, and so needs a mask."""
    return sizes.prompts > 1 and sizes.group_size % sizes.micro_batch_size != 0


def _prompt_inputs(sizes: BatchSizes) -> PromptInputs:
    shape = (sizes.prompts, sizes.prompt_tokens)
    return PromptInputs(
        input_ids=torch.zeros(shape, dtype=torch.int64),
        attention_mask=torch.ones(shape, dtype=torch.int64),
        position_ids=torch.zeros(3, *shape, dtype=torch.int64),
        next_position=torch.full(shape[:1], sizes.prompt_tokens),
    )


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=META)
