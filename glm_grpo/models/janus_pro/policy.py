"""The AR policy: Janus-Pro's language model, adapters, replay and reference under guidance.

Sampling, replay, reference and entropy are of one distribution: the guided logits, divided by the
temperature, optionally truncated, normalised in fp32. Gradients flow through both branches of the
guidance. Generation head, aligner and embeddings are always frozen.
"""

from __future__ import annotations

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor, nn
from typing_extensions import override

from glm_grpo.config import Config
from glm_grpo.grpo.credit import TokenPlaces, token_places
from glm_grpo.models.adapted_policy import AdaptedPolicy
from glm_grpo.models.base import Preview
from glm_grpo.models.janus_pro.loading import JanusPro, image_side
from glm_grpo.models.janus_pro.network import JanusNetwork, TokenSequences, guidance_of
from glm_grpo.models.janus_pro.prefill import read_prompts
from glm_grpo.models.janus_pro.prompt_inputs import (
    PromptInputs,
    encode_prompts,
    image_tokens,
    special_ids,
)
from glm_grpo.models.janus_pro.token_step import JanusPrompts, choose_step
from glm_grpo.models.token_step import StepBuilder
from glm_grpo.types import PromptBatch, Rollout
from rewards.score_map import Grid

ADAPTED_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers that can be adapted."""


class JanusProPolicy(AdaptedPolicy):
    """Janus-Pro's language model as an `AdaptedPolicy`.

    Args:
        parts: Stock model and processor; the model is wrapped or copied.
    """

    network: JanusNetwork

    def __init__(self, config: Config, parts: JanusPro) -> None:
        model = parts.model
        self.processor = parts.processor
        self.codebook_size: int = model.config.vq_config.num_embeddings
        self._side: int = model.model.vqmodel.quantize.quant_state_dims[0]
        self.ids = special_ids(model, parts.processor)
        network = JanusNetwork(
            model,
            temperature=config.rollout.temperature,
            guidance_scale=guidance_of(config.rollout),
        )
        super().__init__(
            config,
            model,
            network,
            trained=network.language_model,
            adapted_modules=ADAPTED_MODULES,
        )

    def modules(self) -> tuple[nn.Module, ...]:
        """Language model, and the embeddings, aligner and head of generated tokens."""
        network = self.network
        return (
            network.language_model,
            network.generation_embeddings,
            network.generation_aligner,
            network.generation_head,
        )

    def source_modules(self) -> tuple[nn.Module, nn.Module]:
        """Encoder of the VQ; the codebook stays with the decoder."""
        vqmodel = self.model.model.vqmodel
        return (vqmodel.encoder, vqmodel.quant_conv)

    @override
    def run_network_once(self) -> None:
        rows = 2 if self.network.is_guided else 1
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with torch.no_grad():
            self.network(TokenSequences(one.expand(rows, 1), None, one, None))

    def _encode(self, batch: PromptBatch) -> PromptInputs:
        captions = [prompt.prompt for prompt in batch.prompts]
        return encode_prompts(self.processor, captions, self.ids)

    def _read_prompts(self, batch: PromptBatch) -> JanusPrompts:
        inputs = self._rows_of(self.encode(batch))
        return read_prompts(self.network, inputs, self.tokens_per_image(batch))

    def _choose_step(self, prompts: JanusPrompts) -> StepBuilder:
        return choose_step(self.network, prompts, self._sample_tokens)

    def encode_sources(self, batch: PromptBatch) -> PromptBatch:
        """See `AdaptedPolicy`; there are no source images."""
        return batch

    @override
    def tokens_per_image(self, batch: PromptBatch) -> int:
        return self._side**2

    def token_places(self, batch: PromptBatch) -> TokenPlaces:
        """See `AdaptedPolicy`; a place is a token."""
        grid = Grid(self._side, self._side)
        return token_places((grid,), grid)

    def tokenize_images(
        self,
        pixels: UInt8[Tensor, "N 3 H W"],
        *,
        num_sources: int = 0,
        preview: Preview = "zeros",
    ) -> Int64[Tensor, "N T"]:
        """See `AdaptedPolicy`; there is no preview.

        Raises:
            ValueError: The images do not have the size of the model's images.
        """
        side = image_side(self.model.config)
        if pixels.shape[-2:] != (side, side):
            raise ValueError(
                f"images of {tuple(pixels.shape[-2:])} pixels; the model has tokens for {side} x "
                f"{side} alone"
            )
        return image_tokens(self.model.model.vqmodel, pixels)

    def _rows_of(self, inputs: PromptInputs) -> PromptInputs:
        """Rows of the language model: with guidance, the prompts without text after the others."""
        return inputs.with_unconditional(self.ids) if self.network.is_guided else inputs

    def _sequences(
        self, batch: PromptBatch, rollout: Rollout, rows: Int64[Tensor, " N"]
    ) -> TokenSequences:
        inputs = self._rows_of(self.encode(batch).rows(rows // batch.group_size))
        token_ids = rollout.token_ids.flatten(0, 1)[rows]
        return TokenSequences(
            input_ids=inputs.input_ids.to(self.device),
            attention_mask=self._attention_mask(inputs.attention_mask, token_ids.shape[1]),
            token_ids=token_ids.to(self.device),
            sampling_mask=self._sampling_mask(rollout, rows),
        )
