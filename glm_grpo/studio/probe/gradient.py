"""Measure the gradient of a reward: whether batches agree, with credit by image and by place."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from glm_grpo.config import Config
from glm_grpo.errors import ConfigError, NonFiniteError
from glm_grpo.grpo.loss_scale import LossScale
from glm_grpo.grpo.policy import PolicyForUpdate
from glm_grpo.grpo.signal_to_noise import (
    FEWEST_BATCHES,
    Agreement,
    Signal,
    compare_signals,
    measure_agreement,
)
from glm_grpo.grpo.update import policy_gradient
from glm_grpo.output import describe_bytes
from glm_grpo.training.collect import with_advantages
from glm_grpo.training.models import Models
from glm_grpo.training.out_of_memory import describe_replay
from glm_grpo.types import Experience

logger = logging.getLogger(__name__)

_MOST_MEMORY = 0.5
"""Fraction of the free CPU memory that gradients may take; decoding and scoring need the rest."""
_FLOAT32_BYTES = 4
_LEAST_COSINE = 0.5
"""Between mean gradients by place and by image, of a policy that has learned something. In
simulations, wrong comparisons had -0.35 and -0.62, right ones 0.79 and more."""

Gradient: TypeAlias = list[Float32[Tensor, "..."]]
"""One tensor per trainable parameter."""


@dataclass(frozen=True)
class ProbedGradient:
    """Signal-to-noise ratios of gradients, with credit by image and by place.

    Attributes:
        agreement: Agreement of the gradients that the config trains with.
        by_image: Credit by image.
        by_place: Credit by place, by the value of `advantage.reward_to_go`, in ascending order;
            empty if it is credit by image, because no score has places.
        batches: Number of batches, N.
        prompts: Prompts per batch.
        has_learned: Whether the policy was trained by another run before.
    """

    agreement: Agreement
    by_image: Signal
    by_place: dict[float, Signal]
    batches: int
    prompts: int
    has_learned: bool = False

    def verdict(self) -> str:
        """Whether to train by place, in words.

        The cosine decides, not the clearer gradient: a comparison that is wrong, such as of boxes
        that may stand anywhere with the places where they stand, has the clearest of all. It points
        elsewhere only once the policy has learned something.
        """
        measured = {
            weight: signal
            for weight, signal in self.by_place.items()
            if not math.isnan(signal.cosine)
        }
        if not measured:
            return "the batches are too few or too noisy to judge by: keep advantage.credit=image"
        elsewhere = [weight for weight, signal in measured.items() if signal.cosine < _LEAST_COSINE]
        if elsewhere:
            ways = ", ".join(f"{weight:g}" for weight in elsewhere)
            return (
                f"by place, with reward_to_go {ways}, the gradient points elsewhere than the "
                f"reward's (cosine below {_LEAST_COSINE:g}), however clear it is: keep "
                "advantage.credit=image, and give boxes that may stand anywhere a kind"
            )
        if not self.has_learned:
            return (
                "the cosine of a model that has not trained does not tell whether credit by place "
                "points elsewhere: before you choose it, train about 15 steps by image, and "
                "repeat this with model.start_from=RUN"
            )
        clearer = [weight for weight, signal in measured.items() if signal.low > 1]
        if not clearer:
            return "by place, the gradient is not clearer for certain: keep advantage.credit=image"
        best = max(clearer, key=lambda weight: measured[weight].gain)
        return (
            "by place, the gradient is clearer and points where the reward's does: try "
            f"advantage.credit=place advantage.reward_to_go={best:g}"
        )


def credits_compared(weight: float, others: Sequence[float]) -> tuple[float, ...]:
    """Values of `advantage.reward_to_go` to measure: the config's, 1, and those asked for."""
    return tuple(sorted({weight, 1.0, *others}))


def gradient_bytes(policy: PolicyForUpdate, *, batches: int, weights: Sequence[float]) -> int:
    """CPU memory that the gradients of all batches take, in bytes."""
    numbers = sum(parameter.numel() for parameter in policy.trainable_parameters())
    return batches * (1 + len(weights)) * numbers * _FLOAT32_BYTES


def check_batches(batches: int, prompts_per_step: int) -> None:
    """Refuse fewer batches than an interval needs."""
    if batches < FEWEST_BATCHES:
        raise ConfigError(
            f"--gradient compares the gradients of whole batches, and the prompts make {batches} "
            f"of rollout.prompts_per_step = {prompts_per_step}: an interval needs at least "
            f"{FEWEST_BATCHES}, and more make it narrower; set --prompts "
            f"{FEWEST_BATCHES * prompts_per_step} or more (with fewer prompts in the file, lower "
            "rollout.prompts_per_step)"
        )


def check_memory(needed: int, free: int | None, *, batches: int) -> None:
    """Refuse gradients that take too much of the CPU memory.

    Args:
        needed: Bytes of the gradients.
        free: Free bytes; None if unknown.
        batches: For how many batches.
    """
    if free is None or needed <= _MOST_MEMORY * free:
        return
    remedies = []
    fewer = math.floor(batches * _MOST_MEMORY * free / needed)
    if fewer >= FEWEST_BATCHES:
        remedies.append(f"lower --prompts to {fewer} x rollout.prompts_per_step")
    remedies.append("train an adapter (model.adapter), or leave out --gradient")
    raise ConfigError(
        f"--gradient keeps the gradients of {batches} batches in CPU memory, which takes "
        f"{describe_bytes(needed)}: it must not be more than half of the "
        f"{describe_bytes(free)} that are free; {', '.join(remedies)}"
    )


def with_advantage(config: Config, **changes: Any) -> Config:
    """The config with other values in its section `advantage`."""
    return config.model_copy(update={"advantage": config.advantage.model_copy(update=changes)})


class GradientProbe:
    """Measures gradients with credit by image and by place, from the same experience.

    All gradients are kept in CPU memory, because every pair of batches is compared.

    Args:
        models: Policy that samples and is replayed.
        config: Settings of the run; the credit is replaced by each that is compared.
        weights: Values of `advantage.reward_to_go`, with the config's among them; empty: only
            credit by image is measured.
    """

    def __init__(self, models: Models, config: Config, weights: Sequence[float]) -> None:
        self._models, self._train, self._weights = models, config.train, tuple(weights)
        self._has_learned = config.model.start_from is not None
        by_place = [with_advantage(config, credit="place", reward_to_go=each) for each in weights]
        self._ways = [with_advantage(config, credit="image"), *by_place]
        self._trained = 0
        if weights and config.advantage.credit == "place":
            self._trained = 1 + self._weights.index(config.advantage.reward_to_go)
        self._has_places = False
        self._gradients: list[list[Gradient]] = []
        """By batch, then by way."""
        self._products: dict[tuple[int, int], Float64[Tensor, "K K"]] = {}
        """Between two batches, the later one first."""
        self._prompts = 0

    @property
    def credit(self) -> Literal["image", "place"]:
        """Credit with which the experience is to be collected."""
        return "place" if self._weights else "image"

    def add(self, experience: Experience) -> None:
        """Compute the gradients of a batch; where no score has places, one serves for all.

        Args:
            experience: Collected with `credit`.

        Raises:
            NonFiniteError: A gradient is not finite.
            MemoryLimitError: Memory ran out; the message names phase, size and remedy.
        """
        table = experience.scores
        weights = dict(zip(table.names, table.weights.tolist(), strict=True))
        # Of a custom function, nobody knows it before.
        has_places = any(weights[name] for name in table.score_map)
        gradients = self._gradients_of(experience, self._ways if has_places else self._ways[:1])
        gradients += gradients[:1] * (len(self._ways) - len(gradients))
        batch = len(self._gradients)
        products = {
            (batch, other): _inner_products(gradients, theirs)
            for other, theirs in enumerate([*self._gradients, gradients])
        }
        if not all(bool(found.isfinite().all()) for found in products.values()):
            raise NonFiniteError(
                f"--gradient: a gradient of batch {batch + 1} is not finite, so a run would skip "
                "its update; check the rewards and the model's dtype"
            )
        # Only now, so that an interrupted batch counts as none.
        self._products |= products
        self._gradients.append(gradients)
        self._prompts = len(experience.totals)
        self._has_places |= has_places

    def _gradients_of(self, experience: Experience, ways: Sequence[Config]) -> list[Gradient]:
        policy, rows = self._models.policy, self._train.micro_batch_size
        gradients, places = [], policy.token_places(experience.prompts)
        with self._models.phase("update", describe_replay(experience.prompts, policy, rows)):
            for config in ways:
                by_place = config.advantage.credit == "place"
                credited = with_advantages(experience, config, places if by_place else None)
                gradients.append(
                    policy_gradient(
                        policy,
                        credited,
                        config.loss,
                        self._train,
                        loss_scale=LossScale.for_dtype(policy.dtype),
                    )
                )
        return gradients

    def report(self) -> ProbedGradient | None:
        """The comparison; None if it was interrupted before there were enough batches."""
        batches, ways = len(self._gradients), len(self._ways)
        if batches < FEWEST_BATCHES:
            return None
        products = torch.zeros(ways, ways, batches, batches, dtype=torch.float64)
        for (first, second), found in self._products.items():
            products[:, :, first, second] = found
            products[:, :, second, first] = found.T
        by_image, *by_place = compare_signals(products)
        compared = dict(zip(self._weights, by_place, strict=True))
        return ProbedGradient(
            agreement=measure_agreement(products[self._trained, self._trained]),
            by_image=by_image,
            by_place=compared if self._has_places else {},
            batches=batches,
            prompts=self._prompts,
            has_learned=self._has_learned,
        )


def _inner_products(
    first: Sequence[Gradient], second: Sequence[Gradient]
) -> Float64[Tensor, "K K"]:
    products = [
        # One tensor after the other: float32 sums over all parameters would lose digits.
        math.fsum(
            torch.dot(mine.flatten(), theirs.flatten()).item()
            for mine, theirs in zip(own, other, strict=True)
        )
        for own, other in itertools.product(first, second)
    ]
    return torch.tensor(products, dtype=torch.float64).view(len(first), len(second))
