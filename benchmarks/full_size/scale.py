"""Sizes of the full-size benchmark: of the published model, or of the embedded one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from glm_grpo.builders.models import model_path
from glm_grpo.config import TINY, Config, compose_config
from glm_grpo.models.glm_image.meta import PUBLISHED_ID, PartConfigs, read_part_configs
from glm_grpo.models.planning import ModelSettings
from glm_grpo.plan.devices import DeviceSpeed
from glm_grpo.plan.fit import model_settings
from glm_grpo.types import PromptBatch
from rewards.types import Prompt

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

CAPTION = 'A hand-painted shop sign with the words "OPEN DAILY" above a door of blue wood.'


@dataclass(frozen=True)
class Scale:
    """What is measured.

    Attributes:
        path: Of the model whose sizes are taken.
        dtype: Name of the type of weights.
        token_side: Pixels of the grids that are drawn to time a token step.
        batches: Samples that draw at once.
        stock_side: Pixels of the grids that stock `generate` draws as well.
        stock_batch: Samples of it.
        repeats: Of what draws tokens; the fastest counts.
        decoded: Sides in pixels with the images that are drawn at once.
        decode_steps: Of denoising where decoding is timed.
        cards: Gigabytes that whole training steps may take, and whose configs they are.
        steps: Sides in pixels with the prompts of a whole training step.
        overrides: Of the configs of whole steps.
    """

    path: str
    dtype: str
    token_side: int
    batches: tuple[int, ...]
    stock_side: int
    stock_batch: int
    repeats: int
    decoded: tuple[tuple[int, int], ...]
    decode_steps: int
    cards: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]
    overrides: tuple[str, ...]

    @property
    def configs(self) -> PartConfigs:
        """Sizes of the parts."""
        return read_part_configs(model_path(self.path))

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of weights."""
        return torch.float32 if self.dtype == "float32" else torch.bfloat16


SCALES = {
    "full": Scale(
        path=PUBLISHED_ID,
        dtype="bfloat16",
        token_side=256,
        batches=(1, 8, 32),
        stock_side=128,
        stock_batch=8,
        # The first run is slower: kernels are chosen, memory is taken.
        repeats=2,
        decoded=((1024, 2), (1024, 8)),
        decode_steps=8,
        cards=(24, 80),
        steps=((1024, 4),),
        # How often the decoder runs changes its time, which is measured by itself, not its memory.
        overrides=("decode.steps=4", "decode.rollout_steps=null"),
    ),
    "small": Scale(
        path=TINY,
        dtype="float32",
        token_side=64,
        batches=(1, 8),
        stock_side=64,
        stock_batch=2,
        repeats=1,
        decoded=((64, 2), (128, 2)),
        decode_steps=2,
        cards=(24,),
        steps=((64, 1), (128, 1)),
        overrides=(
            f"model.path={TINY}",
            "model.dtype=float32",
            "decode.steps=1",
            "decode.rollout_steps=null",
            "rollout.group_size=2",
            "train.micro_batch_size=2",
        ),
    ),
}


@dataclass(frozen=True)
class Bench:
    """What all sections share.

    Attributes:
        device: Where it runs.
    """

    scale: Scale
    device: torch.device
    speed: DeviceSpeed

    @property
    def is_on_accelerator(self) -> bool:
        """Else everything is in CPU memory."""
        return self.device.type != "cpu"

    def config(self, gigabytes: int, side: int, prompts: int) -> Config:
        """Of a card, for pictures of a side, with the terms that need no download."""
        sizes = (f"rollout.height={side}", f"rollout.width={side}")
        return compose_config(
            CONFIGS,
            f"glm_image_{gigabytes}gb",
            [
                "data.path=none",
                "data.eval_path=none",
                *(f"reward.terms.{name}=null" for name in ("lpips", "ocr", "aesthetic")),
                *sizes,
                f"rollout.prompts_per_step={prompts}",
                *self.scale.overrides,
            ],
        )

    @property
    def card_config(self) -> Config:
        """Of the 24 GB card: says which adapters the policy has."""
        return self.config(24, *self.scale.steps[0])

    def settings(self, config: Config) -> ModelSettings:
        """How a config holds the policy here."""
        return model_settings(config, is_on_accelerator=self.is_on_accelerator)


def make_batch(side: int, *, prompts: int, group_size: int) -> PromptBatch:
    """One caption for all prompts, so that nothing is padded, and grey pictures as targets."""
    target = torch.full((3, side, side), 127, dtype=torch.uint8)
    return PromptBatch(
        prompts=tuple(
            Prompt(f"sign-{index}", CAPTION, texts=("OPEN DAILY",), target=target)
            for index in range(prompts)
        ),
        group_size=group_size,
        height=side,
        width=side,
        seed=0,
        decode_seeds=tuple(range(prompts)),
    )
