"""The AR policy: GLM-Image's language model and head, adapters, replay, reference.

Sampling and replay share one distribution: the head's logits cut to the codebook, divided by the
temperature, optionally truncated, normalised in fp32 (`support_log_probs`). The vision tower and
the VQ are always frozen; text-to-image training leaves them on the CPU.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from diffusers import GlmImagePipeline
from jaxtyping import Int64, UInt8
from torch import Tensor, nn
from torch.nn.functional import interpolate
from typing_extensions import override

from glm_grpo.config import Config
from glm_grpo.grpo.credit import TokenPlaces, token_places
from glm_grpo.models.adapted_policy import AdaptedPolicy
from glm_grpo.models.base import Preview
from glm_grpo.models.glm_image.fast.compiled_layers import CompiledLayers
from glm_grpo.models.glm_image.fast.stock_step import choose_step
from glm_grpo.models.glm_image.fast.token_step import GlmImagePrompts
from glm_grpo.models.glm_image.network import GlmImageNetwork, TokenSequences
from glm_grpo.models.glm_image.prefill import read_prompts
from glm_grpo.models.glm_image.prompt_inputs import PromptInputs, encode_prompts, image_tokens
from glm_grpo.models.glm_image.token_grid import (
    PIXELS_PER_TOKEN,
    batch_layout,
    generated_positions,
    token_layout,
)
from glm_grpo.models.token_step import StepBuilder
from glm_grpo.types import PromptBatch, Rollout
from rewards.score_map import Grid

ADAPTED_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")
"""Linear layers that can be adapted."""


class GlmImagePolicy(AdaptedPolicy):
    """GLM-Image's language model as an `AdaptedPolicy`.

    Args:
        pipeline: Published parts; the language model is wrapped or copied, never the decoder.
        is_compiling: Compile the decoder layers if they equal the eager ones; not for weights that
            an engine shards.
    """

    network: GlmImageNetwork

    def __init__(
        self,
        config: Config,
        pipeline: GlmImagePipeline,
        *,
        is_compiling: bool = False,
    ) -> None:
        model = pipeline.vision_language_encoder
        self.processor = pipeline.processor
        self.codebook_size: int = model.config.vq_config.num_embeddings
        network = GlmImageNetwork(
            model.model.language_model,
            model.lm_head,
            codebook_size=self.codebook_size,
            temperature=config.rollout.temperature,
        )
        super().__init__(
            config,
            model,
            network,
            trained=network,
            adapted_modules=ADAPTED_MODULES,
        )
        self._compiled: CompiledLayers | None = None
        if is_compiling:
            networks = (self.network, *self.reference.modules())
            self._compiled = CompiledLayers(*(each.language_model for each in networks))

    def modules(self) -> tuple[nn.Module, nn.Linear]:
        """Language model and head."""
        return (self.model.model.language_model, self.model.lm_head)

    def source_modules(self) -> tuple[nn.Module, nn.Module]:
        """Vision tower and VQ."""
        return (self.model.model.visual, self.model.model.vqmodel)

    @override
    def run_network_once(self) -> None:
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        sequences = TokenSequences(one, one + 1, one.expand(3, 1, 1), one, None)
        with torch.no_grad():
            self.network(sequences)

    def first_layers(self, count: int) -> GlmImagePolicy:
        """See `AdaptedPolicy`; never compiled, which takes a minute and is checked by itself."""
        copied: GlmImagePolicy = super().first_layers(count)
        copied._compiled = None
        return copied

    def _encode(self, batch: PromptBatch) -> PromptInputs:
        if batch.num_sources > 0 and batch.source_token_ids is None:
            raise ValueError("the source images have no tokens; call encode_sources first")
        return encode_prompts(
            self.model,
            self.processor,
            [prompt.prompt for prompt in batch.prompts],
            height=batch.height,
            width=batch.width,
            source_token_ids=batch.source_token_ids,
        )

    def _read_prompts(self, batch: PromptBatch) -> GlmImagePrompts:
        return read_prompts(self.network, self.encode(batch), batch)

    def _choose_step(self, prompts: GlmImagePrompts) -> StepBuilder:
        is_compiling = self._compiled is not None
        return choose_step(self.network, prompts, self._sample_tokens, is_compiling=is_compiling)

    def _num_preview(self, batch: PromptBatch) -> int:
        return batch_layout(batch).num_preview

    @override
    def encode_sources(self, batch: PromptBatch) -> PromptBatch:
        if batch.num_sources == 0:
            return batch
        sources = [source for prompt in batch.prompts for source in prompt.sources]
        ids = image_tokens(self.model, self.processor, torch.stack(sources))
        shape = (len(batch.prompts), batch.num_sources)
        return replace(batch, source_token_ids=ids.unflatten(0, shape))

    @override
    def tokens_per_image(self, batch: PromptBatch) -> int:
        return batch_layout(batch).num_tokens

    def token_places(self, batch: PromptBatch) -> TokenPlaces:
        """See `AdaptedPolicy`; a place is a target token.

        A preview token draws several places, or part of one.
        """
        layout = batch_layout(batch)
        preview, target = Grid(*layout.preview), Grid(*layout.target)
        return token_places((preview, target), target)

    def tokenize_images(
        self,
        pixels: UInt8[Tensor, "N 3 H W"],
        *,
        num_sources: int = 0,
        preview: Preview = "zeros",
    ) -> Int64[Tensor, "N T"]:
        """See `AdaptedPolicy`. `encode` follows FlashAR (arXiv 2605.09430)."""
        target = image_tokens(self.model, self.processor, pixels, is_any_size=True)
        layout = token_layout(*pixels.shape[-2:], has_preview=num_sources == 0)
        if layout.num_preview == 0:
            return target
        if preview == "encode":
            size = [PIXELS_PER_TOKEN * side for side in layout.preview]
            small = interpolate(pixels.float(), size, mode="bicubic", antialias=True)
            small = small.round().clamp(0, 255).to(torch.uint8)
            first = image_tokens(self.model, self.processor, small, is_any_size=True)
        elif preview == "repeat":
            # Token ids are below 2^24, which float32 holds exactly.
            grid = target.unflatten(1, layout.target).unsqueeze(1).float()
            first = interpolate(grid, layout.preview, mode="nearest").flatten(1).long()
        else:
            first = target.new_zeros(len(pixels), layout.num_preview)
        return torch.cat([first, target], dim=1)

    def _sequences(
        self, batch: PromptBatch, rollout: Rollout, rows: Int64[Tensor, " N"]
    ) -> TokenSequences:
        inputs = self.encode(batch).rows(rows // batch.group_size)
        token_ids = rollout.token_ids.flatten(0, 1)[rows]
        layout = batch_layout(batch)
        later = generated_positions(layout, 0).unsqueeze(1) + inputs.next_position.view(1, -1, 1)
        sequences = TokenSequences(
            input_ids=torch.cat([inputs.input_ids, token_ids[:, :-1]], dim=1).to(self.device),
            attention_mask=self._attention_mask(inputs.attention_mask, layout.num_tokens),
            position_ids=torch.cat([inputs.position_ids, later[..., :-1]], dim=2).to(self.device),
            token_ids=token_ids.to(self.device),
            sampling_mask=self._sampling_mask(rollout, rows),
        )
        if self._compiled is not None:
            self._compiled.check(self.network, sequences)
        return sequences
