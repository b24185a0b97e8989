"""Check the files of a model's folder before loading weights; nothing in them is executed."""

from __future__ import annotations

import json
import reprlib
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import AutoTokenizer, GlmImageProcessor, PreTrainedTokenizerBase

from glm_grpo.errors import GlmGrpoError, ModelError
from glm_grpo.models.base import ReservedTokens
from glm_grpo.models.glm_image.prompt_inputs import GLYPH_RULE, tokenize_prompts
from rewards.out_of_memory import is_out_of_memory

FETCH_AGAIN = "fetch the file again (`hf download`)"

_KINDS = {
    "vision_language_encoder": ("model_type", "glm_image"),
    "text_encoder": ("model_type", "t5"),
    "transformer": ("_class_name", "GlmImageTransformer2DModel"),
    "vae": ("_class_name", "AutoencoderKL"),
}
"""Key that identifies the part in its config.json, and the required value."""

_PARTS = (*_KINDS, "processor", "tokenizer", "scheduler")
_POINTER = b"version https://git-lfs"


@contextmanager
def damage_named(place: Path) -> Iterator[None]:
    """Turn any error from reading a model's file into one that names the file.

    Libraries raise all kinds of errors on files with unexpected contents. Out-of-memory errors pass
    through, because they are not the file's fault.

    Args:
        place: File that is read inside, or folder of a part.

    Raises:
        ModelError: The file cannot be read.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, GlmGrpoError) or is_out_of_memory(error):
            raise
        raise ModelError(f"{place}: cannot be used ({_cause(error)}); {FETCH_AGAIN}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        ModelError: The file is missing, or contains something else.
    """
    if not path.is_file():
        raise ModelError(f"{path}: no such file; {FETCH_AGAIN}")
    with damage_named(path):
        values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ModelError(f"{path}: not a JSON object; {FETCH_AGAIN}")
    return values


def read_config(folder: Path, part: str) -> dict[str, Any]:
    """Read a part's config.json and check that it describes the right model.

    Args:
        part: Key of `model_index.json` whose part has weights.

    Raises:
        ModelError: The file is missing or damaged, or describes another model.
    """
    path = folder / part / "config.json"
    values = read_object(path)
    key, kind = _KINDS[part]
    if values.get(key, kind) != kind:
        raise ModelError(
            f"{path}: {key} is {_short(values[key])}, but must be {kind!r} for the {part} of a "
            "GLM-Image pipeline; give the folder of one"
        )
    return values


def check_files(folder: Path) -> None:
    """Refuse incompletely downloaded files.

    For weights, reads the header, which contains the length of the file.

    Raises:
        ModelError: A file is incomplete; the message names it.
    """
    for part in _PARTS:
        for path in sorted((folder / part).glob("*")):
            if path.suffix not in (".json", ".jinja", ".safetensors"):
                continue
            with damage_named(path):
                with path.open("rb") as opened:
                    start = opened.read(len(_POINTER))
                if start == _POINTER:
                    raise ModelError(
                        f"{path}: a pointer of git-lfs, not the file itself; fetch the file with "
                        "`git lfs pull` or `hf download`"
                    )
                if path.suffix == ".safetensors":
                    with safe_open(path, framework="pt"):
                        pass


def check_tokenizers(folder: Path, *, vocabulary: int, glyphs: int) -> ReservedTokens:
    """Load both tokenizers and encode two prompts.

    Args:
        vocabulary: Entries of the language model's embedding.
        glyphs: Entries of the glyph encoder's embedding.

    Raises:
        ModelError: A tokenizer is missing or damaged, has ids outside its model's vocabulary, or
            its chat template drops the prompt.
    """
    place, glyph_place = folder / "processor", folder / "tokenizer"
    with damage_named(place):
        processor = GlmImageProcessor.from_pretrained(place, local_files_only=True)
        tokenizer = processor.tokenizer
        _check_ids(place, tokenizer, vocabulary)
        named = frozenset(str(token) for token in tokenizer.special_tokens_map.values())
    with damage_named(glyph_place):
        glyph_tokenizer = AutoTokenizer.from_pretrained(
            glyph_place, local_files_only=True, trust_remote_code=False
        )
        _check_ids(glyph_place, glyph_tokenizer, glyphs)
        glyph_names = [token.content for token in glyph_tokenizer.added_tokens_decoder.values()]
    _check_template(place, processor)
    added = tokenizer.added_tokens_decoder.values()
    return ReservedTokens(
        in_prompts=named | {token.content for token in added if token.special},
        in_texts=frozenset(glyph_names),
        text_rule=GLYPH_RULE,
    )


def _check_ids(place: Path, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
    token, largest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if largest >= size:
        raise ModelError(
            f"{place}: its tokenizer gives {_short(token)} the id {largest}, and the model's "
            f"embedding has {size} entries; fetch tokenizer and weights of one revision"
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


def _cause(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return textwrap.shorten(f"{type(error).__name__}: {lines[0] if lines else 'no reason'}", 300)


def _short(value: object) -> str:
    return reprlib.repr(value)
