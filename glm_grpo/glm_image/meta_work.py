"""What the parts of a model have to do, counted on the meta device: floors follow from it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from glm_grpo.glm_image.floors import DecoderWork, LanguageWork
from glm_grpo.glm_image.meta_memory import META, measured_on_meta, module_bytes
from glm_grpo.glm_image.meta_models import PartConfigs, build_decoder, build_language_model
from glm_grpo.glm_image.phase_memory import ModelSettings, build_meta_policy, cache_token_bytes


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


def decoder_work(configs: PartConfigs, *, height: int, width: int) -> DecoderWork:
    """Of one image, without glyphs: how many a prompt has, its config does not say.

    Args:
        configs: Of the model.
        height: Pixels.
        width: Pixels.
    """
    dtype = torch.bfloat16
    transformer, vae, _ = build_decoder(configs, dtype)
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    height, width = height // factor, width // factor
    latents: dict[str, Any] = {"dtype": dtype, "device": META}
    num_patches = height * width // transformer.config.patch_size**2
    ids = torch.zeros(1, num_patches, dtype=torch.int64, device=META)
    numbers = torch.zeros(1, 2, **latents)
    with torch.no_grad(), measured_on_meta(), FlopCounterMode(display=False) as drawing:
        transformer(
            hidden_states=torch.empty(1, transformer.config.in_channels, height, width, **latents),
            encoder_hidden_states=torch.empty(1, 0, transformer.config.text_embed_dim, **latents),
            prior_token_id=ids,
            prior_token_drop=ids.bool(),
            timestep=torch.zeros(1, dtype=torch.int64, device=META),
            target_size=numbers,
            crop_coords=numbers,
            return_dict=False,
        )
    with torch.no_grad(), measured_on_meta(), FlopCounterMode(display=False) as turning:
        vae.decode(torch.empty(1, vae.config.latent_channels, height, width, **latents))
    return DecoderWork(
        transformer_flops=drawing.get_total_flops(), vae_flops=turning.get_total_flops()
    )
