"""Write a Janus-Pro of published sizes with random weights, as a folder that `model.path` takes.

python -m benchmarks.janus_folder CONFIG TEMPLATE FOLDER
    [--dtype bfloat16] [--side 24] [--spread 2]

CONFIG and TEMPLATE are `config.json` and `chat_template.jinja` of a published model, such as
deepseek-community/Janus-Pro-1B: 3.7 GB in bfloat16, on disk and in memory. Bytes are the words of
the tokenizer; its special tokens have the ids of the config. Nothing is downloaded. With --side,
images have that many tokens a row, of 16 pixels, for trials on a CPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    GenerationConfig,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusImageProcessor,
    JanusProcessor,
    PreTrainedTokenizerFast,
)

from benchmarks.full_size.models import made_on
from glm_grpo.models.janus_pro.loading import image_side

BEGIN, END, PAD = (
    f"<\uff5c{name}\uff5c>"
    for name in ("begin\u2581of\u2581sentence", "end\u2581of\u2581sentence", "\u2581pad\u2581")
)
IMAGE = {
    "image_token": "<image_placeholder>",
    "boi_token": "<begin_of_image>",
    "eoi_token": "<end_of_image>",
}
_GELU_VARIANCE = 0.4255
"""Mean square of GELU(x) where x is normal with variance 1."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("template", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--side", type=int, help="tokens per row of an image")
    parser.add_argument("--spread", type=float, default=2.0, help="standard deviation of logits")
    options = parser.parse_args(arguments)
    config = JanusConfig.from_dict(json.loads(options.config.read_text(encoding="utf-8")))
    if options.side is not None:
        config.vq_config.num_patches = options.side
        config.vision_config.num_image_tokens = options.side**2
        config.vision_config.image_size = image_side(config)
    processor = build_processor(config, options.template.read_text(encoding="utf-8"))
    model = build_model(config, getattr(torch, options.dtype), spread=options.spread)
    boi = processor.tokenizer.convert_tokens_to_ids(IMAGE["boi_token"])
    model.generation_config = GenerationConfig(
        temperature=1.0,
        guidance_scale=5.0,
        pad_token_id=config.text_config.pad_token_id,
        generation_kwargs={"boi_token_id": boi},
    )
    model.save_pretrained(options.folder)
    processor.save_pretrained(options.folder)
    print(f"{options.folder}: {model.num_parameters():,} parameters in {options.dtype}")


def build_processor(
    config: Any, template: str, merges: Sequence[tuple[str, str]] = ()
) -> JanusProcessor:
    """Bytes as tokens, special tokens at the config's ids, and images in -1..1.

    Where the tokens that begin and end an image are is not in the config: behind the placeholder.

    Args:
        merges: Pairs of tokens that are one, too, in the order in which they are joined.
    """
    text, image = config.text_config, config.image_token_id
    special = {
        text.bos_token_id: BEGIN,
        text.eos_token_id: END,
        text.pad_token_id: PAD,
        image: IMAGE["image_token"],
        image + 1: IMAGE["boi_token"],
        image + 2: IMAGE["eoi_token"],
    }
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # No merge makes the unused words. As published, there are fewer words than embeddings.
    words = alphabet + ["".join(pair) for pair in merges]
    words += [f"<unused {index}>" for index in range(len(words), max(special) + 1)]
    for index, word in special.items():
        words[index] = word
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[*merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special.values()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, text.bos_token_id)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=IMAGE,
        padding_side="left",
        model_max_length=text.max_position_embeddings,
    )
    side = image_side(config)
    images = JanusImageProcessor(
        image_mean=[0.5] * 3, image_std=[0.5] * 3, size={"height": side, "width": side}
    )
    return JanusProcessor(images, fast, chat_template=template)


@torch.no_grad()
def build_model(config: Any, dtype: torch.dtype, *, spread: float) -> JanusForConditionalGeneration:
    """A model whose distributions differ by prompt and place; the class begins with even ones.

    Args:
        spread: Standard deviation of the logits.
    """
    with made_on(torch.device("cpu"), dtype):
        model = JanusForConditionalGeneration(config).eval()
        inner, codebook = model.model, model.model.vqmodel.quantize.embedding.weight
        inner.language_model.embed_tokens.weight.normal_()
        inner.generation_embeddings.weight.normal_()
        codebook.normal_()
        aligner, head = inner.generation_aligner, inner.generation_head
        for linear in (aligner.fc1, *aligner.hidden_layers, head.proj_out):
            linear.weight.normal_(0, linear.in_features**-0.5)
        last = head.vision_head
        last.weight.normal_(0, spread * (_GELU_VARIANCE * last.in_features) ** -0.5)
    return model


if __name__ == "__main__":
    main()
