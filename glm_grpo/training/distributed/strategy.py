"""Distribute the policy over processes with accelerate: copies (DDP) or shards (FSDP2).

Rollouts, references and evaluations read full parameters without communicating, so that each
process may take its own time; replay and update use the wrapped network.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, parse_flag_from_env
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from glm_grpo.errors import ConfigError
from glm_grpo.grpo.loss_scale import LossScale
from glm_grpo.grpo.strategy import Strategy
from glm_grpo.models.adapted_policy import AdaptedPolicy
from glm_grpo.training.distributed.processes import Processes

T = TypeVar("T")

_FSDP2 = 2
_KNOWN_PRECISIONS = ("no", "fp16", "bf16")
_SUPPORTED = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.FSDP,
)


def make_accelerator() -> Accelerator:
    """Create the accelerator of this launch."""
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        # accelerate would first ask for the library.
        raise ConfigError(
            "accelerate was started for DEEPSPEED: the policy is trained with DDP or FSDP2; use "
            "configs/accelerate/fsdp2.yaml, which shards weights, gradients and moments as ZeRO-3 "
            "does"
        )
    asked_for = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if asked_for not in _KNOWN_PRECISIONS:
        # accelerate would ask for libraries that compute with it.
        raise _mixed_precision_error(asked_for)
    # The policy's buffers never change, and DDP would broadcast them at every forward pass, whose
    # number may differ between processes.
    accelerator = Accelerator(
        # Apple's GPU, which accelerate would choose, has no float64: sums and samples need it.
        cpu=torch.backends.mps.is_available(),
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    if accelerator.distributed_type not in _SUPPORTED:
        raise ConfigError(
            f"accelerate was started for {accelerator.distributed_type.value}: the policy is "
            "trained with DDP or FSDP2; use a file of configs/accelerate/"
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise ConfigError(
            f"accelerate's gradient_accumulation_steps is {accelerator.gradient_accumulation_steps}"
            ": a step always learns from all of its images, train.micro_batch_size at a time; "
            "leave it at 1"
        )
    plugin = _sharding(accelerator)
    if plugin is not None:
        _refuse_unfit(plugin, accelerator.mixed_precision)
        _keep_log_probs(plugin, accelerator.mixed_precision)
    elif accelerator.mixed_precision != "no":
        raise _mixed_precision_error(accelerator.mixed_precision)
    return accelerator


def _mixed_precision_error(mixed_precision: str) -> ConfigError:
    return ConfigError(
        f"accelerate's mixed_precision is {mixed_precision}: model.dtype sets the type that the "
        "policy samples and is replayed in, and both must be the same; use mixed_precision: no "
        "(only FSDP2 may use bf16, for weights kept in fp32)"
    )


def has_shards(accelerator: Accelerator) -> bool:
    """Whether the policy's weights are sharded over the processes."""
    return _sharding(accelerator) is not None


class AccelerateStrategy(Strategy):
    """Joins the processes of a run: nothing for one, DDP or FSDP2 for several.

    Args:
        policy: Policy to wrap; it replays through the wrapped network from then on.
    """

    def __init__(
        self, policy: AdaptedPolicy, accelerator: Accelerator, processes: Processes
    ) -> None:
        super().__init__(LossScale.for_dtype(policy.dtype))
        self._accelerator = accelerator
        self._processes = processes
        self.num_processes, self.rank = processes.count, processes.rank
        self._policy = policy
        self._wrapped: nn.Module = policy.network
        self._shards: list[FSDPModule] = []
        self._is_resharding = False
        plugin = _sharding(accelerator)
        if plugin is not None:
            self._wrapped = fsdp2_prepare_model(accelerator, policy.network)
            self._shards = [m for m in policy.network.modules() if isinstance(m, FSDPModule)]
            self._is_resharding = bool(plugin.reshard_after_forward)
            self._init_fsdp_root(policy)
        elif processes.count > 1:
            with warnings.catch_warnings():
                # torch renames the argument, but accelerate does not know the new name.
                warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
                self._wrapped = accelerator.prepare_model(policy.network, device_placement=False)
        policy.wrap(self._wrapped)

    def accumulation(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Wrap forward and backward pass of a micro-batch; the last one joins the gradients.

        With shards, every micro-batch joins them: full gradients would need the memory that
        sharding saves.
        """
        if is_last or self._shards or self._processes.count == 1:
            return nullcontext()
        context: AbstractContextManager[None] = self._accelerator.no_sync(self._wrapped)
        return context

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a scalar, times the loss scale."""
        self._accelerator.backward(loss * self.loss_scale.value)

    def clip_gradient(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Undo the loss scale, and clip the joined gradient; returns its L2 norm before."""
        self.loss_scale.unscale(parameters)
        norm = nn.utils.clip_grad_norm_(parameters, max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def gather(self, value: T) -> list[T]:
        """Every process's value, in rank order."""
        return self._processes.gather(value)

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Gather all parameters of the policy in this process; all processes enter together."""
        for module in self._shards:
            module.unshard()
            # A pass over part of the network must not shard it again.
            module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for module in self._shards:
                module.reshard()
                # The backward pass needs the root first, the others only later.
                is_cut = self._is_resharding and module is not self._shards[0]
                module.set_reshard_after_forward(is_cut, recurse=False)

    def policy_tensors(self) -> dict[str, Tensor]:
        """Trained tensors, gathered by `gather_full`; all processes must call this."""
        return self.gather_full(self._policy.state_tensors())

    def reference_tensors(self) -> dict[str, Tensor]:
        """Reference tensors that a checkpoint stores; shards hold none of them."""
        return self._policy.reference.tensors()

    def gather_full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather sharded tensors one after another; all processes must call this.

        Returns:
            The full tensors; if they were sharded, on the CPU and only in the main process.
        """
        gathered = {}
        for name, tensor in tensors.items():
            if not isinstance(tensor, DTensor):
                gathered[name] = tensor
                continue
            full = tensor.full_tensor()
            if self._processes.is_main:
                gathered[name] = full.cpu()
        return gathered

    def _init_fsdp_root(self, policy: AdaptedPolicy) -> None:
        """Run a pass that fixes the root: torch takes the first module that runs for it."""
        policy.run_network_once()
        for module in self._shards:
            # The pass leaves the root gathered, and an optimizer over full parameters moves no
            # shard.
            module.reshard()


def _sharding(accelerator: Accelerator) -> FullyShardedDataParallelPlugin | None:
    if accelerator.distributed_type == DistributedType.FSDP:
        return accelerator.state.fsdp_plugin
    is_asked_for = parse_flag_from_env("ACCELERATE_USE_FSDP")
    if not is_asked_for or accelerator.distributed_type != DistributedType.MULTI_CPU:
        return None
    # accelerate ignores FSDP on CPUs, though torch supports it there.
    if getattr(accelerator.state, "fsdp_plugin", None) is None:
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    return accelerator.state.fsdp_plugin


def _keep_log_probs(plugin: FullyShardedDataParallelPlugin, mixed_precision: str) -> None:
    """Keep log-probabilities and joined gradients in fp32; accelerate would round both."""
    if mixed_precision == "bf16":
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )


def _refuse_unfit(plugin: FullyShardedDataParallelPlugin, mixed_precision: str) -> None:
    if plugin.fsdp_version != _FSDP2:
        raise ConfigError(
            f"accelerate's fsdp_version is {plugin.fsdp_version}: rollouts gather whole weights "
            "and shard them again, which needs FSDP2; use fsdp_version: 2, as in "
            "configs/accelerate/fsdp2.yaml"
        )
    if plugin.cpu_ram_efficient_loading:
        raise ConfigError(
            "accelerate's fsdp_cpu_ram_efficient_loading is true: transformers would then load "
            "the frozen models (text encoder, scorers) empty on all processes but the first; set "
            "it to false, as in configs/accelerate/fsdp2.yaml"
        )
    if mixed_precision not in ("no", "bf16"):
        raise ConfigError(
            f"accelerate's mixed_precision is {mixed_precision}: FSDP2 computes in model.dtype or, "
            "with weights kept in fp32, in bf16; use no or bf16"
        )
