"""The stock VQ decoder: tokens to images, in one pass, without noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor, nn

from glm_grpo.errors import DecoderError
from glm_grpo.models.base import Decoder, overflow_remedy
from glm_grpo.types import ImageBatch, PromptBatch


class JanusProDecoder:
    """The VQ decoder as a `Decoder`, which documents the methods; it has no steps.

    Args:
        vqmodel: Stock `JanusVQVAE`.
        batch_size: Images of a group to decode at once; None: the whole group.
    """

    steps = None

    def __init__(self, vqmodel: Any, *, batch_size: int | None = None) -> None:
        self._vqmodel = vqmodel
        self._batch_size = batch_size

    def with_steps(self, steps: int) -> Decoder:
        """See `Decoder`.

        Raises:
            ValueError: Always.
        """
        raise ValueError("the decoder of Janus-Pro has no denoising steps")

    def decode(self, batch: PromptBatch, token_ids: Int64[Tensor, "P G T"]) -> ImageBatch:
        """See `Decoder`; the seeds are kept, but there is no noise."""
        pixels = torch.stack([*self.decode_groups(batch, token_ids)])
        return ImageBatch(pixels=pixels, decode_seeds=batch.decode_seeds)

    def decode_groups(
        self, batch: PromptBatch, token_ids: Int64[Tensor, "P G T"]
    ) -> Iterator[UInt8[Tensor, "G 3 H W"]]:
        """See `Decoder`."""
        weight = self._vqmodel.post_quant_conv.weight
        for prompt, group in zip(batch.prompts, token_ids, strict=True):
            decoded: list[Tensor] = []
            for part in group.split(self._batch_size or len(group)):
                with torch.inference_mode():
                    values = self._vqmodel.decode(part.to(weight.device)).float()
                    is_finite = values.isfinite().flatten(1).all(dim=1)
                    # Not rounded: the stock processor cuts off what is between two levels.
                    pixels = (values * 0.5 + 0.5).clamp(0.0, 1.0).mul(255.0).to(torch.uint8)
                if not is_finite.all():
                    sample = sum(map(len, decoded)) + int((~is_finite).nonzero()[0])
                    remedy = overflow_remedy(weight.dtype) or (
                        "the decoder's weights are damaged; load the model again"
                    )
                    raise DecoderError(
                        f"the image of prompt {prompt.prompt_id}, sample {sample} has pixels "
                        f"that are not finite: {remedy}"
                    )
                decoded.append(pixels.cpu())
            yield torch.cat(decoded)

    def modules(self) -> tuple[nn.Module, ...]:
        """Decoder and codebook."""
        vqmodel = self._vqmodel
        return (vqmodel.quantize, vqmodel.post_quant_conv, vqmodel.decoder)
