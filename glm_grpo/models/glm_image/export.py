"""Export trained weights in formats that other programs load, with a page for the hub."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from diffusers import GlmImagePipeline
from huggingface_hub import ModelCardData
from peft import PeftModel
from transformers import PreTrainedModel

from glm_grpo.models.base import DTYPES
from glm_grpo.models.export_page import Card, StockSettings, describe_sampling, write_card
from glm_grpo.models.glm_image.loading import decoder_dtype
from glm_grpo.models.glm_image.policy import GlmImagePolicy


def export_adapter(adapted: PeftModel, settings: StockSettings, directory: Path) -> None:
    """Write a folder that the language model's `load_adapter` loads.

    Args:
        adapted: The peft model around the language model.
        directory: Output folder, new or empty.
    """
    for config in adapted.peft_config.values():
        config.base_model_name_or_path = settings.base_name
    adapted.save_pretrained(directory, save_embedding_layers=False)
    # peft stores none.
    _sample_as_trained(adapted.get_base_model(), settings)
    adapted.get_base_model().generation_config.save_pretrained(directory)
    # peft writes its own README, a template in which every line is to be filled in.
    write_card(directory, _card(settings, is_adapter=True), settings)


def export_pipeline(
    policy: GlmImagePolicy, pipeline: GlmImagePipeline, settings: StockSettings, directory: Path
) -> None:
    """Write a folder that stock `GlmImagePipeline.from_pretrained` loads, with adapters merged.

    The policy cannot be trained after this.

    Args:
        policy: Policy built on the parts of `pipeline`.
        pipeline: Pipeline that provides all other parts.
        directory: Output folder, new or empty.
    """
    model = policy.model
    if policy.adapted_model is not None:
        model = policy.adapted_model.merge_and_unload()
    _sample_as_trained(model, settings)
    pipeline.register_modules(vision_language_encoder=model)
    pipeline.save_pretrained(directory)
    _remove_local_paths(directory)
    write_card(directory, _card(settings, is_adapter=False), settings)


def _remove_local_paths(directory: Path) -> None:
    """Remove from the configs of a pipeline where diffusers loaded its parts from."""
    for path in (directory / "model_index.json", *directory.glob("*/config.json")):
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("_name_or_path", None) is not None:
            path.write_text(f"{json.dumps(values, indent=2, sort_keys=True)}\n", encoding="utf-8")


def _sample_as_trained(model: PreTrainedModel, settings: StockSettings) -> None:
    """Give a model's `generate` the sampling of the run, whatever its base had."""
    config = model.generation_config
    config.do_sample = True
    rollout = settings.rollout
    config.temperature = rollout.temperature
    config.top_k = rollout.top_k or 0
    config.top_p = rollout.top_p or 1.0
    config.min_p = rollout.min_p
    # The run draws only from the codebook, the first rows of the head.
    codebook = model.config.vq_config.num_embeddings
    config.suppress_tokens = [*range(codebook, model.lm_head.out_features)] or None


def _card(settings: StockSettings, *, is_adapter: bool) -> Card:
    rollout = settings.rollout
    notes = [
        "Height and width must be given, as multiples of 32: stock code has no default for them. "
        f"The run was trained at {rollout.height} x {rollout.width}.",
        "`generation_config.json` sets how tokens are sampled: as the run did "
        f"({describe_sampling(rollout)}, only image tokens), whatever the base model has. Without "
        "it, stock code can draw the end of an image too early, and then fails.",
    ]
    if is_adapter:
        notes.append("`pipeline.vision_language_encoder.disable_adapters()` draws with the base.")
    if settings.num_sources:
        notes.append(
            "The edit call of the pipeline fails with transformers 5.18 and later, so in "
            "`generate.py` the language model generates the tokens, and the pipeline only decodes "
            "them."
        )
    base, dtype = "options.base" if is_adapter else "here", _dtype(settings)
    load = [
        f"pipeline = GlmImagePipeline.from_pretrained({base}, {dtype}).to(device)",
        "model = pipeline.vision_language_encoder",
    ]
    from_transformers = "GenerationConfig" if is_adapter else "GlmImageForConditionalGeneration"
    if is_adapter:
        load += [
            "model.load_adapter(str(here))",
            "model.generation_config = GenerationConfig.from_pretrained(here)",
        ]
        to_base = "model.disable_adapters()"
    else:
        to_base = f"""\
base = GlmImageForConditionalGeneration.from_pretrained(
    options.base, subfolder="vision_language_encoder", dtype=torch.{settings.dtype}
)
base.generation_config = model.generation_config
model = base.to(device)
pipeline.register_modules(vision_language_encoder=model)"""
    imports = ["from diffusers import GlmImagePipeline"]
    if settings.num_sources:
        imports.append("from diffusers.utils import load_image")
    return Card(
        title=f"Adapter for {settings.base_name}" if is_adapter else settings.base_name,
        metadata=_metadata(settings, is_adapter=is_adapter),
        license=_describe_license(settings),
        notes=notes,
        snippet="" if settings.num_sources else _snippet(settings, is_adapter=is_adapter),
        imports="\n".join([*imports, f"from transformers import {from_transformers}"]),
        load="\n".join(
            [*load, "", "", _edit(settings) if settings.num_sources else _draw(settings)]
        ),
        to_base=to_base,
        has_adapter=is_adapter,
    )


def _dtype(settings: StockSettings) -> str:
    """Argument that loads a pipeline in the dtypes of the run, see `decoder_dtype`."""
    own = DTYPES[settings.dtype]
    if decoder_dtype(own) == own:
        return f"dtype={own}"
    return f'dtype={{"default": {decoder_dtype(own)}, "vision_language_encoder": {own}}}'


def _metadata(settings: StockSettings, *, is_adapter: bool) -> ModelCardData:
    return ModelCardData(
        base_model=settings.base if settings.is_on_hub else None,
        license=settings.license,
        library_name="peft" if is_adapter else "diffusers",
        pipeline_tag="image-to-image" if settings.num_sources else "text-to-image",
        tags=["glm-grpo", *settings.method, *(["lora"] if is_adapter else [])],
    )


def _describe_license(settings: StockSettings) -> str:
    if settings.license is None:
        return (
            "The licence of the base model applies to these weights too; look it up where the base "
            "model came from, and add `license` and `base_model` (its hub id) above before "
            "publishing."
        )
    return f"Licence: that of the base model, {settings.license}."


def _snippet(settings: StockSettings, *, is_adapter: bool) -> str:
    dtype = _dtype(settings)
    imports, load = "", f'pipeline = GlmImagePipeline.from_pretrained(".", {dtype})'
    if is_adapter:
        imports = "from transformers import GenerationConfig\n"
        load = f"""\
pipeline = GlmImagePipeline.from_pretrained({settings.base_code}, {dtype})
pipeline.vision_language_encoder.load_adapter(".")
pipeline.vision_language_encoder.generation_config = GenerationConfig.from_pretrained(".")"""
    if is_adapter and settings.embedded is not None:
        imports += "from glm_grpo.models.find import find_model\n"
    return f"""\
import torch
from diffusers import GlmImagePipeline
{imports}
{load}
# On a GPU: pipeline.to("cuda")
torch.manual_seed(0)
image = pipeline(
    {settings.prompt!r},
{_decoding(settings, seed="0")}
).images[0]
image.save("image.png")"""


def _draw(settings: StockSettings) -> str:
    return f"""\
def draw():
    torch.manual_seed(options.seed)
    images = pipeline(
        options.prompt,
{textwrap.indent(_decoding(settings, seed="options.seed"), "    ")}
    ).images
    return images[0]"""


def _edit(settings: StockSettings) -> str:
    """Python for the tokens of an edit.

    Source: `GlmImagePipeline.generate_prior_tokens` (diffusers), steps 1 to 4.
    """
    height, width = settings.rollout.height, settings.rollout.width
    rows, columns = height // 32, width // 32
    return f"""\
def for_decoder(tokens):  # twice as many each way
    grid = tokens.view(1, {rows}, {columns})
    return grid.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2).flatten(1)


@torch.no_grad()
def draw():
    torch.manual_seed(options.seed)
    sources = [load_image(path).resize(({width}, {height})) for path in options.sources]
    content = [*({{"type": "image", "image": source}} for source in sources)]
    content.append({{"type": "text", "text": options.prompt}})
    size = {{"target_h": {height}, "target_w": {width}}}
    inputs = pipeline.processor.apply_chat_template(
        [[{{"role": "user", "content": content}}]],
        tokenize=True,
        return_dict=True,
        processor_kwargs={{**size, "padding": True, "return_tensors": "pt"}},
    ).to(device)
    tokens = model.generate(**inputs, max_new_tokens={rows * columns})
    grids = inputs["image_grid_thw"][: len(sources)]
    features = model.get_image_features(inputs["pixel_values"], grids).pooler_output
    # Rows of patches in transformers 5.17, a grid from 5.18 on.
    maps = [each if each.ndim == 3 else each.T.view(-1, {rows}, {columns}) for each in features]
    read = [model.model.vqmodel.encode(each[None]).image_tokens for each in maps]
    images = pipeline(
        [options.prompt],
        image=[sources],
        prior_token_ids=for_decoder(tokens[:, inputs["input_ids"].shape[1] :]),
        prior_token_image_ids=[torch.cat([for_decoder(each)[0] for each in read])],
        source_image_grid_thw=[torch.tensor([[1, {2 * rows}, {2 * columns}]] * len(sources))],
{textwrap.indent(_decoding(settings, seed="options.seed"), "    ")}
    ).images
    return images[0]"""


def _decoding(settings: StockSettings, *, seed: str) -> str:
    return f"""\
    height={settings.rollout.height},
    width={settings.rollout.width},
    num_inference_steps={settings.decode.steps},
    guidance_scale={settings.decode.guidance_scale},
    generator=torch.Generator().manual_seed({seed}),"""
