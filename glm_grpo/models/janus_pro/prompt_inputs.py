"""Encode prompts and images of Janus-Pro as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor
from torch.nn.functional import normalize
from transformers import JanusForConditionalGeneration, JanusProcessor

from glm_grpo.errors import ModelError
from glm_grpo.models.base import overflow_remedy

_COUNTED = 32
"""Number of captions that are tokenized to find the longest."""

_ENCODED_AT_ONCE = 4
"""Images per pass of the VQ encoder."""


@dataclass(frozen=True)
class SpecialIds:
    """Ids of tokens that are the same in every prompt.

    Attributes:
        begin: Begin of the sequence.
        pad: Padding, and in place of the text in prompts without condition.
        image: Begin of the image.
    """

    begin: int
    pad: int
    image: int


@dataclass(frozen=True)
class PromptInputs:
    """A batch of encoded prompts, padded on the left to the longest, with L tokens.

    Attributes:
        input_ids: Token ids; the last one begins the image.
        attention_mask: 1 on tokens, 0 on padding.
    """

    input_ids: Int64[Tensor, "P L"]
    attention_mask: Int64[Tensor, "P L"]

    def rows(self, index: Int64[Tensor, " N"]) -> PromptInputs:
        """Select the prompts of some rows, repeats allowed, without the padding that all share."""
        mask = self.attention_mask[index]
        first = int((mask.sum(0) > 0).to(mask.dtype).argmax())
        return PromptInputs(self.input_ids[index, first:], mask[:, first:])

    def with_unconditional(self, ids: SpecialIds) -> PromptInputs:
        """These prompts, and after them as many whose text is replaced by padding.

        The replaced tokens are read like any others; the padding on the left is not. Source:
        `JanusForConditionalGeneration.generate`.
        """
        is_kept = (self.input_ids == ids.begin) | (self.input_ids == ids.image)
        empty = self.input_ids.masked_fill(~is_kept, ids.pad)
        return PromptInputs(
            torch.cat([self.input_ids, empty]), torch.cat([self.attention_mask] * 2)
        )


def special_ids(model: JanusForConditionalGeneration, processor: JanusProcessor) -> SpecialIds:
    """The ids that stock generation uses: those of its config, or else of the tokenizer."""
    config, tokenizer = model.generation_config, processor.tokenizer
    images = getattr(config, "generation_kwargs", None) or {}
    image = images.get("boi_token_id")
    ids = {
        "begin": tokenizer.bos_token_id if config.bos_token_id is None else config.bos_token_id,
        "pad": tokenizer.pad_token_id if config.pad_token_id is None else config.pad_token_id,
        "image": tokenizer.convert_tokens_to_ids(processor.image_start_token)
        if image is None
        else image,
    }
    missing = [name for name, token in ids.items() if token is None]
    if missing:
        raise ModelError(
            f"the tokenizer and the generation config have no id for the tokens {missing}; fetch "
            "all files of the model again (`hf download`)"
        )
    return SpecialIds(**ids)


def encode_prompts(
    processor: JanusProcessor, prompts: Sequence[str], ids: SpecialIds
) -> PromptInputs:
    """Encode captions with the published chat template.

    Args:
        ids: The first and last token of every prompt.
    """
    inputs = tokenize_prompts(processor, prompts)
    input_ids, mask = inputs["input_ids"], inputs["attention_mask"]
    first = input_ids.gather(1, mask.argmax(dim=1, keepdim=True)).squeeze(1)
    if (first != ids.begin).any() or (input_ids[:, -1] != ids.image).any():
        raise ModelError(
            f"the tokenizer makes prompts that begin with {sorted({*first.tolist()})} and end with "
            f"{sorted({*input_ids[:, -1].tolist()})} instead of {ids.begin} and {ids.image}; fetch "
            "the tokenizer and the chat template of one revision again (`hf download`)"
        )
    return PromptInputs(input_ids, mask)


def tokenize_prompts(processor: JanusProcessor, prompts: Sequence[str]) -> Any:
    """Tokenize captions as the stock processor does for images: ids and mask."""
    texts = [
        processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "text", "text": prompt}]}],
            add_generation_prompt=True,
        )
        for prompt in prompts
    ]
    # A template may already begin with the token that the tokenizer would add.
    begin = processor.tokenizer.bos_token
    is_begun = bool(begin) and texts[0].startswith(begin)
    return processor(
        text=texts,
        generation_mode="image",
        padding=True,
        padding_side="left",
        return_tensors="pt",
        add_special_tokens=not is_begun,
    )


def longest_prompt_tokens(processor: JanusProcessor, captions: Sequence[str]) -> int:
    """Count the tokens of the longest prompt, including the chat template.

    Only the captions with the most bytes are tokenized; the longest in tokens is one of them, or
    close.

    Args:
        captions: At least one.
    """
    longest = sorted(captions, key=lambda caption: len(caption.encode()))[-_COUNTED:]
    return int(tokenize_prompts(processor, longest)["input_ids"].shape[1])


@torch.no_grad()
def image_tokens(vqmodel: Any, pixels: UInt8[Tensor, "B 3 H W"]) -> Int64[Tensor, "B T"]:
    """Encode images as the tokens from which the decoder draws them.

    Each latent becomes the code with the nearest direction, because the decoder normalises codes.
    Stock `encode` compares lengths too, and finds other tokens unless all codes have one length.
    Source: `VectorQuantizer.forward` of deepseek-ai/Janus, `codebook_l2_norm`.

    Args:
        vqmodel: Stock `JanusVQVAE`; its encoder may be on another device than its codebook.
    """
    weight = vqmodel.quant_conv.weight
    codes = normalize(vqmodel.quantize.embedding.weight.to(weight.device).float(), dim=-1)
    ids = []
    for part in pixels.split(_ENCODED_AT_ONCE):
        scaled = (part.to(weight.device).float() / 127.5 - 1.0).to(weight.dtype)
        latents = vqmodel.quant_conv(vqmodel.encoder(scaled)).float()
        if not latents.isfinite().all():
            remedy = overflow_remedy(weight.dtype) or "fetch the model again (`hf download`)"
            raise ModelError(f"the encoder makes no finite latents of an image: {remedy}")
        directions = normalize(latents.flatten(2).transpose(1, 2), dim=-1)
        ids.append((directions @ codes.T).argmax(dim=-1).cpu())
    return torch.cat(ids)
