"""The policy on several processes: what each of them holds of it, and puts together of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from glm_grpo.glm_image.meta_memory import measured_on_meta
from glm_grpo.glm_image.meta_models import PartConfigs
from glm_grpo.glm_image.phase_memory import (
    BatchSizes,
    ModelSettings,
    build_meta_policy,
    over_layers,
    replay_on_meta,
)
from glm_grpo.glm_image.policy import Policy

_FLOAT32, _HALF = 4, 2


@dataclass(frozen=True)
class Processes:
    """How a run is spread.

    Attributes:
        count: Of processes, >= 1; each samples and replays its part of the prompts.
        is_sharded: The policy's weights, gradients and moments are cut over them (FSDP2); else
            each holds a copy (DDP).
        is_mixed: Shards of what is trained are kept in fp32 whatever the model's type, and put
            together in 16 bits.
        on_machine: How many share the CPU memory of this machine, >= 1.
    """

    count: int = 1
    is_sharded: bool = False
    is_mixed: bool = False
    on_machine: int = 1


ONE_PROCESS = Processes()


@dataclass(frozen=True)
class ShardBytes:
    """What the policy takes in the process that has the largest part of it.

    Attributes:
        frozen: Of weights that are not trained.
        trained: Of those that are; of their gradients as much, of their moments twice.
        whole: Of all weights together, as they are computed with.
        layer: Of the largest layer.
        root: Of what is in no layer: embedding, head and the last norm.
        upcast: Of all weights in CPU memory before they are cut.
        widening: By which gradients grow on their way to the other processes: 1, or 2 where 16
            bits become 32.
    """

    frozen: int
    trained: int
    whole: int
    layer: int
    root: int
    upcast: int
    widening: int


@dataclass(frozen=True)
class UpdateBytes:
    """What the update phase takes besides weights that are always there.

    Attributes:
        gradients: Of what is trained.
        whole: Of weights and gradients that are together for a moment; 0 without shards.
        activations: Of replay.
    """

    gradients: int
    whole: int
    activations: int


def shard_bytes(policy: Policy, processes: Processes) -> ShardBytes:
    """How the policy is cut: along the first dimension of each weight, layer by layer.

    Args:
        policy: Whole, or without values.
        processes: That share it.
    """
    layers = [
        _whole_bytes(layer.parameters(), processes)
        for layer in policy.network.language_model.layers
    ]
    weights = [*policy.network.parameters()]
    whole = _whole_bytes(weights, processes)
    trained = [weight for weight in weights if weight.requires_grad]
    return ShardBytes(
        frozen=sum(
            _part_bytes(weight, processes) for weight in weights if not weight.requires_grad
        ),
        trained=sum(_part_bytes(weight, processes) for weight in trained),
        whole=whole,
        layer=max(layers),
        root=whole - sum(layers),
        upcast=sum(weight.numel() * _kept_bytes(weight, processes) for weight in weights),
        widening=_FLOAT32 // _HALF if processes.is_mixed else 1,
    )


def update_on_shards(shards: ShardBytes, *, scoring: int, backward: int) -> UpdateBytes:
    """The largest of three moments: reading the reference, a backward pass, and the end of that.

    While a layer's backward pass runs, the next layer's weights are fetched, and the gradients of
    the last one are on their way to the others. What is in no layer is whole from the forward pass
    on; its gradients leave at the end, when there are no activations any more.

    Source: torch.distributed.fsdp._fully_shard._fsdp_param_group, of torch 2.15.

    Args:
        shards: Of the policy.
        scoring: Activations without gradient.
        backward: Activations of a backward pass.
    """
    layer, root, on_their_way = shards.layer, shards.root, shards.widening
    in_flight = 2 * layer + layer + on_their_way * layer + root
    at_the_end = root + root + on_their_way * (root + layer)
    return max(
        (
            UpdateBytes(0, shards.whole, scoring),
            UpdateBytes(shards.trained, in_flight, backward),
            UpdateBytes(shards.trained, at_the_end, 0),
        ),
        key=lambda each: each.gradients + each.whole + each.activations,
    )


def backward_bytes(configs: PartConfigs, settings: ModelSettings, sizes: BatchSizes) -> int:
    """Most that replay and backward pass take where gradients leave as soon as they are made."""
    settings = replace(settings, needs_reference=False)

    def measure(layers: int) -> tuple[int, int]:
        _, policy = build_meta_policy(configs, settings, layers=layers)
        for parameter in policy.trainable_parameters():
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        with measured_on_meta() as memory:
            torch.autograd.backward(replay_on_meta(policy, sizes).sum())
        return memory.peak_bytes, 0

    return over_layers(configs, measure)[0]


def scoring_bytes(configs: PartConfigs, settings: ModelSettings, sizes: BatchSizes) -> int:
    """Most that replay takes without gradient, as the reference is read."""
    settings = replace(settings, needs_reference=False)

    def measure(layers: int) -> tuple[int, int]:
        _, policy = build_meta_policy(configs, settings, layers=layers)
        with measured_on_meta() as memory, torch.no_grad():
            replay_on_meta(policy, sizes)
        return memory.peak_bytes, 0

    return over_layers(configs, measure)[0]


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _part_bytes(weight: Tensor, processes: Processes) -> int:
    """Of the first process, whose part is the largest where rows cannot be shared out evenly."""
    rows = -(-weight.shape[0] // processes.count)
    return rows * weight[0].numel() * _kept_bytes(weight, processes)


def _kept_bytes(weight: Tensor, processes: Processes) -> int:
    is_kept_in_full = processes.is_mixed and weight.requires_grad
    return _FLOAT32 if is_kept_in_full else weight.element_size()


def _whole_bytes(weights: Iterable[Tensor], processes: Processes) -> int:
    return sum(
        weight.numel() * (_HALF if processes.is_mixed else weight.element_size())
        for weight in weights
    )
