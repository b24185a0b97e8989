"""The policy on several processes through DeepSpeed: ZeRO-2 and ZeRO-3.

ZeRO-2 cuts gradients and the optimizer's state over the processes, ZeRO-3 the weights as well.
DeepSpeed clips and steps in one call. What an update decides in between is therefore said in what
its interface has: full gradients to measure, and a gradient that it makes no step on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation
from deepspeed.utils import (
    logger,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn
from torch.optim import Optimizer

from glm_grpo.glm_image.network import TokenSequences
from glm_grpo.glm_image.policy import Policy
from glm_grpo.training.team import Team


class ZeroEngine:
    """Joins the processes of a team; `glm_grpo.training.engine.TrainingEngine` on DeepSpeed.

    Args:
        policy: Holds its weights, the trained ones in float32; replays through DeepSpeed once
            `prepare` was called.
        accelerator: Of this launch, with the settings of its DeepSpeed plugin.
        team: Of this launch.
    """

    def __init__(self, policy: Policy, accelerator: Accelerator, team: Team) -> None:
        self._policy = policy
        self._accelerator = accelerator
        self._team = team

    def prepare(self, optimizer: Optimizer) -> Optimizer:
        """Cuts up the policy and an optimizer's state; called once, before anything else.

        Args:
            optimizer: Over the policy's trainable parameters, without state yet.

        Returns:
            What stands for it from then on.
        """
        plugin = self._accelerator.state.deepspeed_plugin
        parts = ZeroOptimizer(optimizer, self._team)
        self._deepspeed, *_ = deepspeed.initialize(
            model=self._policy.network,
            optimizer=optimizer,
            config={
                # An update cuts its batch itself.
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {
                    **plugin.deepspeed_config["zero_optimization"],
                    # It would replace torch's in all models, and rounds bf16 once more.
                    "memory_efficient_linear": False,
                },
            },
        )
        one = torch.zeros(1, 1, dtype=torch.long, device=self._accelerator.device)
        parts.start(self._deepspeed, TokenSequences(one, one + 1, one.expand(3, 1, 1), one, None))
        self._policy.wrap(self._deepspeed)
        self._optimizer = parts
        return parts

    @property
    def num_processes(self) -> int:
        """How many train together."""
        return self._team.size

    @contextmanager
    def accumulation(self, *, is_last: bool) -> Iterator[None]:
        """Around forward and backward pass of a micro-batch; gradients are joined by each."""
        self._deepspeed.set_gradient_accumulation_boundary(is_last)
        yield

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a scalar."""
        self._optimizer.has_gradient = True
        self._deepspeed.backward(loss)

    def clip_gradient(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Have the step scale the joined gradient down to an L2 norm; returns that before it."""
        self._deepspeed.optimizer.clip_grad = max_norm
        # DeepSpeed's own norm is known after its step alone.
        squares = [float(safe_get_full_grad(each).double().square().sum()) for each in parameters]
        return math.sqrt(sum(squares))

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every process's values, in the order of ranks."""
        return self._team.gather([*values])

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """All weights of the policy are in this process inside: entered by all processes alike."""
        if not self._deepspeed.zero_optimization_partition_weights():
            yield
            return
        with unwrap_model_for_generation(self._deepspeed):
            yield

    def policy_tensors(self) -> dict[str, Tensor]:
        """What training changes, put together; called by all alike.

        Returns:
            On the CPU, in the main process alone.
        """
        with self.whole_weights():
            tensors = self._policy.state_tensors() if self._team.is_main else {}
            return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of `ZeroOptimizer`, which puts them together itself."""
        return dict(tensors)


class ZeroOptimizer(Optimizer):
    """Stands for an optimizer that DeepSpeed cuts over the processes; has the state of a whole one.

    Args:
        inner: Over whole parameters, before it is cut, without state.
        team: Of this launch.
    """

    def __init__(self, inner: Optimizer, team: Team) -> None:
        self.has_gradient = False
        self._inner = inner
        self._team = team
        self._parameters = [each for group in inner.param_groups for each in group["params"]]
        # Shapes are all that is left of them in each process: no one is to use them for more.
        groups = [
            group | {"params": [nn.Parameter(each.to("meta")) for each in group["params"]]}
            for group in inner.param_groups
        ]
        super().__init__(groups, inner.defaults)

    def start(self, engine: DeepSpeedEngine, sequences: TokenSequences) -> None:
        """Makes its state, which takes an update: one by a gradient of 0, at a rate of 0.

        Args:
            engine: That has cut it.
            sequences: Anything the policy can score.
        """
        self._deepspeed = engine
        for group in self._inner.param_groups:
            group["lr"] = 0.0
        log_probs, _ = engine(*sequences)
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(0.0 * log_probs.sum())
        engine.step()
        for state in self._inner.state.values():
            state["step"].zero_()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Clips the gradient, moves the weights, forgets the gradient."""
        del closure
        for own, group in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(_without_parameters(own))
        self._deepspeed.step()
        self.has_gradient = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets a gradient that no step was made on."""
        del set_to_none
        if not self.has_gradient:
            return
        # DeepSpeed forgets gradients in its step alone, and makes none where one is not finite.
        first = self._parameters[0]
        size = math.ceil(safe_get_full_grad(first).numel() / self._team.size) * self._team.size
        level = logger.level
        # An update has said so itself, where it is a failure.
        logger.setLevel(logging.ERROR)
        safe_set_full_grad(first, torch.full((size,), math.nan))
        self._deepspeed.step()
        logger.setLevel(level)
        self.has_gradient = False

    def state_dict(self) -> dict[str, Any]:
        """As of an optimizer that is not cut; called by all alike.

        Returns:
            The state is on the CPU, in the main process alone.
        """
        own = next(iter(self._inner.state.values()))
        state = {}
        for index, parameter in enumerate(self._parameters):
            entries = {}
            for key, value in own.items():
                whole = value
                if value.ndim > 0:
                    whole = safe_get_full_optimizer_state(parameter, key)
                if self._team.is_main:
                    entries[key] = whole.to("cpu", copy=True)
            if self._team.is_main:
                state[index] = entries
        return super().state_dict() | {"state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of an optimizer that is not cut, which every process has."""
        for own, group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own.update(_without_parameters(group))
        for index, entries in state_dict["state"].items():
            for key, value in entries.items():
                if value.ndim > 0:
                    self._set(self._parameters[index], key, value)
                    continue
                for state in self._inner.state.values():
                    state[key].copy_(value)

    def _set(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        if not self._deepspeed.zero_optimization_partition_weights():
            safe_set_full_optimizer_state(parameter, value, key)
            return
        # The function for whole values knows none that do not divide evenly.
        size = math.ceil(value.numel() / self._team.size)
        padded = nn.functional.pad(value.flatten(), (0, size * self._team.size - value.numel()))
        safe_set_local_optimizer_state(parameter, padded.split(size)[self._team.rank], key)


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
