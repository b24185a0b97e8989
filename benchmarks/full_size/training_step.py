"""Section: whole training steps by the configs of the cards, within the memory of the cards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import GlmImagePipeline

from benchmarks.full_size.measuring import DeviceMeter, PeakClock, ProcessMeter
from benchmarks.full_size.models import pipeline_of, random_decoder_part, random_language_part
from benchmarks.full_size.scale import Bench, make_batch
from glm_grpo.builders.models import place_models
from glm_grpo.builders.settings import collect_settings, update_settings
from glm_grpo.config import Config
from glm_grpo.errors import MemoryLimitError
from glm_grpo.grpo.update import update_policy
from glm_grpo.models.glm_image.memory import GlmImagePlanner
from glm_grpo.models.glm_image.prompt_inputs import tokenize_prompts
from glm_grpo.models.planning import OVERHEAD_BYTES, MemoryPlan, ScorerSizes
from glm_grpo.plan.fit import batch_sizes
from glm_grpo.training.collect import collect
from glm_grpo.training.learning_rate import LearningRate
from glm_grpo.training.phase import Models
from glm_grpo.types import PromptBatch


def step(bench: Bench) -> Iterator[dict[str, Any]]:
    """Seconds and peaks of memory by phase, beside the plan's, by card and side of the pictures."""
    meter = DeviceMeter() if bench.is_on_accelerator else ProcessMeter()
    for gigabytes in bench.scale.cards:
        config = bench.config(gigabytes, *bench.scale.steps[0])
        pipeline = _random_pipeline(bench, config)
        models = place_models(
            config,
            pipeline,
            bench.device,
            needs_reference=config.loss.kl_coef > 0,
        )
        run = _Run(models, config)
        with _capped(bench, gigabytes):
            for side, prompts in bench.scale.steps:
                sized = bench.config(gigabytes, side, prompts)
                batch = make_batch(side, prompts=prompts, group_size=sized.rollout.group_size)
                clock = PeakClock(meter)
                failed = run.step(batch, clock)
                seconds = clock.seconds()
                plan = _plan(bench, sized, _prompt_tokens(pipeline, batch))
                yield {
                    "card_gigabytes": gigabytes,
                    "is_capped": bench.is_on_accelerator,
                    "side": side,
                    "images": prompts * sized.rollout.group_size,
                    "is_complete": failed is None,
                    "out_of_memory_in": failed,
                    "seconds": seconds,
                    "phases": _beside_plan(clock, plan),
                }
        # Modules with adapters refer to themselves.
        del models, run, pipeline
        gc.collect()


def _prompt_tokens(pipeline: GlmImagePipeline, batch: PromptBatch) -> int:
    """Of its longest prompt."""
    inputs = tokenize_prompts(
        pipeline.processor,
        [prompt.prompt for prompt in batch.prompts],
        height=batch.height,
        width=batch.width,
    )
    return int(inputs["input_ids"].shape[1])


class _Run:
    """Steps with the same models, as the training loop takes them."""

    def __init__(self, models: Models, config: Config) -> None:
        self._models = models
        self._collect = collect_settings(config)
        self._update = update_settings(config)
        self._optimizer = torch.optim.AdamW(
            models.policy.trainable_parameters(), lr=config.optim.learning_rate
        )
        self._rate = LearningRate(
            self._optimizer,
            peak=config.optim.learning_rate,
            schedule="constant",
            warmup_updates=0,
            total_updates=1,
        )

    def step(self, batch: PromptBatch, clock: PeakClock) -> str | None:
        """Takes one step; the phase in which memory ran out, None where it sufficed."""
        try:
            experience = collect(self._models, batch, self._collect, policy_step=0, clock=clock)
            with self._models.offload.phase("update"), clock.phase("update"):
                update_policy(
                    self._models.policy, self._optimizer, self._rate, experience, self._update
                )
        except (torch.OutOfMemoryError, MemoryLimitError):
            return clock.begun
        return None


def _random_pipeline(bench: Bench, config: Config) -> GlmImagePipeline:
    """Made on the device part by part, and moved to CPU memory where the config has it wait."""
    scale, device = bench.scale, bench.device
    is_waiting = config.offload != "none"
    language = random_language_part(scale.configs, scale.torch_dtype, device)
    if is_waiting:
        language["vision_language_encoder"].to("cpu")
    decoder = random_decoder_part(scale.configs, scale.torch_dtype, device)
    if is_waiting:
        for name in ("transformer", "vae", "text_encoder"):
            decoder[name].to("cpu")
    # Neither is used for text to image.
    inner = language["vision_language_encoder"].model
    inner.visual.to("cpu")
    inner.vqmodel.to("cpu")
    return pipeline_of(language, decoder)


@contextmanager
def _capped(bench: Bench, gigabytes: int) -> Iterator[None]:
    """The process may take no more than the card has; the driver's share is taken off."""
    if not bench.is_on_accelerator:
        yield
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(bench.device).total_memory
    fraction = min(1.0, (gigabytes * 10**9 - OVERHEAD_BYTES) / total)
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _plan(bench: Bench, config: Config, prompt_tokens: int) -> MemoryPlan:
    return GlmImagePlanner(bench.scale.configs).plan(
        bench.settings(config),
        batch_sizes(config, prompt_tokens=prompt_tokens),
        ScorerSizes(),
        config.offload,
    )


def _beside_plan(clock: PeakClock, plan: MemoryPlan) -> dict[str, dict[str, float]]:
    """Bytes by phase; the driver's share is in neither figure."""
    planned = {phase: plan.total(phase) - plan.overhead for phase in clock.peaks}
    return {
        phase: {"peak": peak, "planned": planned[phase], "ratio": peak / planned[phase]}
        for phase, peak in clock.peaks.items()
    }
