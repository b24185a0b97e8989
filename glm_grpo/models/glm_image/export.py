"""Export trained weights in formats that other programs load, with a model card.

The card is a README.md in the format of the Hugging Face hub: metadata, how to generate an image
with stock classes, what the weights were trained for, and the results.
"""

from __future__ import annotations

from pathlib import Path

from diffusers import GlmImagePipeline
from huggingface_hub import ModelCardData
from peft import PeftModel
from transformers import PreTrainedModel

from glm_grpo.models.export import README, StockSettings, describe_sampling
from glm_grpo.models.glm_image.policy import GlmImagePolicy
from glm_grpo.models.glm_image.token_grid import token_layout

_ADAPTER, _PIPELINE = "Adapter of the language model", "Pipeline"


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
    load = f"""\
pipeline = GlmImagePipeline.from_pretrained({settings.base_code}, dtype=torch.{settings.dtype})
pipeline.vision_language_encoder.load_adapter(".")
pipeline.vision_language_encoder.generation_config = GenerationConfig.from_pretrained(".")"""
    # peft writes its own README, a template in which every line is to be filled in.
    _write_readme(directory, _ADAPTER, load, settings)


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
    load = f'pipeline = GlmImagePipeline.from_pretrained(".", dtype=torch.{settings.dtype})'
    _write_readme(directory, _PIPELINE, load, settings)


def _sample_as_trained(model: PreTrainedModel, settings: StockSettings) -> None:
    """Give a model's `generate` the sampling of the run, whatever its base had."""
    config = model.generation_config
    config.do_sample = True
    rollout = settings.rollout
    config.temperature = rollout.temperature
    config.top_k = rollout.top_k or 0
    config.top_p = rollout.top_p or 1.0
    config.min_p = rollout.min_p


def _write_readme(directory: Path, what: str, load: str, settings: StockSettings) -> None:
    has_preview = settings.num_sources == 0
    layout = token_layout(settings.rollout.height, settings.rollout.width, has_preview=has_preview)
    outside_codebook = settings.outside_codebook(layout.num_tokens)
    notes = [
        "Height and width must be given, as multiples of 32: stock code has no default for them. "
        f"The run was trained at {settings.rollout.height} x {settings.rollout.width}.",
        "`generation_config.json` sets how tokens are sampled: as the run did "
        f"({describe_sampling(settings.rollout)}), whatever the base model has.",
        *([outside_codebook] if outside_codebook else []),
    ]
    imports = ""
    if what == _ADAPTER:
        imports = "from transformers import GenerationConfig\n"
        notes.append("`pipeline.vision_language_encoder.disable_adapters()` draws with the base.")
    if what == _ADAPTER and settings.is_embedded:
        imports += "from glm_grpo.builders.models import model_path\n"
    elif what == _ADAPTER and not settings.is_on_hub:
        notes.append(f"`{settings.base_code}` stands for the folder of the base model.")
    if settings.num_sources:
        imports += "from diffusers.utils import load_image\n"
        notes.append(
            "The edit call of the pipeline fails with transformers 5.18 and later, so here the "
            "language model generates the tokens, and the pipeline only decodes them."
        )
    draw = _edit(settings) if settings.num_sources else _draw(settings)
    text = f"""\
---
{_metadata(what, settings)}
---

# {what} trained by glm-grpo

{_describe_license(settings)}

## Generate an image

{"".join(f"- {note}{chr(10)}" for note in notes)}
Run this in this folder; on a GPU, call `pipeline.to("cuda")` after loading.

```python
import torch
from diffusers import GlmImagePipeline
{imports}
{load}
torch.manual_seed(0)
{draw}
image.save("picture.png")
```

{settings.training}"""
    (directory / README).write_text(text, encoding="utf-8")


def _metadata(what: str, settings: StockSettings) -> str:
    """YAML metadata for the hub, which accepts a base model only by its hub id."""
    is_adapter = what == _ADAPTER
    return ModelCardData(
        base_model=settings.base if settings.is_on_hub else None,
        license=settings.license,
        library_name="peft" if is_adapter else "diffusers",
        pipeline_tag="image-to-image" if settings.num_sources else "text-to-image",
        tags=["glm-grpo", "grpo", "reinforcement-learning", *(["lora"] if is_adapter else [])],
    ).to_yaml()


def _describe_license(settings: StockSettings) -> str:
    if settings.license is None:
        return (
            "The licence of the base model applies to these weights too; look it up where the base "
            "model came from, and add `license` and `base_model` (its hub id) above before "
            "publishing."
        )
    return f"Licence: that of the base model, {settings.license}."


def _draw(settings: StockSettings) -> str:
    return f"""\
image = pipeline(
    {settings.prompt!r},
{_decoding(settings)}
).images[0]"""


def _edit(settings: StockSettings) -> str:
    """Python for the tokens of an edit.

    Source: `GlmImagePipeline.generate_prior_tokens` (diffusers), steps 1 to 4.
    """
    height, width = settings.rollout.height, settings.rollout.width
    rows, columns = height // 32, width // 32
    paths = [f"source-{number}.png" for number in range(1, settings.num_sources + 1)]
    return f"""\
instruction = {settings.prompt!r}
sources = [load_image(path).resize(({width}, {height})) for path in {paths}]
content = [*({{"type": "image", "image": source}} for source in sources)]
content.append({{"type": "text", "text": instruction}})
model = pipeline.vision_language_encoder
inputs = pipeline.processor.apply_chat_template(
    [[{{"role": "user", "content": content}}]],
    tokenize=True,
    return_dict=True,
    processor_kwargs=dict(target_h={height}, target_w={width}, padding=True, return_tensors="pt"),
).to(model.device)


def for_decoder(tokens):  # twice as many each way
    grid = tokens.view(1, {rows}, {columns})
    return grid.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2).flatten(1)


grids = inputs["image_grid_thw"][: len(sources)]
with torch.no_grad():
    tokens = model.generate(**inputs, max_new_tokens={rows * columns})
    features = model.get_image_features(inputs["pixel_values"], grids).pooler_output
    # Rows of patches in transformers 5.17, a grid from 5.18 on.
    maps = [each if each.ndim == 3 else each.T.view(-1, {rows}, {columns}) for each in features]
    read = [model.model.vqmodel.encode(each[None]).image_tokens for each in maps]
image = pipeline(
    [instruction],
    image=[sources],
    prior_token_ids=for_decoder(tokens[:, inputs["input_ids"].shape[1] :]),
    prior_token_image_ids=[torch.cat([for_decoder(each)[0] for each in read])],
    source_image_grid_thw=[torch.tensor([[1, {2 * rows}, {2 * columns}]] * len(sources))],
{_decoding(settings)}
).images[0]"""


def _decoding(settings: StockSettings) -> str:
    return f"""\
    height={settings.rollout.height},
    width={settings.rollout.width},
    num_inference_steps={settings.decode.steps},
    guidance_scale={settings.decode.guidance_scale},
    generator=torch.Generator().manual_seed(0),"""
