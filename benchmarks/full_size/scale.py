"""Sizes of the sections: those of the published model, or of the embedded one for a dry run."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from diffusers import GlmImagePipeline

from benchmarks.full_size.models import pipeline_of, random_decoder_part, random_language_part
from glm_grpo.config import Config, compose_config
from glm_grpo.models.find import find_model
from glm_grpo.models.glm_image.files import PUBLISHED_ID
from glm_grpo.models.glm_image.planner import (
    GlmImagePlanner,
    PartConfigs,
    read_part_configs,
)
from glm_grpo.models.glm_image.policy import GlmImagePolicy
from glm_grpo.plan.devices import DeviceSpeed
from glm_grpo.types import PromptBatch
from rewards.types import Prompt

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

WORDS = ("OPEN", "OPEN DAILY", "OPEN DAILY FROM NINE TO FIVE")
"""Texts whose glyph embeddings have three lengths."""

Rows: TypeAlias = Iterator[tuple[str, Callable[[], dict[str, Any]]]]
"""Rows of a section: their names, and functions that measure them."""


@dataclass(frozen=True)
class Scale:
    """Sizes to measure.

    Attributes:
        path: Model whose sizes are used.
        dtype: Name of the weights' dtype.
        side: Side in pixels, for everything but the row of the shipped settings.
        prompts: P of a rollout.
        group_size: G.
        learned_prompts: P of an update.
        micro_batches: Sequences per forward and backward pass.
        timed_steps: Few and many denoising steps, whose difference is timed.
        vae_batches: Images that pass through the VAE at once.
        attention: Attention backends of diffusers.
        flat_side: Side in pixels where the reward is constant.
        shipped: Overrides for the row of the shipped settings.
        overrides: Overrides for all configs.
        tests: Pattern of files whose tests marked `gpu` are run.
    """

    path: str
    dtype: str
    side: int
    prompts: int
    group_size: int
    learned_prompts: int
    micro_batches: tuple[int, ...]
    timed_steps: tuple[int, int]
    vae_batches: tuple[int, ...]
    attention: tuple[str, ...]
    flat_side: int
    shipped: tuple[str, ...]
    overrides: tuple[str, ...]
    tests: str

    @property
    def configs(self) -> PartConfigs:
        """Sizes of the parts."""
        return read_part_configs(find_model(self.path).path)

    @cached_property
    def planner(self) -> GlmImagePlanner:
        """Plans bytes and operations of the model."""
        return GlmImagePlanner(self.configs)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return torch.float32 if self.dtype == "float32" else torch.bfloat16


FULL = Scale(
    path=PUBLISHED_ID,
    dtype="bfloat16",
    side=512,
    prompts=8,
    group_size=8,
    learned_prompts=4,
    micro_batches=(16, 8, 2),
    timed_steps=(1, 5),
    vae_batches=(1, 4, 8),
    attention=("_native_cudnn", "_native_flash"),
    flat_side=256,
    shipped=(),
    overrides=(),
    tests="test_*.py",
)

SMALL = Scale(
    path="tiny",
    dtype="float32",
    side=64,
    prompts=2,
    group_size=2,
    learned_prompts=2,
    micro_batches=(2,),
    timed_steps=(1, 2),
    vae_batches=(1, 2),
    attention=("_native_math",),
    flat_side=32,
    shipped=(
        "rollout.height=64",
        "rollout.width=64",
        "rollout.prompts_per_step=1",
        "rollout.group_size=2",
        "decode.steps=2",
        "decode.rollout_steps=1",
    ),
    overrides=(
        "model.path=tiny",
        "model.dtype=float32",
        "model.adapter={rank: 4, alpha: 8.0}",
        "train.micro_batch_size=2",
    ),
    tests="test_offload.py",
)


@dataclass(frozen=True)
class Bench:
    """State that all sections share.

    Attributes:
        device: Device to measure.
        ends: Time, by `time.monotonic`, after which no row begins.
    """

    scale: Scale
    device: torch.device
    speed: DeviceSpeed
    ends: float

    @property
    def is_on_accelerator(self) -> bool:
        """Whether there is an accelerator; if not, everything is in CPU memory."""
        return self.device.type != "cpu"

    @property
    def seconds_left(self) -> float:
        """Seconds until `ends`."""
        return self.ends - time.monotonic()

    def config(self, *overrides: str, name: str = "glm_image_80gb") -> Config:
        """Compose a packaged config at the sizes of the scale, without prompts.

        The default is the config of an 80 GB card.

        Args:
            overrides: Take precedence over the scale's.
            name: Name of the config.
        """
        scale = self.scale
        return compose_config(
            CONFIGS,
            name,
            [
                "data.path=none",
                "data.eval_path=none",
                "trackers=[]",
                f"rollout.height={scale.side}",
                f"rollout.width={scale.side}",
                f"rollout.prompts_per_step={scale.prompts}",
                f"rollout.group_size={scale.group_size}",
                *scale.overrides,
                *overrides,
            ],
        )

    def language_part(self) -> dict[str, Any]:
        """Create a language model with random weights."""
        return random_language_part(self.scale.configs, self.scale.torch_dtype, self.device)

    def decoder_part(self) -> dict[str, Any]:
        """Create a decoder with random weights."""
        return random_decoder_part(self.scale.configs, self.scale.torch_dtype, self.device)

    def policy(self, *, is_compiling: bool, is_checkpointing: bool = True) -> GlmImagePolicy:
        """Create a policy with the config's adapters; drops what was compiled for others."""
        torch.compiler.reset()
        self.free()
        config = self.config(
            f"model.gradient_checkpointing={str(is_checkpointing).lower()}", "train.seed=0"
        )
        return GlmImagePolicy(
            config,
            pipeline_of(self.language_part()),
            is_compiling=is_compiling,
        )

    def pipeline(self, *, reads_sources: bool = False) -> GlmImagePipeline:
        """Create the pipeline with all parts."""
        self.free()
        language = self.language_part()
        if not reads_sources:
            # Text-to-image uses neither.
            inner = language["vision_language_encoder"].model
            inner.visual.to("cpu")
            inner.vqmodel.to("cpu")
        return pipeline_of(language, self.decoder_part())

    def free(self) -> None:
        """Free unused objects; modules with adapters have reference cycles."""
        gc.collect()
        if self.is_on_accelerator:
            torch.cuda.empty_cache()

    def peak_bytes(self) -> dict[str, int]:
        """Peak bytes of tensors on the accelerator since the row began."""
        return {"peak_bytes": torch.cuda.max_memory_allocated()} if self.is_on_accelerator else {}


def make_batch(
    side: int, *, prompts: int, group_size: int, num_sources: int = 0, first: int = 0
) -> PromptBatch:
    """Make captions of different lengths, with grey images as targets and sources.

    Args:
        side: Side of the images, pixels.
        prompts: P.
        group_size: G.
        num_sources: Number of source images per prompt.
        first: Index of the first prompt.
    """
    image = torch.full((3, side, side), 127, dtype=torch.uint8)
    return PromptBatch(
        prompts=tuple(
            Prompt(
                f"sign-{place}",
                caption(place),
                texts=(WORDS[place % len(WORDS)],),
                target=image,
                sources=(image,) * num_sources,
            )
            for place in range(first, first + prompts)
        ),
        group_size=group_size,
        height=side,
        width=side,
        seed=0,
        decode_seeds=tuple(range(prompts)),
    )


def caption(place: int) -> str:
    """Caption whose length differs from those of neighbouring places."""
    more = "above a door of blue wood " * (1 + 3 * (place % 4))
    return f'A hand-painted shop sign with the words "{WORDS[place % len(WORDS)]}" {more}'.strip()
