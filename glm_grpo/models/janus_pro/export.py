"""Export trained weights in formats that stock transformers loads, with a page for the hub."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from peft import PeftModel

from glm_grpo.config.sections import RolloutSection
from glm_grpo.models.export_page import Card, StockSettings, describe_sampling, write_card
from glm_grpo.models.janus_pro.loading import JanusPro
from glm_grpo.models.janus_pro.policy import JanusProPolicy

_IMPORTS = "from transformers import DynamicCache, JanusForConditionalGeneration, JanusProcessor"
_LICENSE_LINK = "https://github.com/deepseek-ai/Janus/blob/main/LICENSE-MODEL"


def export_adapter(
    policy: JanusProPolicy, adapted: PeftModel, settings: StockSettings, directory: Path
) -> None:
    """Write a folder that `model.load_adapter` loads.

    Args:
        adapted: The policy's peft model.
        directory: Output folder, new or empty.
    """
    for config in adapted.peft_config.values():
        config.base_model_name_or_path = settings.base_name
    adapted.save_pretrained(directory, save_embedding_layers=False)
    _sample_as_trained(policy, settings)
    policy.model.generation_config.save_pretrained(directory)
    # peft writes its own README, a template in which every line is to be filled in.
    write_card(directory, _card(policy, settings, is_adapter=True), settings)


def export_folder(
    policy: JanusProPolicy, parts: JanusPro, settings: StockSettings, directory: Path
) -> None:
    """Write a folder that `JanusForConditionalGeneration.from_pretrained` loads, adapters merged.

    The policy cannot be trained after this.

    Args:
        parts: Model and processor; parts that are not trained are written too.
        directory: Output folder, new or empty.
    """
    model: Any = policy.model
    if policy.adapted_model is not None:
        model = policy.adapted_model.merge_and_unload()
    _sample_as_trained(policy, settings)
    model.save_pretrained(directory)
    parts.processor.save_pretrained(directory)
    write_card(directory, _card(policy, settings, is_adapter=False), settings)


def _sample_as_trained(policy: JanusProPolicy, settings: StockSettings) -> None:
    """Give the model's `generate` the sampling of the run, whatever its base had."""
    config, rollout = policy.model.generation_config, settings.rollout
    config.do_sample = True
    config.temperature = rollout.temperature
    config.top_k = rollout.top_k or 0
    config.top_p = rollout.top_p or 1.0
    config.min_p = rollout.min_p
    config.guidance_scale = policy.network.guidance_scale
    # Of a base without a generation config, which stock `generate` needs.
    config.generation_kwargs = {"boi_token_id": policy.ids.image}
    config.bos_token_id, config.pad_token_id = policy.ids.begin, policy.ids.pad
    config._from_model_config = False


def _card(policy: JanusProPolicy, settings: StockSettings, *, is_adapter: bool) -> Card:
    rollout, scale = settings.rollout, policy.network.guidance_scale
    notes = [
        f"Every image has {rollout.height} x {rollout.width} pixels.",
        f"The calls sample as the run did ({_describe_sampling(rollout, scale)}).",
    ]
    if is_adapter:
        notes[-1] += (
            " Their arguments must be given, because `load_adapter` does not read "
            f"`generation_config.json`: without `top_k={rollout.top_k or 0}`, transformers keeps "
            "the 50 most probable tokens."
        )
        notes.append("`model.disable_adapters()` draws with the base.")
    if scale == 1.0:
        notes.append(
            "The run sampled without guidance, which stock `generate` cannot do: it fails at "
            "`guidance_scale=1`. The call uses 1.001, which is close to it."
        )
    dtype = f"dtype=torch.{settings.dtype}"
    load = _load("options.base", "str(here)", dtype) if is_adapter else _load("here", None, dtype)
    own = _load(settings.base_code, '"."', dtype) if is_adapter else _load('"."', None, dtype)
    to_base = f"model = JanusForConditionalGeneration.from_pretrained(options.base, {dtype})"
    to_base += "\nmodel.eval().to(device)"
    imports = _IMPORTS
    if is_adapter and settings.embedded is not None:
        imports += "\nfrom glm_grpo.models.find import find_model"
    return Card(
        title=f"Adapter for {settings.base_name}" if is_adapter else settings.base_name,
        metadata=_metadata(is_adapter, settings),
        license=_describe_license(settings),
        notes=notes,
        snippet=f"""\
import torch
from PIL import Image
{imports}

{own}
model.eval()
# On a GPU: model.to("cuda")
torch.manual_seed(0)
{_generate(rollout, scale, prompt=repr(settings.prompt))}
Image.fromarray(levels.cpu().numpy()).save("image.png")""",
        imports=_IMPORTS,
        load=f"""\
{load}
model.eval().to(device)


def draw():
    torch.manual_seed(options.seed)
{textwrap.indent(_generate(rollout, scale, prompt="options.prompt"), "    ")}
    return Image.fromarray(levels.cpu().numpy())""",
        to_base="model.disable_adapters()" if is_adapter else to_base,
        has_adapter=is_adapter,
    )


def _load(base: str, adapter: str | None, dtype: str) -> str:
    """Python that loads processor and model from an expression for their place."""
    lines = [
        f"processor = JanusProcessor.from_pretrained({base})",
        f"model = JanusForConditionalGeneration.from_pretrained({base}, {dtype})",
        *([f"model.load_adapter({adapter})"] if adapter is not None else []),
    ]
    return "\n".join(lines)


def _generate(rollout: RolloutSection, scale: float, *, prompt: str) -> str:
    """Python that makes the bytes of an image; `prompt` is the expression of its prompt."""
    options = [
        'generation_mode="image"',
        "do_sample=True",
        f"temperature={rollout.temperature:g}",
        f"top_k={rollout.top_k or 0}",
        *([f"top_p={rollout.top_p:g}"] if rollout.top_p is not None else []),
        *([f"min_p={rollout.min_p:g}"] if rollout.min_p is not None else []),
        f"guidance_scale={scale if scale > 1.0 else 1.001:g}",
        "past_key_values=DynamicCache()",
    ]
    arguments = "".join(f"    {option},\n" for option in options)
    return f"""\
message = {{"role": "user", "content": [{{"type": "text", "text": {prompt}}}]}}
inputs = processor.apply_chat_template(
    [[message]],
    add_generation_prompt=True,
    tokenize=True,
    return_dict=True,
    processor_kwargs={{"generation_mode": "image", "return_tensors": "pt"}},
).to(model.device)
tokens = model.generate(
    **inputs,
{arguments})
pixels = model.decode_image_tokens(tokens)[0].float()
levels = ((pixels + 1) / 2 * 255).clamp(0, 255).to(torch.uint8)"""


def _describe_sampling(rollout: RolloutSection, scale: float) -> str:
    """Like `describe_sampling`, with the guidance that an absent key stands for."""
    return describe_sampling(rollout.model_copy(update={"guidance_scale": scale}))


def _metadata(is_adapter: bool, settings: StockSettings) -> ModelCardData:
    is_published = settings.license is not None and settings.embedded is None
    return ModelCardData(
        base_model=settings.base if settings.is_on_hub else None,
        license="other" if is_published else settings.license,
        license_name="deepseek" if is_published else None,
        license_link=_LICENSE_LINK if is_published else None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-to-image",
        tags=["glm-grpo", *settings.method, "janus", *(["lora"] if is_adapter else [])],
    )


def _describe_license(settings: StockSettings) -> str:
    if settings.embedded is not None:
        return f"Licence: that of the base model, {settings.license}."
    model = f"[DeepSeek Model License]({_LICENSE_LINK})"
    if settings.license is None:
        return (
            f"The weights of Janus-Pro are under the {model}, whose restrictions of use apply to "
            "these weights too and must be passed on. If the base model came from elsewhere, look "
            "up its licence, and add `license` and `base_model` (its hub id) above before "
            "publishing."
        )
    return (
        f"Licence: that of the base model, whose card says {settings.license}. The weights of "
        f"Janus-Pro are under the {model}, whose restrictions of use apply to these weights too "
        "and must be passed on."
    )
