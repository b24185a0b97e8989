"""What phases of a step take besides weights, measured on the meta device with the real code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import GlmImagePipeline
from torch import Tensor
from torch.optim import AdamW
from transformers import GlmImageForConditionalGeneration
from transformers.cache_utils import DynamicCache

from glm_grpo.glm_image.meta_memory import META, measured_on_meta
from glm_grpo.glm_image.meta_models import PartConfigs, build_decoder, build_language_model
from glm_grpo.glm_image.policy import Policy, support_log_probs
from glm_grpo.glm_image.prompt_inputs import PromptInputs
from glm_grpo.glm_image.sampling import Truncation, draw, kept_entries
from glm_grpo.glm_image.token_grid import generated_positions, token_layout
from glm_grpo.glm_image.token_scores import score_tokens
from glm_grpo.glm_image.token_step import TokenStep
from glm_grpo.grpo.update import run_backward

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
    """

    dtype: torch.dtype
    adapter_rank: int | None
    is_checkpointing: bool
    needs_reference: bool
    is_on_accelerator: bool


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
    """

    prompts: int
    group_size: int
    height: int
    width: int
    prompt_tokens: int
    micro_batch_size: int
    is_truncated: bool

    @property
    def images(self) -> int:
        """P * G."""
        return self.prompts * self.group_size

    @property
    def tokens(self) -> int:
        """T."""
        return token_layout(self.height, self.width).num_tokens


def build_meta_policy(
    configs: PartConfigs, settings: ModelSettings, *, layers: int | None = None
) -> tuple[GlmImageForConditionalGeneration, Policy]:
    """The real policy around a model without values; `layers` as in `build_language_model`."""
    model = build_language_model(configs.language, settings.dtype, layers=layers)
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
    text = model.config.text_config
    attention = model.model.language_model.layers[0].self_attn
    per_token = 2 * text.num_hidden_layers * text.num_key_value_heads
    per_token *= attention.head_dim * dtype.itemsize
    prompts = sizes.prompts * sizes.prompt_tokens
    return prompts * per_token, sizes.images * sizes.tokens * per_token


def rollout_bytes(configs: PartConfigs, settings: ModelSettings, sizes: BatchSizes) -> int:
    """Most that sampling takes besides weights, cache included."""
    return max(_over_layers(configs, lambda layers: _rollout(configs, settings, sizes, layers)))


def update_bytes(configs: PartConfigs, settings: ModelSettings, sizes: BatchSizes) -> int:
    """Most that replay, backward pass and optimizer take besides weights and optimizer state."""
    return max(_over_layers(configs, lambda layers: _update(configs, settings, sizes, layers)))


def decode_bytes(configs: PartConfigs, settings: ModelSettings, sizes: BatchSizes) -> int:
    """Most that drawing one group takes besides weights; guidance runs its passes in turn."""
    transformer, vae, _ = build_decoder(configs, settings.dtype)
    group, patch = sizes.group_size, transformer.config.patch_size
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    height, width = sizes.height // factor, sizes.width // factor
    num_patches = height * width // patch**2
    latents: dict[str, Any] = {"dtype": settings.dtype, "device": META}
    with measured_on_meta() as drawing, torch.no_grad():
        transformer(
            hidden_states=torch.empty(
                group, transformer.config.in_channels, height, width, **latents
            ),
            encoder_hidden_states=torch.empty(
                group, sizes.prompt_tokens, transformer.config.text_embed_dim, **latents
            ),
            prior_token_id=_zeros(group, num_patches),
            prior_token_drop=_zeros(group, num_patches).bool(),
            timestep=_zeros(group),
            target_size=_zeros(group, 2).to(settings.dtype),
            crop_coords=_zeros(group, 2).to(settings.dtype),
            return_dict=False,
        )
    with measured_on_meta() as turning, torch.no_grad():
        vae.decode(torch.empty(group, vae.config.latent_channels, height, width, **latents))
    return max(drawing.peak_bytes, turning.peak_bytes)


def optimizer_state_bytes(policy: Policy) -> int:
    """Two moments of every trained weight."""
    return 2 * gradient_bytes(policy)


def gradient_bytes(policy: Policy) -> int:
    """Of every trained weight, in its own type."""
    return sum(p.numel() * p.element_size() for p in policy.trainable_parameters())


def _over_layers(
    configs: PartConfigs, measure: Callable[[int], tuple[int, int]]
) -> tuple[int, int]:
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
        cache = DynamicCache()
        language_model(
            input_ids=inputs.input_ids.to(META),
            position_ids=inputs.position_ids.to(META),
            past_key_values=cache,
            use_cache=True,
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
    # fp32 and in the model's type.
    scores = sizes.images * heads * (sizes.prompt_tokens + sizes.tokens)
    return reading, memory.peak_bytes + scores * (3 * settings.dtype.itemsize + 4)


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
        run_backward(_replay(policy, sizes).sum())
        replaying = memory.peak_bytes
        optimizer.step()
        # The first step makes the state, which is counted by itself.
        memory.peak_bytes = memory.live_bytes
        optimizer.step()
    return replaying, memory.peak_bytes - optimizer_state_bytes(policy)


def _replay(policy: Policy, sizes: BatchSizes) -> Tensor:
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
        head.weight[:entries],
        _zeros(rows, sizes.tokens),
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
