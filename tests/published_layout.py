"""A model folder with the files of the published GLM-Image, scaled down, and random weights.

The embedded model's folder has another layout: another class of tokenizer, a pad token of its own,
grid tokens among the extra ones, `size` instead of `min_pixels` and `max_pixels`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, GlmImagePipeline, GlmImageTransformer2DModel
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    T5Config,
    T5EncoderModel,
)

from glm_grpo.tiny.models import build_glyph_tokenizer

CODEBOOK = 512
"""Instead of 16384; the two tokens that start and end an image come behind it."""

_VISION_VOCABULARY = 640
"""Instead of 16512."""


def write_published_layout(published: Path, folder: Path) -> None:
    """Writes the model.

    Args:
        published: The published configuration files.
        folder: Is made.
    """
    config = _read(published / "vision_language_encoder" / "config.json")
    names = _write_processor(published / "processor", folder / "processor")
    ids = {
        "image_start_token_id": CODEBOOK,
        "image_end_token_id": CODEBOOK + 1,
        "image_token_id": names["<|image|>"],
    }
    config["text_config"] |= {
        "hidden_size": 1024,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "vocab_size": len(names),
        "vision_vocab_size": _VISION_VOCABULARY,
        "pad_token_id": names["<|endoftext|>"],
        "eos_token_id": CODEBOOK + 1,
    }
    # Heads of 32, half of which turns: 8 frequencies, dealt as the published 32 are (8, 12, 12).
    config["text_config"]["rope_parameters"]["mrope_section"] = [2, 3, 3]
    config["vision_config"] |= {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "image_size": 128,
    }
    config["vq_config"] |= {"embed_dim": 64, "latent_channels": 64, "num_embeddings": CODEBOOK}
    torch.manual_seed(0)
    language = GlmImageForConditionalGeneration(GlmImageConfig.from_dict(config | ids))
    language.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.9,
        top_p=0.75,
        eos_token_id=CODEBOOK + 1,
        pad_token_id=names["<|image|>"],
    )
    # Several files with an index, as published.
    language.save_pretrained(folder / "vision_language_encoder", max_shard_size="4MB")
    _rewrite(folder / "vision_language_encoder" / "config.json", config | ids)

    encoder = _read(published / "text_encoder" / "config.json")
    encoder |= {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 1}
    T5EncoderModel(T5Config.from_dict(encoder)).save_pretrained(folder / "text_encoder")

    transformer = _read(published / "transformer" / "config.json")
    transformer |= {
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 32,
        "text_embed_dim": 64,
        "time_embed_dim": 64,
        "condition_dim": 16,
        "prior_vq_quantizer_codebook_size": CODEBOOK,
    }
    GlmImageTransformer2DModel.from_config(transformer).save_pretrained(folder / "transformer")

    vae = _read(published / "vae" / "config.json")
    vae |= {"block_out_channels": [32, 32, 32, 64], "layers_per_block": 1, "sample_size": 128}
    AutoencoderKL.from_config(vae).save_pretrained(folder / "vae")

    build_glyph_tokenizer().save_pretrained(folder / "tokenizer")
    shutil.copytree(published / "scheduler", folder / "scheduler")
    _rewrite(
        folder / "model_index.json",
        {
            "_class_name": GlmImagePipeline.__name__,
            "processor": ["transformers", "GlmImageProcessor"],
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "text_encoder": ["transformers", "T5EncoderModel"],
            "tokenizer": ["transformers", "ByT5Tokenizer"],
            "transformer": ["diffusers", "GlmImageTransformer2DModel"],
            "vae": ["diffusers", "AutoencoderKL"],
            "vision_language_encoder": ["transformers", "GlmImageForConditionalGeneration"],
        },
    )


def _write_processor(published: Path, folder: Path) -> dict[str, int]:
    """Tokenizer, chat template and preprocessor; the vocabulary.

    Ids are dealt as published: tokens of images first, then text, here bytes, then special ones.
    """
    shutil.copytree(published, folder)
    config = _read(folder / "tokenizer_config.json")
    names = [f"<|dit_token_{index}|>" for index in range(CODEBOOK + 2)]
    names += [f"<|unused_{index}|>" for index in range(_VISION_VOCABULARY - len(names))]
    names += sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [entry["content"] for entry in config["added_tokens_decoder"].values()]
    ids = {name: index for index, name in enumerate([*names, *special])}
    config["added_tokens_decoder"] = {
        str(ids[entry["content"]]): entry for entry in config["added_tokens_decoder"].values()
    }
    for key, number in (("bos_token", 0), ("eos_token", 1), ("pad_token", 1)):
        config[key] = f"<|dit_token_{CODEBOOK + number}|>"
    _rewrite(folder / "tokenizer_config.json", config)
    tokenizer = Tokenizer(models.BPE(vocab={name: ids[name] for name in names}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    tokenizer.add_special_tokens(names[: CODEBOOK + 2])
    tokenizer.save(str(folder / "tokenizer.json"))
    preprocessor = _read(folder / "preprocessor_config.json")
    # Sources of 64 to 256 pixels a side, instead of 512 to 2048.
    preprocessor |= {"min_pixels": 64 * 64, "max_pixels": 256 * 256}
    _rewrite(folder / "preprocessor_config.json", preprocessor)
    _rewrite(folder / "chat_template.jinja", _scaled(folder / "chat_template.jinja"))
    return ids


def _scaled(template: Path) -> str:
    text = template.read_text(encoding="utf-8")
    return text.replace("dit_token_16384", f"dit_token_{CODEBOOK}").replace(
        "dit_token_16385", f"dit_token_{CODEBOOK + 1}"
    )


def _read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def _rewrite(path: Path, content: dict[str, Any] | str) -> None:
    text = content if isinstance(content, str) else json.dumps(content, indent=2)
    path.write_text(text, encoding="utf-8")
