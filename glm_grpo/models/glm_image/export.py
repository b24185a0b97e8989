"""Write trained weights in the forms other programs load, with a README that draws a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diffusers import GlmImagePipeline
from peft import PeftModel

from glm_grpo.models.glm_image.policy import GlmImagePolicy

README = "README.md"


@dataclass(frozen=True)
class StockSettings:
    """What a run sampled and decoded with, in the terms of stock classes.

    Attributes:
        base: Folder or hub id of the pipeline that was trained on.
        dtype: Name of torch's type of the weights.
        height: Pixels.
        width: Pixels.
        temperature: Of token sampling, > 0.
        top_k: Of token sampling; None: not truncated.
        top_p: Of token sampling; None: not truncated.
        outside_codebook: What stock sampling, which is not restricted to the codebook, may draw
            besides; empty: not measured.
    """

    base: str
    dtype: str
    height: int
    width: int
    temperature: float
    top_k: int | None
    top_p: float | None
    decode_steps: int
    guidance_scale: float
    outside_codebook: str


def export_adapter(adapted: PeftModel, settings: StockSettings, directory: Path) -> None:
    """A folder that `PeftModel.from_pretrained(language model, directory)` loads.

    Args:
        adapted: The peft model around the language model.
        settings: For the README.
        directory: New or empty.
    """
    adapted.save_pretrained(directory)
    load = f"""\
pipeline = GlmImagePipeline.from_pretrained({settings.base!r}, dtype=torch.{settings.dtype})
adapted = PeftModel.from_pretrained(pipeline.vision_language_encoder, ".")
pipeline.register_modules(vision_language_encoder=adapted.merge_and_unload())"""
    # peft has written a README of its own, in which every line is to be filled in.
    _write_readme(directory, "Adapter of the language model", load, settings)


def export_pipeline(
    policy: GlmImagePolicy, pipeline: GlmImagePipeline, settings: StockSettings, directory: Path
) -> None:
    """A folder that stock `GlmImagePipeline.from_pretrained` loads, adapters merged in.

    The policy cannot be trained on after this.

    Args:
        policy: Built on the parts of `pipeline`.
        pipeline: Gives all other parts.
        settings: For the README.
        directory: New or empty.
    """
    model = policy.model
    if policy.adapted_model is not None:
        model = policy.adapted_model.merge_and_unload()
    pipeline.register_modules(vision_language_encoder=model)
    pipeline.save_pretrained(directory)
    load = f'pipeline = GlmImagePipeline.from_pretrained(".", dtype=torch.{settings.dtype})'
    _write_readme(directory, "Pipeline", load, settings)


def _write_readme(directory: Path, what: str, load: str, settings: StockSettings) -> None:
    notes = [
        "Height and width must be given, as multiples of 32: stock code has no default for them. "
        f"The run was trained at {settings.height} x {settings.width}.",
        "`generation_config` holds what tokens are sampled with; the run was trained with the "
        "values below, not with those of the published checkpoint.",
        *([settings.outside_codebook] if settings.outside_codebook else []),
    ]
    imports = "from peft import PeftModel\n" if "PeftModel" in load else ""
    text = f"""\
# {what} trained by glm-grpo for {settings.base}

{"".join(f"- {note}{chr(10)}" for note in notes)}
Run this in this folder; `pipeline.to("cuda")` after loading where there is an accelerator.

```python
import torch
from diffusers import GlmImagePipeline
{imports}
{load}
pipeline.vision_language_encoder.generation_config.update(
    do_sample=True,
    temperature={settings.temperature},
    top_k={settings.top_k or 0},
    top_p={settings.top_p or 1.0},
)
torch.manual_seed(0)
image = pipeline(
    'a red sign that says "OPEN"',
    height={settings.height},
    width={settings.width},
    num_inference_steps={settings.decode_steps},
    guidance_scale={settings.guidance_scale},
    generator=torch.Generator().manual_seed(0),
).images[0]
image.save("picture.png")
```
"""
    (directory / README).write_text(text, encoding="utf-8")
