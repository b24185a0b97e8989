"""The frozen decoder: tokens -> DiT -> VAE -> pixels, through the published pipeline itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from diffusers import GlmImagePipeline
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from glm_grpo.glm_image.token_grid import target_token_ids, token_layout, upsample_token_ids
from glm_grpo.types import ImageBatch, PromptBatch


class Decoder:
    """Draws token grids, one group at a time, without gradient.

    One group at a time because glyph embeddings of prompts with different lengths would be padded
    without a mask, and a picture would depend on its neighbours (diffusers issue 13587).

    Args:
        pipeline: Published; its parts are used, not its language model.
        steps: Of denoising, >= 1.
        guidance_scale: 1 for no classifier-free guidance; above it a step costs two passes.
    """

    def __init__(self, pipeline: GlmImagePipeline, *, steps: int, guidance_scale: float) -> None:
        # A pipeline of its own without the language model: that may be on another device.
        self._pipeline = GlmImagePipeline(
            tokenizer=pipeline.tokenizer,
            processor=None,
            text_encoder=pipeline.text_encoder,
            vision_language_encoder=None,
            vae=pipeline.vae,
            transformer=pipeline.transformer,
            scheduler=pipeline.scheduler,
        )
        self._pipeline.set_progress_bar_config(disable=True)
        self._steps = steps
        self._guidance_scale = guidance_scale

    def modules(self) -> tuple[nn.Module, ...]:
        """What decoding needs on the accelerator."""
        parts = self._pipeline
        return (parts.text_encoder, parts.transformer, parts.vae)

    @torch.no_grad()
    def decode(self, batch: PromptBatch, token_ids: Int64[Tensor, "P G T"]) -> ImageBatch:
        """Draws every grid; the images of a prompt share one initial noise.

        Equals the stock pipeline called with the same `prior_token_ids` and `latents`.
        """
        pixels = torch.stack([*self.decode_groups(batch, token_ids)])
        return ImageBatch(pixels=pixels, decode_seeds=batch.decode_seeds)

    @torch.no_grad()
    def decode_groups(
        self, batch: PromptBatch, token_ids: Int64[Tensor, "P G T"]
    ) -> Iterator[UInt8[Tensor, "G 3 H W"]]:
        """As `decode`, prompt by prompt; each group is on the CPU when it is handed out."""
        layout = token_layout(batch.height, batch.width)
        prior = upsample_token_ids(target_token_ids(token_ids, layout), layout)
        for prompt, grids, seed in zip(batch.prompts, prior, batch.decode_seeds, strict=True):
            drawn = self.draw_group(prompt.prompt, grids, seed, batch.height, batch.width)
            # As diffusers turns its pictures into 8 bits.
            yield (drawn * 255).round().to(torch.uint8).cpu()

    @torch.no_grad()
    def draw_group(
        self, prompt: str, prior: Int64[Tensor, "G S4"], seed: int, height: int, width: int
    ) -> Float[Tensor, "G 3 H W"]:
        """Draws the grids of one prompt from one noise; RGB in 0..1, before it is cut to 8 bits."""
        parts = self._pipeline
        device, dtype = parts.transformer.device, parts.transformer.dtype
        size = len(prior)
        embeddings, _ = parts.encode_prompt(
            prompt, do_classifier_free_guidance=False, device=device, dtype=dtype
        )
        noise = self.initial_noise(seed, height=height, width=width)
        return parts(
            prompt_embeds=embeddings.expand(size, -1, -1),
            prior_token_ids=prior.to(device),
            latents=noise.expand(size, -1, -1, -1).to(device),
            height=height,
            width=width,
            num_inference_steps=self._steps,
            guidance_scale=self._guidance_scale,
            output_type="pt",
        ).images

    def initial_noise(self, seed: int, *, height: int, width: int) -> Float[Tensor, "1 C h w"]:
        """The noise the stock pipeline draws for one image from a CPU generator of this seed."""
        parts = self._pipeline
        shape = (
            1,
            parts.transformer.config.in_channels,
            height // parts.vae_scale_factor,
            width // parts.vae_scale_factor,
        )
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator, dtype=parts.transformer.dtype)
