"""Check the files of a model's folder before weights are loaded; nothing in them is executed."""

from __future__ import annotations

import json
import re
import reprlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoTokenizer, GlmImageProcessor, PreTrainedTokenizerBase

from glm_grpo.errors import GlmGrpoError, ModelError
from glm_grpo.models.base import ReservedTokens
from glm_grpo.models.glm_image.prompt_inputs import find_glyph_texts, tokenize_prompts
from rewards.out_of_memory import is_out_of_memory

FETCH_AGAIN = "fetch the file again (`hf download`)"

_LARGEST_JSON = 2**27
"""Bytes; tokenizers of 200,000 tokens take 20 MB."""

_LARGEST_SIZE = 2**20
"""Of a width, a vocabulary or a number of heads; the published vocabulary has 168,064 entries."""

_MOST_LAYERS = 1000
"""Each is built to be checked."""

_MOST_BLOCKS = 64
"""Entries of a list of sizes."""

_LAYERS = frozenset(
    ("num_layers", "num_hidden_layers", "num_decoder_layers", "depth", "layers_per_block")
)
_SIZES = frozenset(
    (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim"),
        *("num_key_value_heads", "vision_vocab_size", "num_heads", "patch_size", "embed_dim"),
        *("spatial_merge_size", "num_embeddings", "latent_channels", "in_channels"),
        *("out_channels", "d_model", "d_kv", "d_ff", "attention_head_dim", "text_embed_dim"),
        *("time_embed_dim", "condition_dim", "prior_vq_quantizer_codebook_size", "image_size"),
        *("block_out_channels", "norm_num_groups", "sample_size", "num_train_timesteps"),
        "relative_attention_num_buckets",
    )
)
_SECTIONS = ("text_config", "vision_config", "vq_config")

_KINDS = {
    "vision_language_encoder": ("model_type", "glm_image"),
    "text_encoder": ("model_type", "t5"),
    "transformer": ("_class_name", "GlmImageTransformer2DModel"),
    "vae": ("_class_name", "AutoencoderKL"),
}
"""Where each part's config.json says what it is, and what it must be."""

_PARTS = (*_KINDS, "processor", "tokenizer", "scheduler")
_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
_POINTER = b"version https://git-lfs"
_SHOWN = 3
"""Names in an error, of thousands."""

_SECONDS, _BYTES, _CHARACTERS = 3, 2**31, 2**20
"""What rendering the chat template on a short prompt may take and make: a thousand times as much as
that of any model."""

_RENDER = f"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({_SECONDS}, {_SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({_BYTES}, {_BYTES}))
from jinja2.sandbox import ImmutableSandboxedEnvironment
template, values = json.load(sys.stdin)
environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
)
environment.globals.update(raise_exception=str, strftime_now=str)
try:
    made = environment.from_string(template).render(values)
except (MemoryError, OverflowError):
    sys.exit({_SECONDS})
except Exception:
    sys.exit(0)
sys.exit(0 if len(made) <= {_CHARACTERS} else {_SECONDS})
"""
"""Errors are left to the processor, whose environment knows more than this one."""


@contextmanager
def damage_named(place: Path) -> Iterator[None]:
    """Turns whatever a reader of a model's file raises inside into an error that names the file.

    Libraries raise errors of every class on files that are not what they take them for. Memory that
    runs out is no fault of the file.

    Args:
        place: File, or folder of a part, that is read inside.

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
    """The object in a JSON file.

    Raises:
        ModelError: There is no such file, or it holds something else.
    """
    if not path.is_file():
        raise ModelError(f"{path}: no such file; {FETCH_AGAIN}")
    with damage_named(path):
        if path.stat().st_size > _LARGEST_JSON:
            raise ValueError(f"larger than {_LARGEST_JSON} bytes")
        values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ModelError(f"{path}: not a JSON object; {FETCH_AGAIN}")
    return values


def read_config(folder: Path, part: str) -> dict[str, Any]:
    """A part's config.json, whose kind and sizes a model can be built from.

    Args:
        part: A key of `model_index.json` with weights.

    Raises:
        ModelError: The file is missing or damaged, of another model, or names a size that no model
            has.
    """
    path = folder / part / "config.json"
    values = read_object(path)
    key, kind = _KINDS[part]
    if values.get(key, kind) != kind:
        raise ModelError(
            f"{path}: {key} is {_short(values[key])}, and must be {kind!r}: the {part} of a "
            "GLM-Image pipeline; give the folder of one"
        )
    _check_sizes(values, path)
    for section in _SECTIONS:
        if not isinstance(values.get(section, {}), dict):
            raise ModelError(f"{path}: {section} is not an object; {FETCH_AGAIN}")
        _check_sizes(values.get(section, {}), path)
    return values


def check_files(folder: Path) -> None:
    """Refuses files that were not fetched, and JSON files that cannot be read.

    Raises:
        ModelError: Names the file.
    """
    for part in _PARTS:
        for path in sorted((folder / part).glob("*")):
            if path.suffix not in (".json", ".jinja", ".safetensors") or not path.is_file():
                continue
            with damage_named(path), path.open("rb") as opened:
                start = opened.read(len(_POINTER))
            if start == _POINTER:
                raise ModelError(
                    f"{path}: a pointer of git-lfs, not the file itself; fetch the file with "
                    "`git lfs pull` or `hf download`"
                )
            if not start:
                raise ModelError(f"{path}: empty; {FETCH_AGAIN}")
            if path.suffix == ".json":
                read_object(path)
    _check_sizes(read_object(folder / "scheduler" / "scheduler_config.json"), folder / "scheduler")


def check_weights(folder: Path, part: str, model: nn.Module) -> None:
    """Compares names and shapes in the headers of a part's files with those of its model.

    Args:
        part: A key of `model_index.json` with weights.
        model: Of its config, without values.

    Raises:
        ModelError: A file is missing or damaged, a parameter is in none of them, of another shape,
            or not made of floating point numbers.
    """
    found = _read_headers(folder / part, is_index_first=_KINDS[part][0] == "_class_name")
    names: dict[int, list[str]] = {}
    shapes: dict[int, list[int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # Parameters that are tied have one value and several names, of which a file needs one.
        names.setdefault(id(parameter), []).append(name)
        shapes[id(parameter)] = list(parameter.shape)
    missing, wrong = [], []
    for key, aliases in names.items():
        stored = [found[name] for name in aliases if name in found]
        if not stored:
            missing.append(aliases[0])
        for shape, dtype in stored:
            if shape != shapes[key] or dtype not in _FLOATS:
                wrong.append(f"{aliases[0]} ({dtype} {shape}, not a float {shapes[key]})")
    refuse_missing(folder / part, missing, wrong)


def refuse_missing(place: Path, missing: list[str], wrong: list[str]) -> None:
    """Refuses a part whose parameters do not all come from its files.

    Args:
        place: Folder of the part.
        missing: Names of parameters that no file holds.
        wrong: Those of another shape or type, as they are to be shown.

    Raises:
        ModelError: There are such parameters.
    """
    for names, fault in ((missing, "lack"), (wrong, "do not fit its config.json in")):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise ModelError(
                f"{place}: its weights {fault} {', '.join(sorted(names)[:_SHOWN])}{more}; without "
                "them the model would be partly random: fetch all its files of one revision again "
                "(`hf download`)"
            )


def check_tokenizers(folder: Path, *, vocabulary: int, glyphs: int) -> ReservedTokens:
    """Loads both tokenizers and encodes two prompts.

    A chat template is rendered in a process of its own before, with limits of time and memory. Not
    covered: one that loops on some prompts alone, and a tokenizer whose regular expressions do.

    Args:
        vocabulary: Entries of the language model's embedding.
        glyphs: Of the glyph encoder's.

    Raises:
        ModelError: A tokenizer is missing or damaged, has ids beyond its model's vocabulary, or its
            chat template cannot be rendered, or drops the prompt.
    """
    place, glyph_place = folder / "processor", folder / "tokenizer"
    for path in (place / "tokenizer.json", glyph_place / "tokenizer_config.json"):
        read_object(path)
    with damage_named(place / "tokenizer.json"):
        Tokenizer.from_file(str(place / "tokenizer.json"))
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
        language=named | {token.content for token in added if token.special},
        glyphs=frozenset(glyph_names),
        find_glyph_texts=find_glyph_texts,
    )


def _check_sizes(values: Mapping[str, Any], path: Path) -> None:
    for key, value in values.items():
        most = _MOST_LAYERS if key in _LAYERS else _LARGEST_SIZE if key in _SIZES else None
        if key.endswith("_block_types"):
            sizes, most = [len(value) if isinstance(value, list) else None], _MOST_BLOCKS
        elif most is None or value is None:
            continue
        else:
            sizes = value if isinstance(value, list) else [value]
        if len(sizes) > _MOST_BLOCKS or not all(
            type(size) is int and 1 <= size <= most for size in sizes
        ):
            raise ModelError(
                f"{path}: {key} is {_short(value)}; it must be a whole number from 1 to {most}, or "
                f"at most {_MOST_BLOCKS} of them in a list; {FETCH_AGAIN}"
            )


def _read_headers(place: Path, *, is_index_first: bool) -> dict[str, tuple[list[int], str]]:
    """Shapes and types by name, from the headers alone."""
    found: dict[str, tuple[list[int], str]] = {}
    for path in _weight_files(place, is_index_first=is_index_first):
        with damage_named(path), safe_open(path, framework="pt") as opened:
            # No mapping, and it cannot be iterated.
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_slice(name)
                found[name] = (list(tensor.get_shape()), tensor.get_dtype())
    return found


def _weight_files(place: Path, *, is_index_first: bool) -> list[Path]:
    """The files that the library would load: diffusers looks for an index first."""
    stem = "diffusion_pytorch_model" if is_index_first else "model"
    whole, index = place / f"{stem}.safetensors", place / f"{stem}.safetensors.index.json"
    if whole.is_file() and not (is_index_first and index.is_file()):
        return [whole]
    if not index.is_file():
        raise ModelError(
            f"{whole}: no such file; fetch the weights in this form: those of others, such as "
            ".bin and .pt, may be programs, and are not loaded"
        )
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ModelError(f"{index}: weight_map is no object of file names; {FETCH_AGAIN}")
    for name in sorted(set(files.values())):
        if Path(name).name != name or not (place / name).is_file():
            raise ModelError(
                f"{index}: names the file {_short(name)}, which is not in this folder; fetch all "
                "files of the model again (`hf download`)"
            )
    return [place / name for name in sorted(set(files.values()))]


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
        raise ModelError(f"{place}: holds no chat template (chat_template.jinja); {FETCH_AGAIN}")
    messages = [{"role": "user", "content": [{"type": "text", "text": "a red cat"}]}]
    values = {"messages": messages, **processor.tokenizer.special_tokens_map}
    # Marks of transformers' own, around what an assistant said.
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    done = subprocess.run(
        [sys.executable, "-P", "-c", _RENDER],
        input=json.dumps([plain, values], default=str).encode(),
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode != 0:
        raise ModelError(
            f"{place}: its chat template takes more than {_SECONDS} s, {_BYTES >> 30} GiB or "
            f"{_CHARACTERS} characters for one short prompt; {FETCH_AGAIN}"
        )
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
