"""Settings that an export writes into its model card, and the licence of its base."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml
from huggingface_hub import hf_hub_download, metadata_load

from glm_grpo.config.sections import DecodeSection, RolloutSection

README = "README.md"

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class StockSettings:
    """How a run sampled and decoded, in the parameters of stock classes.

    Attributes:
        base: Folder or hub id of the model that the run started from.
        rollout: How tokens were sampled, and the size of images.
        decode: How tokens were decoded.
        outside_codebook: Returns a note on tokens outside the codebook, which stock sampling does
            not exclude, given the number of tokens per image; empty: not measured.
        license: Hub name of the base's licence; None: unknown.
        training: Sections of the card, in Markdown, on training and its results.
        prompt: Prompt of the card's example, for generation or editing.
        num_sources: Source pictures per prompt; 0: text-to-image.
        is_embedded: Whether the base is the model in the package.
    """

    base: str
    dtype: str
    rollout: RolloutSection
    decode: DecodeSection
    outside_codebook: Callable[[int], str]
    license: str | None
    training: str
    prompt: str
    num_sources: int = 0
    is_embedded: bool = False

    @property
    def is_on_hub(self) -> bool:
        """Whether `base` is a hub id."""
        return bool(_HUB_ID.fullmatch(self.base)) and not Path(self.base).exists()

    @property
    def base_name(self) -> str:
        """Name of the base without the local path, which means nothing on another machine."""
        if self.is_embedded:
            return "glm_grpo.tiny"
        return self.base if self.is_on_hub else Path(self.base).name

    @property
    def base_code(self) -> str:
        """Python expression for the base; for a folder, a placeholder for the reader to fill in."""
        if self.is_embedded:
            return 'model_path("tiny")'
        return repr(self.base if self.is_on_hub else f"PATH/TO/{self.base_name}")


def describe_sampling(rollout: RolloutSection) -> str:
    """Describe temperature, truncation and guidance, such as `temperature 0.9, top_p 0.75`."""
    limits = {"top_k": rollout.top_k, "top_p": rollout.top_p, "min_p": rollout.min_p}
    dropping = [f"{name} {limit:g}" for name, limit in limits.items() if limit is not None]
    guidance = rollout.guidance_scale
    guided = [] if guidance is None else [f"guidance {guidance:g}"]
    said = [f"temperature {rollout.temperature:g}", *(dropping or ["no token dropped"]), *guided]
    return ", ".join(said)


def describe_decoding(decode: DecodeSection) -> str:
    """Describe how tokens were decoded, such as `20 steps, guidance 1.5`."""
    if decode.steps is None:
        return "one pass"
    return f"{decode.steps} steps, guidance {decode.guidance_scale:g}"


def find_license(base: str) -> str | None:
    """Find the licence of a pipeline in its model card.

    Args:
        base: Folder or hub id.

    Returns:
        Its name on the hub, such as `mit`; None if no card can be read.
    """
    try:
        card = Path(base) / README
        if not Path(base).is_dir():
            card = Path(hf_hub_download(base, README))
        found = (metadata_load(card) or {}).get("license")
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return found if isinstance(found, str) else None
