"""Section: compare the decoder, piece by piece, with the floor of its operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch
from diffusers import GlmImagePipeline
from torch import Tensor

from benchmarks.full_size.measuring import seconds_of
from benchmarks.full_size.models import pipeline_of
from benchmarks.full_size.scale import WORDS, Bench, Rows, make_batch
from glm_grpo.models.glm_image import decoder as decoder_module
from glm_grpo.models.glm_image.decoder import GlmImageDecoder
from glm_grpo.models.glm_image.token_grid import (
    batch_layout,
    target_token_ids,
    token_layout,
    upsample_token_ids,
)
from glm_grpo.types import PromptBatch

GUIDANCE_SCALE = 1.5
"""As published, so that a step costs two passes."""

_T = TypeVar("_T")

_COMPARED = 2
"""Number of images that the stock pipeline decodes as well, one by one."""


def decoder(bench: Bench) -> Rows:
    """Time a denoising step of a group by optimisation, and the VAE; compare pixels with stock."""
    pipeline = pipeline_of(bench.decoder_part())
    few, _ = bench.scale.timed_steps
    eager = GlmImageDecoder(pipeline, steps=few, guidance_scale=GUIDANCE_SCALE)
    group = _Group(bench, pipeline)
    yield "eager", partial(group.time, eager)
    # Before they are compiled in place.
    for size in bench.scale.vae_batches:
        yield f"VAE, {size} at once", partial(group.time_vae, size)
    drawn = partial(_eagerly, partial(group.images, eager))
    yield "eager against the stock pipeline", lambda: _difference(drawn(), group.stock_images())
    compiled = GlmImageDecoder(
        pipeline, steps=few, guidance_scale=GUIDANCE_SCALE, is_compiling=True
    )
    for place, words in enumerate(WORDS):
        named = f"compiled, {len(words)} letters"
        yield named, partial(group.time_compiled, compiled, place)
    yield "compiled against eager", lambda: _difference(group.images(compiled), drawn())
    for size in bench.scale.vae_batches:
        yield f"compiled VAE, {size} at once", partial(group.time_vae, size)
    for backend in bench.scale.attention:
        timed = partial(group.time_attention, eager, backend)
        yield f"eager, attention {backend}", partial(_eagerly, timed)
    timed = partial(group.time_without_tables, eager)
    yield "eager, rotary tables made in every pass", partial(_eagerly, timed)


class _Group:
    """Token grids of one prompt, to be decoded by different decoders."""

    def __init__(self, bench: Bench, pipeline: GlmImagePipeline) -> None:
        self._bench, self._pipeline = bench, pipeline
        scale = bench.scale
        codebook = pipeline.transformer.config.prior_vq_quantizer_codebook_size
        tokens = token_layout(scale.side, scale.side).num_tokens
        generator = torch.Generator().manual_seed(0)
        shape = (1, scale.group_size, tokens)
        self._token_ids = torch.randint(codebook, shape, generator=generator)
        transformer, self._vae_flops = scale.planner.decoder_flops(scale.side, scale.side)
        self._step_flops = 2 * transformer * scale.group_size

    def time(self, decoder: GlmImageDecoder, place: int = 0) -> dict[str, Any]:
        """Seconds of a denoising step, and of the rest of a group."""
        few, many = self._bench.scale.timed_steps
        batch = self._batch(place)
        # Kernels are selected by size.
        decoder.with_steps(few).decode(batch, self._token_ids)
        least, most = (
            seconds_of(
                partial(decoder.with_steps(steps).decode, batch, self._token_ids),
                self._bench.device,
            )
            for steps in (few, many)
        )
        step = (most - least) / (many - few)
        floor = self._step_flops / self._bench.speed.flops
        return {
            "images": self._token_ids.shape[1],
            "step_seconds": step,
            "floor_seconds": floor,
            "ratio": step / floor,
            "other_seconds": least - few * step,
        }

    def time_compiled(self, decoder: GlmImageDecoder, place: int) -> dict[str, Any]:
        """Like `time`, with the seconds of the first group, which includes compilation."""
        first = seconds_of(
            partial(decoder.decode, self._batch(place), self._token_ids), self._bench.device
        )
        compiled = decoder._compiled
        assert compiled is not None
        return {
            "first_seconds": first,
            "is_used": compiled.is_used,
            "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
            **self.time(decoder, place),
        }

    def time_attention(self, decoder: GlmImageDecoder, backend: str) -> dict[str, Any]:
        """Like `time`, with another attention backend."""
        transformer = self._pipeline.transformer
        transformer.set_attention_backend(backend)
        try:
            return self.time(decoder)
        finally:
            transformer.reset_attention_backend()

    def time_without_tables(self, decoder: GlmImageDecoder) -> dict[str, Any]:
        """Like `time`, without keeping rotary tables on the device."""
        with mock.patch.object(decoder_module._SourceReader, "_rotary_tables", return_value=None):
            return self.time(decoder)

    @torch.no_grad()
    def time_vae(self, size: int) -> dict[str, Any]:
        """Seconds of the VAE for one image."""
        vae, side = self._pipeline.vae, self._bench.scale.side
        factor = 2 ** (len(vae.config.block_out_channels) - 1)
        latents = torch.randn(
            (size, vae.config.latent_channels, side // factor, side // factor),
            device=self._bench.device,
            dtype=vae.dtype,
        )
        work = partial(vae.decode, latents, return_dict=False)
        first = seconds_of(work, self._bench.device)
        seconds = seconds_of(work, self._bench.device, repeats=2) / size
        floor = self._vae_flops / self._bench.speed.flops
        return {
            "first_seconds": first,
            "image_seconds": seconds,
            "floor_seconds": floor,
            "ratio": seconds / floor,
        }

    def images(self, decoder: GlmImageDecoder) -> Tensor:
        """The first images, UInt8 [N, 3, H, W]."""
        _, many = self._bench.scale.timed_steps
        decoded = decoder.with_steps(many).decode(self._batch(0), self._token_ids)
        return decoded.pixels[0, :_COMPARED]

    def stock_images(self) -> Tensor:
        """The same images by the stock pipeline, one by one."""
        batch, (_, many) = self._batch(0), self._bench.scale.timed_steps
        layout = batch_layout(batch)
        prior = upsample_token_ids(target_token_ids(self._token_ids, layout), layout)[0]
        drawn = [
            self._pipeline(
                prompt=batch.prompts[0].prompt,
                prior_token_ids=row.unsqueeze(0).to(self._bench.device),
                generator=torch.Generator().manual_seed(batch.decode_seeds[0]),
                height=batch.height,
                width=batch.width,
                num_inference_steps=many,
                guidance_scale=GUIDANCE_SCALE,
                output_type="pt",
            ).images
            for row in prior[:_COMPARED]
        ]
        return (torch.cat(drawn) * 255).round().to(torch.uint8).cpu()

    def _batch(self, place: int) -> PromptBatch:
        scale = self._bench.scale
        return make_batch(scale.side, prompts=1, group_size=scale.group_size, first=place)


def _eagerly(work: Callable[[], _T]) -> _T:
    """Run eagerly, without the code that another decoder compiled in place."""
    with torch.compiler.set_stance("force_eager"):
        return work()


def _difference(ours: Tensor, theirs: Tensor) -> dict[str, Any]:
    """Differences in levels of 255."""
    levels = (ours.int() - theirs.int()).abs().float()
    return {"mean_levels": float(levels.mean()), "most_levels": int(levels.max())}
