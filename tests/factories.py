"""Objects that many tests need, with defaults: a new field is written here once."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from glm_grpo.config import Config, compose_config
from glm_grpo.config.losses import AnyLoss, ClippedLoss
from glm_grpo.config.sections import AdvantageSection, TrainSection
from glm_grpo.models.adapted_policy import AdaptedPolicy
from glm_grpo.models.base import Decoder
from glm_grpo.models.reference import Reference
from glm_grpo.types import PromptBatch
from rewards.types import Prompt

CONFIG_DIR = Path(__file__).parents[1] / "configs"

REQUIRED_OPTIONS: dict[str, dict[str, Any]] = {
    "lpips": {},
    "ssim": {},
    "aesthetic": {"head": "head.pth"},
    "psnr": {},
    "clip_score": {},
    "clip_image": {},
    "pick_score": {},
    "hps": {},
    "composition": {},
    "vlm_judge": {"url": "http://127.0.0.1:8000/v1", "model": "judge"},
    "remote": {"url": "http://127.0.0.1:8700"},
    "custom": {"function": "mine.scores:brightness"},
    "easyocr": {"engine": "easyocr"},
    "rapidocr": {"engine": "rapidocr"},
}
"""What must be written of each kind, or engine of OCR, beside kind and weight."""


def clipped_loss(**changes: Any) -> ClippedLoss:
    """Clipped at 0.2 on both sides, no KL."""
    defaults = {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coef": 0.0,
        "kl_estimator": "k3",
        "kl_placement": "loss",
        "kl_behaviour_coef": 0.0,
    }
    return ClippedLoss(**defaults | changes)


class UpdateSections(NamedTuple):
    """The sections of the config that an update reads."""

    loss: AnyLoss
    train: TrainSection


def update_sections(**changes: Any) -> UpdateSections:
    """One update in one pass, with `clipped_loss`."""
    train = {"steps": 1, "seed": 0, "epochs_per_rollout": 1, "micro_batch_size": 100}
    kept = {"checkpoint_every": 1, "keep_checkpoints": 1, "eval_every": 1}
    return changed(UpdateSections(clipped_loss(), TrainSection(**train, **kept)), **changes)


def changed(sections: UpdateSections, **changes: Any) -> UpdateSections:
    """Other values of some fields, those of the loss among them."""
    of_loss = {name: changes.pop(name) for name in [*changes] if name in ClippedLoss.model_fields}
    assert {*changes} <= {*TrainSection.model_fields}
    loss, train = sections
    return UpdateSections(loss.model_copy(update=of_loss), train.model_copy(update=changes))


def advantage_settings(**changes: Any) -> AdvantageSection:
    """GRPO's, without a limit."""
    return AdvantageSection(**{"normalization": "group_std", "std_floor": 0.01} | changes)


@cache
def tiny_config(*overrides: str, **sections: Any) -> Config:
    """`configs/tiny.yaml` with overrides, and with other sections by their name."""
    return compose_config(CONFIG_DIR, "tiny", overrides).model_copy(update=sections)


def _not_asked(*_: Any, **__: Any) -> Any:
    raise NotImplementedError


class NoPolicy(AdaptedPolicy):
    """Never asked, but for the tokens of an image: one for each 32 x 32 pixels."""

    codebook_size = 16
    dtype = torch.float32
    network = torch.nn.Identity()
    reference = Reference()

    def __init__(self) -> None:
        """Without a model."""

    def tokens_per_image(self, batch: PromptBatch) -> int:
        return batch.height * batch.width // 1024

    def encode_sources(self, batch: PromptBatch) -> PromptBatch:
        return batch

    # A test defines what else it asks for.
    token_places = tokenize_images = modules = source_modules = run_network_once = _not_asked
    _encode = _read_prompts = _choose_step = _sequences = _not_asked


class NoDecoder(Decoder):
    """Never asked, but for another number of steps."""

    steps = 1

    def with_steps(self, steps: int) -> Decoder:
        other = copy(self)
        other.steps = steps
        return other


class Brightness:
    """Scores images by their brightness.

    Args:
        change: Is given the scores of each group and its prompt; its result counts.
    """

    def __init__(self, change: Callable[[Tensor, Prompt], Tensor] | None = None) -> None:
        self._change = change or (lambda scores, prompt: scores)

    def applies_to(self, prompt: Prompt) -> bool:
        return True

    def score(self, prompts: list[Prompt], pixels: Tensor) -> Tensor:
        return self._change(pixels.float().mean(dim=(1, 2, 3)) / 255, prompts[0])

    def modules(self) -> tuple[nn.Module, ...]:
        return ()


class Watcher:
    """A display that writes down what it is told."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.counts: list[tuple[str, int, int]] = []
        self.evaluated: list[tuple[int, int]] = []

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def count(self, done: int, total: int) -> None:
        self.counts.append((self.phases[-1], done, total))

    def evaluating(self, done: int, total: int) -> None:
        self.evaluated.append((done, total))


def allocated_peak(work: Callable[[], object]) -> int:
    """Peak bytes by torch's own CPU allocator, above what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    live = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak
