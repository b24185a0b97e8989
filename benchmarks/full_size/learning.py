"""Section: compare the update on prompts of mixed length with the floor of its operations."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.full_size.measuring import seconds_of
from benchmarks.full_size.scale import Bench, Rows, make_batch
from benchmarks.update import with_reference
from glm_grpo.grpo.learning_rate import LearningRate
from glm_grpo.grpo.update import Learner, update_policy
from glm_grpo.models.glm_image.policy import GlmImagePolicy
from glm_grpo.plan.devices import DeviceSpeed
from glm_grpo.plan.floors import update_flops
from glm_grpo.plan.memory import BatchShape
from glm_grpo.types import Experience, ImageBatch, PromptBatch, Rollout
from rewards.types import RewardTable


def update(bench: Bench) -> Rows:
    """Seconds of one update with its reference, by micro-batch, recomputation and compilation."""
    for is_compiling in (True, False):
        for is_checkpointing in (True, False):
            learner = _Learner(bench, is_compiling=is_compiling, is_checkpointing=is_checkpointing)
            for size in bench.scale.micro_batches:
                how = ", ".join(
                    (
                        "compiled" if is_compiling else "eager",
                        "checkpointing" if is_checkpointing else "no checkpointing",
                        f"micro-batch {size}",
                    )
                )
                yield how, partial(learner.measure, size)
            del learner


class _Learner:
    """A policy with an experience to learn from."""

    def __init__(self, bench: Bench, *, is_compiling: bool, is_checkpointing: bool) -> None:
        scale = bench.scale
        self._bench, self._is_checkpointing = bench, is_checkpointing
        self._policy = bench.policy(is_compiling=is_compiling, is_checkpointing=is_checkpointing)
        config = bench.config()
        counted = bench.config(
            f"model.gradient_checkpointing={str(is_checkpointing).lower()}",
            "train.epochs_per_rollout=1",
        )
        self._config = config
        self._optimizer, self._rate = make_optimizer(self._policy)
        self._batch = make_batch(
            scale.side, prompts=scale.learned_prompts, group_size=scale.group_size
        )
        self._experience = _experience(self._policy, self._batch)
        read = self._policy.encode(self._batch).attention_mask.sum(dim=1).float().mean()
        shape = BatchShape(len(self._batch.prompts), self._batch.group_size, int(read))
        self._flops = update_flops(scale.planner, counted, shape)

    def measure(self, micro_batch_size: int) -> dict[str, Any]:
        """Time the first update, which compiles and selects kernels, and the second."""
        config = self._config
        train = config.train.model_copy(update={"micro_batch_size": micro_batch_size})
        learner = Learner(
            self._policy, self._optimizer, self._rate, max_grad_norm=config.optim.max_grad_norm
        )

        def work() -> None:
            experience = with_reference(self._experience, self._policy, rows=micro_batch_size)
            update_policy(learner, experience, config.loss, train)

        first, seconds = (seconds_of(work, self._bench.device) for _ in range(2))
        return {
            "images": self._experience.totals.numel(),
            "first_seconds": first,
            "seconds": seconds,
            **_beside_floor(self._flops, seconds, self._bench.speed),
            **self._bench.peak_bytes(),
        }


def _beside_floor(flops: int, seconds: float, speed: DeviceSpeed) -> dict[str, float]:
    floor = flops / speed.flops
    return {"floor_seconds": floor, "ratio": seconds / floor, "mfu": floor / seconds}


def make_optimizer(policy: GlmImagePolicy) -> tuple[torch.optim.AdamW, LearningRate]:
    """The optimizer of a run, with a constant learning rate."""
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=1e-5)
    rate = LearningRate(
        optimizer, peak=1e-5, schedule="constant", warmup_updates=0, total_updates=1
    )
    return optimizer, rate


def _experience(policy: GlmImagePolicy, batch: PromptBatch) -> Experience:
    """Random tokens, with log-probabilities as if this policy had sampled them."""
    generator = torch.Generator().manual_seed(0)
    prompts, group_size = len(batch.prompts), batch.group_size
    tokens = policy.tokens_per_image(batch)
    shape = (prompts, group_size, tokens)
    rollout = Rollout(
        token_ids=torch.randint(policy.codebook_size, shape, generator=generator),
        log_probs=torch.zeros(shape),
        sampling_mask=None,
    )
    parts = [
        policy.reference_log_probs(batch, rollout, rows).cpu()
        for rows in torch.arange(prompts * group_size).split(2)
    ]
    rollout = replace(rollout, log_probs=torch.cat(parts).view(shape))
    totals = torch.randn(prompts, group_size, generator=generator)
    values = totals - totals.mean(dim=1, keepdim=True)
    pixels = torch.zeros(prompts, group_size, 3, 1, 1, dtype=torch.uint8)
    return Experience(
        prompts=batch,
        rollout=rollout,
        images=ImageBatch(pixels, batch.decode_seeds),
        scores=RewardTable(
            names=("none",),
            raw=totals.unsqueeze(-1),
            is_applicable=torch.ones(prompts, 1, dtype=torch.bool),
            weights=torch.ones(1),
            std_floors=torch.ones(1),
        ),
        totals=totals,
        penalties=torch.zeros_like(totals),
        advantages=values[..., None],
    )
