"""The least time a step of a config can take on a device, from work counted on the meta device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from glm_grpo.config import Config
from glm_grpo.models.glm_image.memory import (
    BatchSizes,
    ModelSettings,
    build_meta_policy,
    cache_token_bytes,
    draw_on_meta,
    turn_on_meta,
)
from glm_grpo.models.glm_image.meta import (
    PartConfigs,
    build_decoder,
    build_language_model,
    measured_on_meta,
    module_bytes,
    read_part_configs,
)
from glm_grpo.plan.floors import (
    DeviceSpeed,
    LanguageWork,
    SequenceSizes,
    decode_flops,
    rollout_floor,
    update_flops,
)
from glm_grpo.plan.memory import MemoryPlan, batch_sizes, model_settings


def step_floors(
    config: Config,
    path: str,
    *,
    prompt_tokens: int,
    plan: MemoryPlan,
    device: DeviceSpeed,
    processes: int = 1,
) -> dict[str, float]:
    """Seconds by phase; reward terms have no floor, since what they do is their own.

    Args:
        config: Of the run.
        path: Folder of the model, or the published model's hub id.
        prompt_tokens: Of the longest prompt; all are taken to be as long.
        plan: Of the same config: says what offloading moves.
        device: Where it runs.
        processes: That share the prompts, each on such a device; what they send each other is not
            counted.

    Raises:
        ModelError: The model's configs are not at hand.
    """
    configs = read_part_configs(path)
    sizes = batch_sizes(config, prompt_tokens=prompt_tokens, processes=processes)
    language = language_work(configs, model_settings(config, is_on_accelerator=True))
    sequences = SequenceSizes(
        prompts=sizes.prompts,
        group_size=sizes.group_size,
        prompt_tokens=prompt_tokens,
        tokens=sizes.tokens,
    )
    decoding = decode_flops(
        *decoder_work(configs, height=sizes.height, width=sizes.width),
        images=sizes.images,
        steps=config.decode.rollout_steps or config.decode.steps,
        guidance_scale=config.decode.guidance_scale,
    )
    learning = update_flops(
        language,
        sequences,
        updates=config.train.updates_per_rollout,
        is_full=config.model.adapter is None,
        is_checkpointing=config.model.gradient_checkpointing,
        needs_reference=config.loss.kl_coef > 0,
    )
    seconds = {
        "rollout": rollout_floor(language, sequences, device),
        "decode": decoding / device.flops,
        "update": learning / device.flops,
    }
    if plan.moved_in:
        seconds["offload"] = (plan.moved_in + plan.moved_out) / device.link
    return seconds


def language_work(configs: PartConfigs, settings: ModelSettings) -> LanguageWork:
    """Of the language model as a run holds it; adapters are read, their operations not counted."""
    # As published: entries of matrices are counted there, whatever form a run keeps them in.
    plain = build_language_model(configs.language, settings.dtype, layers=1)
    layer = plain.model.language_model.layers[0]
    head = plain.lm_head.weight
    drawn = plain.config.vq_config.num_embeddings
    held, policy = build_meta_policy(configs, settings)
    text = held.config.text_config
    read = module_bytes(policy.modules())
    read -= module_bytes([held.model.language_model.embed_tokens])
    read -= (len(head) - drawn) * head.shape[1] * settings.dtype.itemsize
    return LanguageWork(
        # Layers are alike.
        layer_entries=configs.num_layers
        * sum(p.numel() for p in layer.parameters() if p.dim() > 1),
        head_entries=drawn * head.shape[1],
        attention_width=configs.num_layers * text.num_attention_heads * layer.self_attn.head_dim,
        read_bytes=read,
        cache_bytes=cache_token_bytes(held, settings.dtype),
    )


def decoder_work(configs: PartConfigs, *, height: int, width: int) -> tuple[int, int]:
    """Operations of a pass of the diffusion transformer and of the VAE, for one image.

    Without glyphs: how many a prompt has, its config does not say.

    Args:
        configs: Of the model.
        height: Pixels.
        width: Pixels.
    """
    dtype = torch.bfloat16
    transformer, vae, _ = build_decoder(configs, dtype)
    sizes = BatchSizes(1, 1, height, width, 0, 1, is_truncated=False)
    return (
        _counted(lambda: draw_on_meta(transformer, vae, sizes, dtype, images=1)),
        _counted(lambda: turn_on_meta(vae, sizes, dtype, images=1)),
    )


def _counted(work: Callable[[], None]) -> int:
    with torch.no_grad(), measured_on_meta(), FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())
