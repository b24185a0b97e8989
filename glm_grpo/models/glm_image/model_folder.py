"""Check the files of a model's folder before loading weights; nothing in them is executed."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GlmImageProcessor

from glm_grpo.errors import ModelError
from glm_grpo.models.base import ReservedTokens
from glm_grpo.models.glm_image.prompt_inputs import GLYPH_RULE, tokenize_prompts
from glm_grpo.models.model_files import (
    FETCH_AGAIN,
    check_files,
    check_ids,
    damage_named,
    read_object,
)

_KINDS = {
    "vision_language_encoder": ("model_type", "glm_image"),
    "text_encoder": ("model_type", "t5"),
    "transformer": ("_class_name", "GlmImageTransformer2DModel"),
    "vae": ("_class_name", "AutoencoderKL"),
}
"""Key that identifies the part in its config.json, and the required value."""

_PARTS = (*_KINDS, "processor", "tokenizer", "scheduler")


def read_config(folder: Path, part: str) -> dict[str, Any]:
    """Read a part's config.json and check that it describes the right model.

    Args:
        part: Key of `model_index.json` whose part has weights.
    """
    path = folder / part / "config.json"
    values = read_object(path)
    key, kind = _KINDS[part]
    if values.get(key, kind) != kind:
        raise ModelError(
            f"{path}: {key} is {reprlib.repr(values[key])}, but must be {kind!r} for the {part} of "
            "a GLM-Image pipeline; give the folder of one"
        )
    return values


def check_parts(folder: Path) -> None:
    """Refuse incompletely downloaded files of the parts."""
    for part in _PARTS:
        check_files(folder / part)


def check_tokenizers(folder: Path, *, vocabulary: int, glyphs: int) -> ReservedTokens:
    """Load both tokenizers and encode two prompts.

    Args:
        vocabulary: Entries of the language model's embedding.
        glyphs: Entries of the glyph encoder's embedding.
    """
    place, glyph_place = folder / "processor", folder / "tokenizer"
    with damage_named(place):
        processor = GlmImageProcessor.from_pretrained(place, local_files_only=True)
        tokenizer = processor.tokenizer
        check_ids(place, tokenizer, vocabulary)
        named = frozenset(str(token) for token in tokenizer.special_tokens_map.values())
    with damage_named(glyph_place):
        glyph_tokenizer = AutoTokenizer.from_pretrained(
            glyph_place, local_files_only=True, trust_remote_code=False
        )
        check_ids(glyph_place, glyph_tokenizer, glyphs)
        glyph_names = [token.content for token in glyph_tokenizer.added_tokens_decoder.values()]
    _check_template(place, processor)
    added = tokenizer.added_tokens_decoder.values()
    return ReservedTokens(
        in_prompts=named | {token.content for token in added if token.special},
        in_texts=frozenset(glyph_names),
        text_rule=GLYPH_RULE,
    )


def _check_template(place: Path, processor: GlmImageProcessor) -> None:
    template = processor.chat_template
    if not isinstance(template, str) or not template:
        raise ModelError(f"{place}: contains no chat template (chat_template.jinja); {FETCH_AGAIN}")
    with damage_named(place):
        prompts = ("a red cat", "two boats")
        ids = tokenize_prompts(processor, prompts, height=512, width=512)["input_ids"]
        if ids[0].equal(ids[1]):
            raise ValueError("the chat template drops the prompt")
