"""What drawing pictures takes besides weights, found on the meta device with the real modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glm_grpo.glm_image.decoder import turned_at_once
from glm_grpo.glm_image.meta_memory import META, measured_on_meta
from glm_grpo.glm_image.meta_models import PartConfigs, build_decoder
from glm_grpo.glm_image.phase_memory import BatchSizes, ModelSettings


def decode_bytes(configs: PartConfigs, settings: ModelSettings, sizes: BatchSizes) -> int:
    """Most that drawing one group takes besides weights; guidance runs its passes in turn."""
    transformer, vae, _ = build_decoder(configs, settings.dtype)
    at_once, patch = sizes.drawn_at_once, transformer.config.patch_size
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    height, width = sizes.height // factor, sizes.width // factor
    num_patches = height * width // patch**2
    latents: dict[str, Any] = {"dtype": settings.dtype, "device": META}
    with measured_on_meta() as drawing, torch.no_grad():
        transformer(
            hidden_states=torch.empty(
                at_once, transformer.config.in_channels, height, width, **latents
            ),
            encoder_hidden_states=torch.empty(
                at_once, sizes.prompt_tokens, transformer.config.text_embed_dim, **latents
            ),
            prior_token_id=_zeros(at_once, num_patches),
            prior_token_drop=_zeros(at_once, num_patches).bool(),
            timestep=_zeros(at_once),
            target_size=_zeros(at_once, 2).to(settings.dtype),
            crop_coords=_zeros(at_once, 2).to(settings.dtype),
            return_dict=False,
        )
    rest = sizes.group_size % at_once or at_once
    turned = max(turned_at_once(n, sizes.height, sizes.width) for n in (at_once, rest))
    with measured_on_meta() as turning, torch.no_grad():
        vae.decode(torch.empty(turned, vae.config.latent_channels, height, width, **latents))
    # What was turned before waits, and is put together while all of it is there.
    picture = 3 * sizes.height * sizes.width * settings.dtype.itemsize
    turning_bytes = turning.peak_bytes + (at_once - turned) * picture
    together_bytes = 2 * at_once * picture
    # A layer of the transformer at a time is cast.
    cast = 0
    if settings.quantization.decoder is not None:
        cast = max(weight.numel() for weight in transformer.parameters()) * settings.dtype.itemsize
    # The pictures that are finished wait for the rest of their group.
    waiting = (sizes.group_size - at_once) * picture
    return max(drawing.peak_bytes + cast, turning_bytes, together_bytes) + waiting


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=META)
