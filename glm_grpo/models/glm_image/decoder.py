"""Decode tokens into pixels with the frozen DiT and VAE of the published pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, lru_cache

import torch
from diffusers import AutoencoderKL, GlmImagePipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.transformers.transformer_glm_image import (
    GlmImageKVCache,
    GlmImageTransformer2DModel,
)
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor, nn

from glm_grpo.errors import DecoderError
from glm_grpo.models.glm_image.fast.compiled_decoder import CHECKED_STEPS, CompiledDecoder
from glm_grpo.models.glm_image.token_grid import (
    batch_layout,
    target_token_ids,
    token_layout,
    upsample_token_ids,
)
from glm_grpo.types import ImageBatch, PromptBatch

_REMEMBERED_TEXTS = 256
"""Texts whose embeddings are kept in CPU memory; in the published model, 3 kB per letter and
text."""

_LARGEST_DECODED = 2 * 128 * 128
"""Pixels to pass through the VAE together by default; more were not faster on the CPU."""


class GlmImageDecoder:
    """Decodes token grids, one group at a time, without gradient.

    Groups are separate because glyph embeddings of prompts with different lengths would be padded
    without a mask, and an image would depend on its neighbours (diffusers issue 13587). Small
    groups whose glyph embeddings have the same length are decoded together.

    Args:
        pipeline: Published pipeline; its language model is not used.
        steps: Number of denoising steps, >= 1.
        guidance_scale: 1 for no classifier-free guidance; above 1, a step costs two passes.
        batch_size: Images to decode at once, >= 1; None: a whole group. Changes images only by
            rounding.
        joined_size: Largest number of images of several groups to decode at once; 1: do not join
            groups. Changes images only by rounding.
        vae_batch_size: Largest number of images to pass through the VAE at once; None: as many as
            are fast on the CPU.
        is_compiling: Whether to compile the networks; see `CompiledDecoder`.
    """

    def __init__(
        self,
        pipeline: GlmImagePipeline,
        *,
        steps: int,
        guidance_scale: float,
        batch_size: int | None = None,
        joined_size: int = 1,
        vae_batch_size: int | None = None,
        is_compiling: bool = False,
    ) -> None:
        self._transformer = _SourceReader(pipeline.transformer)
        # A separate pipeline without the language model, which may be on another device.
        self._pipeline = _RememberingPipeline(
            tokenizer=pipeline.tokenizer,
            processor=None,
            text_encoder=pipeline.text_encoder,
            vision_language_encoder=None,
            vae=_SlicedVae(pipeline.vae, vae_batch_size),
            transformer=self._transformer,
            scheduler=pipeline.scheduler,
        )
        self._pipeline.image_processor = _MarkingImageProcessor(
            vae_scale_factor=self._pipeline.vae_scale_factor
        )
        self._pipeline.set_progress_bar_config(disable=True)
        # The layout of convolutions; otherwise each of them converts its input and output.
        self._vae = pipeline.vae.to(memory_format=torch.channels_last)
        self.steps = steps
        self._guidance_scale = guidance_scale
        self._batch_size = batch_size
        self._joined_size = min(joined_size, batch_size or joined_size)
        self._compiled = (
            CompiledDecoder(pipeline.transformer, pipeline.vae) if is_compiling else None
        )

    def with_steps(self, steps: int) -> GlmImageDecoder:
        """The same models with another number of denoising steps, >= 1."""
        other = copy.copy(self)
        other.steps = steps
        return other

    def modules(self) -> tuple[nn.Module, ...]:
        """Modules that decoding needs on the accelerator."""
        parts = self._pipeline
        return (parts.text_encoder, self._transformer.published, self._vae)

    @torch.no_grad()
    def decode(self, batch: PromptBatch, token_ids: Int64[Tensor, "P G T"]) -> ImageBatch:
        """Decode every grid; the images of a prompt share the same initial noise.

        Equals the stock pipeline called with the same `prior_token_ids` and `latents`, and for
        edits with the same `image`, `prior_token_image_ids` and `source_image_grid_thw`.

        Raises:
            DecoderError: A pixel is not finite; the message names prompt and sample.
        """
        pixels = torch.stack([*self.decode_groups(batch, token_ids)])
        return ImageBatch(pixels=pixels, decode_seeds=batch.decode_seeds)

    @torch.no_grad()
    def decode_groups(
        self, batch: PromptBatch, token_ids: Int64[Tensor, "P G T"]
    ) -> Iterator[UInt8[Tensor, "G 3 H W"]]:
        """Like `decode`, prompt by prompt; each group is on the CPU when it is yielded."""
        layout = batch_layout(batch)
        prior = upsample_token_ids(target_token_ids(token_ids, layout), layout)
        joined = self._joined_prompts(batch)
        decoded: dict[int, UInt8[Tensor, "G 3 H W"]] = {}
        for index in range(len(batch.prompts)):
            if index not in decoded:
                rows = next(joined)
                decoded |= zip(rows, self._decode_prompts(batch, rows, prior[rows]), strict=True)
            yield decoded.pop(index)

    def _joined_prompts(self, batch: PromptBatch) -> Iterator[list[int]]:
        """Positions of the prompts to decode together, ordered by the first of each."""
        most = 1 if batch.num_sources > 0 else max(1, self._joined_size // batch.group_size)
        if most == 1:
            yield from ([row] for row in range(len(batch.prompts)))
            return
        by_length: dict[int, list[int]] = {}
        for row, prompt in enumerate(batch.prompts):
            by_length.setdefault(self._embed(prompt.prompt).shape[1], []).append(row)
        parts = (
            rows[start : start + most]
            for rows in by_length.values()
            for start in range(0, len(rows), most)
        )
        yield from sorted(parts)

    def _decode_prompts(
        self, batch: PromptBatch, rows: list[int], prior: Int64[Tensor, "P G S4"]
    ) -> UInt8[Tensor, "P G 3 H W"]:
        """Decode the groups of these prompts; P is the number of rows."""
        prompts = [batch.prompts[row] for row in rows]
        seeds = [batch.decode_seeds[row] for row in rows]
        texts = [prompt.prompt for prompt in prompts]
        # Read by every image of the group, and freed even if one fails.
        with self._transformer.reading(self._write_sources(batch, rows[0])):
            if self._compiled is not None:
                few = self.with_steps(min(self.steps, CHECKED_STEPS))

                def decode(size: int) -> Float[Tensor, "N 3 H W"]:
                    """Decode the first images of the first prompt."""
                    first = prior[:1, :size]
                    return few.decode_pixels(
                        texts[:1], first, seeds[:1], batch.height, batch.width
                    )[0]

                self._compiled.check(decode, batch.group_size)
            decoded = self.decode_pixels(texts, prior, seeds, batch.height, batch.width)
        for prompt, group in zip(prompts, decoded, strict=True):
            _refuse_non_finite(group, prompt.prompt_id)
        # Converted to 8 bits as in diffusers.
        return (decoded * 255).round().to(torch.uint8).cpu()

    @torch.no_grad()
    def decode_pixels(
        self,
        texts: Sequence[str],
        prior: Int64[Tensor, "P G S4"],
        seeds: Sequence[int],
        height: int,
        width: int,
    ) -> Float[Tensor, "P G 3 H W"]:
        """Decode to RGB in 0..1, before rounding to 8 bits.

        Args:
            texts: The P prompts, whose glyph embeddings have the same length.
            prior: Upsampled target tokens.
            seeds: Noise seed of each prompt.
        """
        parts, (_, group_size, _) = self._pipeline, prior.shape
        device, grids = parts.transformer.device, prior.flatten(0, 1)
        embeddings = torch.cat([self._embed(text).expand(group_size, -1, -1) for text in texts])
        noise = torch.cat(
            [
                self.initial_noise(seed, height=height, width=width).expand(group_size, -1, -1, -1)
                for seed in seeds
            ]
        ).to(device)
        size = min(self._batch_size or len(grids), len(grids))
        with self._running():
            decoded = [
                parts(
                    prompt_embeds=embeddings[start : start + size],
                    prior_token_ids=grids[start : start + size].to(device),
                    latents=noise[start : start + size],
                    height=height,
                    width=width,
                    num_inference_steps=self.steps,
                    guidance_scale=self._guidance_scale,
                    output_type="pt",
                ).images
                for start in range(0, len(grids), size)
            ]
        return torch.cat(decoded).unflatten(0, prior.shape[:2])

    def _running(self, *, is_eager: bool = False) -> AbstractContextManager[None]:
        if self._compiled is None:
            return nullcontext()
        return self._compiled.running(is_eager=is_eager)

    def _embed(self, text: str) -> Float[Tensor, "1 L D"]:
        """Glyph embeddings of the quoted text of a prompt."""
        transformer = self._transformer
        embeddings: Tensor
        embeddings, _ = self._pipeline.encode_prompt(
            text,
            do_classifier_free_guidance=False,
            device=transformer.device,
            dtype=transformer.dtype,
        )
        return embeddings

    def _write_sources(self, batch: PromptBatch, index: int) -> GlmImageKVCache | None:
        """Keys and values of a prompt's source images in every layer, computed once per group.

        Source: `GlmImagePipeline.__call__` (diffusers), step 6.
        """
        if batch.source_token_ids is None:
            return None
        sources = batch.prompts[index].sources
        transformer, vae = self._transformer.published, self._vae
        device, dtype = transformer.device, transformer.dtype
        shape = {"device": device, "dtype": dtype}
        mean = torch.tensor(vae.config.latents_mean, **shape).view(1, -1, 1, 1)
        std = torch.tensor(vae.config.latents_std, **shape).view(1, -1, 1, 1)
        cache = GlmImageKVCache(num_layers=transformer.config.num_layers)
        cache.set_mode("write")
        for source, ids in zip(sources, batch.source_token_ids[index], strict=True):
            layout = token_layout(*source.shape[-2:], has_preview=False)
            prior = upsample_token_ids(ids[None], layout).to(device)
            pixels = (2 * (source[None].to(device).float() / 255) - 1).to(dtype)
            latents = (vae.encode(pixels).latent_dist.mode() - mean) / std
            # Runs once per prompt, so compiling for the empty text is not worthwhile.
            with self._running(is_eager=True):
                transformer(
                    hidden_states=latents,
                    encoder_hidden_states=torch.empty(
                        1, 0, transformer.config.text_embed_dim, device=device, dtype=dtype
                    ),
                    prior_token_id=prior,
                    prior_token_drop=torch.zeros_like(prior, dtype=torch.bool),
                    timestep=torch.zeros(1, device=device, dtype=torch.float32),
                    target_size=torch.tensor([source.shape[-2:]], device=device),
                    crop_coords=torch.zeros(1, 2, device=device, dtype=torch.float32),
                    kv_caches=cache,
                )
        return cache

    def initial_noise(self, seed: int, *, height: int, width: int) -> Float[Tensor, "1 C h w"]:
        """Noise that the stock pipeline draws for one image from a CPU generator with this seed."""
        parts = self._pipeline
        shape = (
            1,
            parts.transformer.config.in_channels,
            height // parts.vae_scale_factor,
            width // parts.vae_scale_factor,
        )
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator, dtype=parts.transformer.dtype)


def _refuse_non_finite(decoded: Float[Tensor, "G 3 H W"], prompt_id: str) -> None:
    # In 8 bits NaN becomes black: an ordinary image, which terms would score.
    for sample in decoded.isnan().flatten(1).any(dim=1).nonzero().flatten().tolist():
        raise DecoderError(
            f"decode: pixels of prompt {prompt_id}, sample {sample} are not finite; the decoder's "
            "weights are damaged, or overflow in model.dtype: load them again, or set "
            "model.dtype=float32"
        )


def decoded_at_once(images: int, height: int, width: int, vae_batch_size: int | None = None) -> int:
    """Number of `images` of `height` x `width` pixels to pass through the VAE together.

    At most `vae_batch_size`; None: two of 128 x 128 pixels, otherwise one.

    It divides their number: a smaller last batch would be rounded differently, and samples with
    equal tokens would get different pixels. This is exact on one thread; on two, one value in
    100,000 still differs by one level of 255.
    """
    most = vae_batch_size or max(1, _LARGEST_DECODED // (height * width))
    return max(size for size in range(1, most + 1) if images % size == 0)


class _SourceReader(nn.Module):
    """The published transformer, except that its conditional passes read source images.

    The pipeline computes their keys and values again for every image of a group; here they are
    computed once.
    """

    def __init__(self, transformer: GlmImageTransformer2DModel) -> None:
        super().__init__()
        self.published = transformer
        self.config = transformer.config
        self._sources: GlmImageKVCache | None = None
        self._rotary: dict[tuple[torch.Size, torch.device], tuple[Tensor, ...]] = {}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.published.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.published.device

    @contextmanager
    def reading(self, sources: GlmImageKVCache | None) -> Iterator[None]:
        """Let passes in this context read `sources`, which are freed at its end."""
        self._sources = sources
        try:
            yield
        finally:
            self._sources = None

    def forward(
        self,
        *,
        hidden_states: Float[Tensor, "N C h w"],
        prior_token_drop: Bool[Tensor, "N S4"],
        kv_caches: GlmImageKVCache | None = None,
        **inputs: object,
    ) -> tuple[Tensor]:
        """Like upstream. Unconditional passes, which drop the prior, skip the sources."""
        if self._sources is not None:
            self._sources.set_mode("skip" if prior_token_drop.all() else "read")
            kv_caches = self._sources
        return self.published(
            hidden_states=hidden_states,
            prior_token_drop=prior_token_drop,
            kv_caches=kv_caches,
            image_rotary_emb=self._rotary_tables(hidden_states),
            **inputs,
        )

    def _rotary_tables(self, hidden_states: Float[Tensor, "N C h w"]) -> tuple[Tensor, ...]:
        """Cosine and sine of the positions, on the device.

        Upstream computes them on the CPU in every pass, and every block copies them.
        """
        key = (hidden_states.shape[-2:], hidden_states.device)
        if key not in self._rotary:
            tables = self.published.rope(hidden_states)
            self._rotary = {key: tuple(table.to(hidden_states.device) for table in tables)}
        return self._rotary[key]


class _SlicedVae(nn.Module):
    """The published VAE, except that it processes a group in slices of at least one image.

    Its last layers hold many channels per pixel: for a whole group more than fits in caches, and at
    1024 x 1024 more than the free memory of a small accelerator. Upstream's `enable_slicing` always
    takes one image at a time, which is slower for small images.
    """

    def __init__(self, vae: AutoencoderKL, batch_size: int | None) -> None:
        super().__init__()
        self._vae = vae
        self._batch_size = batch_size
        self.config = vae.config

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self._vae.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._vae.device

    def decode(
        self, latents: Float[Tensor, "N C h w"], *, return_dict: bool, generator: None
    ) -> tuple[Float[Tensor, "N 3 H W"]]:
        """Like upstream, without `return_dict` and the generator, which it never uses."""
        factor = 2 ** (len(self.config.block_out_channels) - 1)
        height, width = (factor * size for size in latents.shape[-2:])
        parts = latents.split(decoded_at_once(len(latents), height, width, self._batch_size))
        return (torch.cat([self._vae.decode(part, return_dict=False)[0] for part in parts]),)


class _MarkingImageProcessor(VaeImageProcessor):
    """Like the published processor, except that infinite pixels become NaN instead of white."""

    def postprocess(self, image: Tensor, output_type: str) -> Tensor:
        """Like upstream."""
        return super().postprocess(image.masked_fill(image.isinf(), torch.nan), output_type)


class _RememberingPipeline(GlmImagePipeline):
    """Like the published pipeline, except that it encodes each text only once.

    The stock pipeline with guidance encodes the empty text again in every call, and prompts recur
    in every epoch and every evaluation.
    """

    def _get_glyph_embeds(
        self,
        prompt: str | Sequence[str],
        max_sequence_length: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Float[Tensor, "N L D"]:
        """Like upstream, for the same text N times."""
        texts = [prompt] if isinstance(prompt, str) else [*prompt]
        if len({*texts}) != 1:
            raise ValueError(
                f"{len({*texts})} different texts: those of different length would be padded "
                "without a mask; decode one prompt at a time"
            )
        kept = self._encode_once(texts[0], max_sequence_length, device, dtype)
        return kept.to(device).expand(len(texts), -1, -1)

    @cached_property
    def _encode_once(self) -> Callable[[str, int, torch.device, torch.dtype], Tensor]:
        encode = super()._get_glyph_embeds

        @lru_cache(maxsize=_REMEMBERED_TEXTS)
        def encode_once(
            text: str, max_sequence_length: int, device: torch.device, dtype: torch.dtype
        ) -> Tensor:
            return encode([text], max_sequence_length, device, dtype).cpu()

        return encode_once
