"""Stages `vae` and `decoder`: map pixels to latents and back, and tokens to latents.

Three in four training images are mosaics of random cells, so that the decoder learns every token
in every position. Glyph texts are unrelated to the image, so that its content depends only on the
tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, GlmImageTransformer2DModel
from jaxtyping import Float32, Int64
from torch import Tensor
from torch.nn import functional
from transformers import ByT5Tokenizer, T5EncoderModel

from glm_grpo.tiny import world
from tools.tiny.stage import Schedule, train_stage

_VAE_BATCH = 12
_BATCH = 24
_POOL = 6144
"""Number of images encoded in advance; encoding new ones would take half of every step."""
_DROP_RATE = 0.1
"""Fraction of images trained without tokens, for classifier-free guidance."""


def random_cells(rng: np.random.Generator, count: int) -> Int64[Tensor, "B 4 4"]:
    """Draw grids of cells: three mosaics for each sign."""
    grids = [
        world.sign_cells(world.random_sign(rng)) if index % 4 == 0 else world.random_mosaic(rng)
        for index in range(count)
    ]
    return torch.stack(grids)


def train_vae(vae: AutoencoderKL, *, folder: Path, seed: int) -> None:
    """Train the autoencoder in place, and set the mean and std of its latents in its config."""
    vae.requires_grad_(True)

    def loss_at(
        rng: np.random.Generator, generator: torch.Generator, step: int
    ) -> Float32[Tensor, ""]:
        # Four in five steps use a quarter of the image: it suffices for convolutions, and takes a
        # quarter of the time.
        cells = random_cells(rng, _VAE_BATCH)
        pixels = _scaled(cells if step % 5 == 0 else cells[:, 1:3, 1:3])
        mean = vae.encode(pixels).latent_dist.mean
        # Slight noise on the latents keeps similar latents similar in pixels, which is the only
        # purpose of a VAE's KL term here.
        noise = torch.randn(mean.shape, generator=generator)
        restored = vae.decode(mean + 0.05 * noise).sample
        edges = functional.l1_loss(restored.diff(dim=-1), pixels.diff(dim=-1)) + functional.l1_loss(
            restored.diff(dim=-2), pixels.diff(dim=-2)
        )
        return functional.l1_loss(restored, pixels) + 0.5 * edges + 1e-3 * mean.square().mean()

    train_stage(
        "vae",
        (vae,),
        loss_at,
        schedule=Schedule(steps=1600, learning_rate=2e-3, weight_decay=0.0),
        folder=folder,
        seed=seed,
    )
    with torch.no_grad():
        latents = vae.encode(_scaled(random_cells(np.random.default_rng(seed), 64)))
    mean = latents.latent_dist.mean
    vae.register_to_config(
        latents_mean=mean.mean(dim=(0, 2, 3)).tolist(),
        latents_std=mean.std(dim=(0, 2, 3)).tolist(),
    )


def train_decoder(
    transformer: GlmImageTransformer2DModel,
    text_encoder: T5EncoderModel,
    vae: AutoencoderKL,
    glyph_tokenizer: ByT5Tokenizer,
    tokens_of_cells: Int64[Tensor, " C"],
    *,
    steps: int,
    folder: Path,
    seed: int,
) -> None:
    """Train the DiT and the glyph encoder in place by flow matching.

    Args:
        transformer: Predicts noise - latents at a noise level.
        text_encoder: Glyph encoder, trained as well.
        vae: Trained VAE, which provides the latents.
        glyph_tokenizer: Byte tokenizer.
        tokens_of_cells: Token of every cell.
        steps: Number of steps, with 24 images each.
        seed: Seed of the whole pre-training.
    """
    transformer.requires_grad_(True)
    text_encoder.requires_grad_(True)
    vae.requires_grad_(False)
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1)
    size = torch.full((_BATCH, 2), float(world.SIZE))
    pool_cells = random_cells(np.random.default_rng(seed), _POOL)
    with torch.no_grad():
        pool_latents = torch.cat(
            [vae.encode(_scaled(part)).latent_dist.mean for part in pool_cells.split(32)]
        )
    pool_latents = (pool_latents - mean) / std

    def loss_at(
        rng: np.random.Generator, generator: torch.Generator, step: int
    ) -> Float32[Tensor, ""]:
        chosen = torch.from_numpy(rng.integers(_POOL, size=_BATCH))
        cells, latents = pool_cells[chosen], pool_latents[chosen]
        tokens = tokens_of_cells[cells].repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)
        is_dropped = torch.from_numpy(rng.random(_BATCH) < _DROP_RATE)
        # High noise levels are the hard ones, because the image must then come from the tokens.
        level = torch.from_numpy(rng.beta(1.6, 1.0, size=_BATCH)).float().clamp(1e-3, 1)
        mixing = level.view(-1, 1, 1, 1)
        noise = torch.randn(latents.shape, generator=generator)
        prediction = transformer(
            hidden_states=(1 - mixing) * latents + mixing * noise,
            encoder_hidden_states=_glyphs(text_encoder, glyph_tokenizer, rng),
            prior_token_id=tokens,
            prior_token_drop=is_dropped.view(-1, 1).expand(-1, tokens.shape[1]),
            timestep=1000 * level - 1,
            target_size=size,
            crop_coords=torch.zeros_like(size),
        ).sample
        return functional.mse_loss(prediction, noise - latents)

    train_stage(
        "decoder",
        (transformer, text_encoder),
        loss_at,
        schedule=Schedule(steps=steps, learning_rate=1.5e-3, warmup_steps=200),
        folder=folder,
        seed=seed,
    )


def _scaled(cells: Int64[Tensor, "B h w"]) -> Float32[Tensor, "B 3 H W"]:
    return world.draw_cells(cells).float() / 127.5 - 1


def _glyphs(
    text_encoder: T5EncoderModel, tokenizer: ByT5Tokenizer, rng: np.random.Generator
) -> Tensor:
    """Glyph embeddings of one random word for the whole batch (rows of one length, no padding)."""
    word = "" if rng.random() < _DROP_RATE else world.random_sign(rng).word
    ids = tokenizer([word]).input_ids[0]
    # The pipeline pads in front if a prompt quotes an even number of texts; here it is one.
    embeddings = text_encoder(torch.tensor([ids])).last_hidden_state
    return embeddings.expand(_BATCH, -1, -1)
