"""Encode prompts and images for the language model: token ids, mask and 3-D positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import GlmImagePipeline
from jaxtyping import Float, Int64, UInt8
from PIL import Image
from torch import Tensor
from transformers import GlmImageForConditionalGeneration, GlmImageProcessor

from glm_grpo.errors import ModelError
from glm_grpo.models.base import TextRule, overflow_remedy

_COUNTED = 32
"""Number of captions that are tokenized to find the longest."""

_ANY_SIZE = {"shortest_edge": 1, "longest_edge": 2**40}
"""Range of areas, in pixels, within which a processor does not resize images."""


@dataclass(frozen=True)
class PromptInputs:
    """A batch of encoded prompts, padded on the left to the longest, with L tokens.

    Attributes:
        input_ids: Token ids; the last one is the image-start token.
        attention_mask: 1 on tokens, 0 on padding.
        position_ids: Temporal, height and width position; arbitrary on padding.
        next_position: Position of the first generated token, one per prompt.
    """

    input_ids: Int64[Tensor, "P L"]
    attention_mask: Int64[Tensor, "P L"]
    position_ids: Int64[Tensor, "3 P L"]
    next_position: Int64[Tensor, " P"]

    def rows(self, index: Int64[Tensor, " N"]) -> PromptInputs:
        """Select the prompts of some rows, repeats allowed, without the padding that all share."""
        mask = self.attention_mask[index]
        first = int((mask.sum(0) > 0).to(mask.dtype).argmax())
        return PromptInputs(
            input_ids=self.input_ids[index, first:],
            attention_mask=mask[:, first:],
            position_ids=self.position_ids[:, index, first:],
            next_position=self.next_position[index],
        )


def encode_prompts(
    model: GlmImageForConditionalGeneration,
    processor: GlmImageProcessor,
    prompts: Sequence[str],
    *,
    height: int,
    width: int,
    source_token_ids: Int64[Tensor, "P N S"] | None = None,
) -> PromptInputs:
    """Encode captions with the published chat template and grid sizes, on the CPU.

    Source images come before the caption, each as tokens between an image-start and an image-end
    token.

    Positions come from the model's own `get_rope_index`. The state that this call stores on the
    module is removed, because it would be stale at the next call.

    Args:
        model: Only its position arithmetic is used.
        processor: The published processor.
        prompts: P captions.
        source_token_ids: Tokens of N source images per prompt, from `image_tokens`.
    """
    num_sources = 0 if source_token_ids is None else source_token_ids.shape[1]
    inputs = tokenize_prompts(
        processor, prompts, height=height, width=width, num_sources=num_sources
    )
    input_ids = inputs["input_ids"]
    if source_token_ids is not None:
        is_source = input_ids == processor.image_token_id
        if int(is_source.sum()) != source_token_ids.numel():
            raise ModelError(
                f"the processor makes {int(is_source.sum())} tokens from {num_sources} source "
                f"images of {width} x {height} for {len(prompts)} prompts, but there are "
                f"{source_token_ids.numel()}; use sides within the bounds of the model's processor"
            )
        input_ids = input_ids.masked_scatter(is_source, source_token_ids)
    inner = model.model
    position_ids, _ = inner.get_rope_index(
        inputs["input_ids"],
        image_grid_thw=inputs["image_grid_thw"],
        images_per_sample=inputs["images_per_sample"],
        attention_mask=inputs["attention_mask"],
    )
    inner.rope_deltas = None
    inner._prefill_len = None
    inner._cached_decode_position_ids = None
    return PromptInputs(
        input_ids=input_ids,
        attention_mask=inputs["attention_mask"],
        position_ids=position_ids,
        next_position=position_ids[0, :, -1] + 1,
    )


def longest_prompt_tokens(path: str, captions: Sequence[str], *, height: int, width: int) -> int:
    """Count the tokens of the longest prompt, including the chat template.

    Only the captions with the most bytes are tokenized; the longest in tokens is one of them, or
    close.

    Args:
        path: Folder of the model; only its processor is loaded.
        captions: At least one.

    Raises:
        OSError, ValueError: The folder has no processor that can be loaded.
    """
    processor = GlmImageProcessor.from_pretrained(path, subfolder="processor")
    longest = sorted(captions, key=lambda caption: len(caption.encode()))[-_COUNTED:]
    inputs = tokenize_prompts(processor, longest, height=height, width=width)
    return int(inputs["input_ids"].shape[1])


def source_tokens(path: str, *, height: int, width: int) -> int:
    """Count the tokens that the processor makes from a source image of this size.

    Args:
        path: Folder of the model; only its processor is loaded.

    Raises:
        ValueError: The processor does not support this size.
    """
    processor = GlmImageProcessor.from_pretrained(path, subfolder="processor")
    inputs = tokenize_prompts(processor, ["-"], height=height, width=width, num_sources=1)
    return int((inputs["input_ids"] == processor.image_token_id).sum())


def tokenize_prompts(
    processor: GlmImageProcessor,
    prompts: Sequence[str],
    *,
    height: int,
    width: int,
    num_sources: int = 0,
) -> Any:
    """Tokenize captions with the published chat template: token ids, mask and grids.

    Arguments as in `encode_prompts`. Tokens of source images are placeholders.
    """
    # Its size determines the number of placeholders.
    blank = {"type": "image", "image": Image.new("RGB", (width, height))}
    messages = [
        [{"role": "user", "content": [*[blank] * num_sources, {"type": "text", "text": prompt}]}]
        for prompt in prompts
    ]
    return processor.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        processor_kwargs={
            "target_h": height,
            "target_w": width,
            "padding": True,
            "return_tensors": "pt",
        },
    )


@torch.no_grad()
def image_tokens(
    model: GlmImageForConditionalGeneration,
    processor: GlmImageProcessor,
    pixels: UInt8[Tensor, "B 3 H W"],
    *,
    is_any_size: bool = False,
) -> Int64[Tensor, "B S"]:
    """Encode images as the tokens that the decoder reads.

    Runs on the vision tower's device, image by image, to limit the memory to that of one.

    Args:
        pixels: Pixels of the images; sides are multiples of 32.
        is_any_size: Whether to keep their size; else the processor resizes images to the sizes it
            supports, as it does with the source images of an edit.
    """
    tower = model.model.visual
    size = {"size": _ANY_SIZE} if is_any_size else {}
    ids = []
    for image in pixels:
        inputs = processor.image_processor(images=[image], return_tensors="pt", **size)
        patches = inputs["pixel_values"].to(tower.device, tower.dtype)
        grid = inputs["image_grid_thw"].to(tower.device)
        ids.append(tokens_of_patches(model, patches, grid).cpu())
    return torch.stack(ids)


def tokens_of_patches(
    model: GlmImageForConditionalGeneration, patches: Tensor, grid: Int64[Tensor, "1 3"]
) -> Int64[Tensor, " S"]:
    """Tokens of one image, from the output of the model's processor."""
    (features,) = model.get_image_features(patches, image_grid_thw=grid).pooler_output
    if not features.isfinite().all():
        remedy = overflow_remedy(features.dtype) or "fetch the model again (`hf download`)"
        raise ModelError(f"the vision tower makes no finite features of an image: {remedy}")
    # Not `get_image_tokens`, which expects the `get_image_features` of the same version.
    _, rows, columns = grid[0].tolist()
    ids: Tensor = model.model.vqmodel.encode(_as_grid(features, rows, columns)[None]).image_tokens
    return ids.flatten()


def _as_grid(features: Float[Tensor, "..."], rows: int, columns: int) -> Float[Tensor, "C h w"]:
    """An image's features: rows of patches in transformers 5.17, a grid from 5.18 on."""
    return features.T.reshape(-1, rows, columns) if features.ndim == 2 else features


def find_glyph_texts(prompt: str) -> Sequence[str]:
    """Find the parts of a prompt that the stock pipeline's glyph encoder reads."""
    texts: Sequence[str]
    (texts,) = GlmImagePipeline.get_glyph_texts(None, prompt)
    return texts


GLYPH_RULE = TextRule(
    find_glyph_texts,
    "it knows straight and curly quotation marks and \u300c\u300d, and takes every ' and \" for "
    "one: write apostrophes as \u2019, and inches as \u2033",
)
"""The glyph encoder reads what the published pipeline takes for quoted."""
