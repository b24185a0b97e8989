"""The reference of a policy: a frozen copy, or the same model with other adapters or none."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float32
from peft import PeftModel
from peft.utils import set_peft_model_state_dict
from torch import Tensor, nn
from typing_extensions import override

from glm_grpo.models.lora import adapter_tensors
from glm_grpo.models.network import PolicyNetwork

_NO_REFERENCE = "the policy keeps no reference, because loss.kl_coef was 0 when it was built"


class Reference:
    """No reference, of a network that is trained in full without a KL."""

    def modules(self) -> tuple[nn.Module, ...]:
        """The frozen copy; empty if there is none."""
        return ()

    def log_probs(self, sequences: Any) -> Float32[Tensor, "N T"]:
        """As `PolicyNetwork.log_probs`.

        Raises:
            RuntimeError: No reference was kept.
        """
        raise RuntimeError(_NO_REFERENCE)

    def equals_policy(self) -> bool:
        """Whether policy and reference have the same weights."""
        return False

    def mix(self, mix: float) -> None:
        """Move the reference towards the policy: mix * policy + (1 - mix) * reference.

        Adapters are mixed factor by factor. The first time, when the reference has no adapters yet,
        its change of the model becomes `mix` times the policy's.

        Raises:
            RuntimeError: No reference was kept.
        """
        raise RuntimeError(_NO_REFERENCE)

    def start_from_policy(self) -> None:
        """Take the weights that the policy starts with."""

    def tensors(self) -> dict[str, Tensor]:
        """Weights that a checkpoint has to store, named as in `AdaptedPolicy.state_tensors`.

        Empty while the reference is the model itself, and for full weights also while it is what
        the policy started from, which a resumed run reads again.
        """
        return {}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned."""


class FrozenCopy(Reference):
    """A copy of a network that is trained in full."""

    def __init__(self, network: PolicyNetwork[Any]) -> None:
        self._network = network
        self._copy = copy.deepcopy(network).requires_grad_(False)
        self._has_moved = False

    @override
    def modules(self) -> tuple[nn.Module, ...]:
        return (self._copy,)

    @override
    @torch.no_grad()
    def log_probs(self, sequences: Any) -> Float32[Tensor, "N T"]:
        return self._copy.log_probs(sequences)

    @override
    def equals_policy(self) -> bool:
        # Not state_dict(): FSDP2 would shard full parameters again.
        own = dict(self._network.named_parameters())
        return all(
            torch.equal(tensor, own[name].to(tensor.device))
            for name, tensor in self._copy.named_parameters()
        )

    @override
    @torch.no_grad()
    def mix(self, mix: float) -> None:
        own = self._network.state_dict()
        for name, tensor in self._copy.state_dict().items():
            tensor.lerp_(own[name].to(tensor.device), mix)
        self._has_moved = True

    @override
    def start_from_policy(self) -> None:
        self._copy.load_state_dict(self._network.state_dict())

    @override
    def tensors(self) -> dict[str, Tensor]:
        return dict(self._copy.state_dict()) if self._has_moved else {}

    @override
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors:
            self._copy.load_state_dict(tensors)
            self._has_moved = True


class OtherAdapters(Reference):
    """The same model with other adapters, at first with none."""

    def __init__(self, network: PolicyNetwork[Any], adapted: PeftModel) -> None:
        self._network, self._adapted = network, adapted
        self._tensors: dict[str, Tensor] = {}

    @override
    @torch.no_grad()
    def log_probs(self, sequences: Any) -> Float32[Tensor, "N T"]:
        if not self._tensors:
            with self._adapted.disable_adapter():
                return self._network.log_probs(sequences)
        own = {name: tensor.clone() for name, tensor in adapter_tensors(self._adapted).items()}
        set_peft_model_state_dict(self._adapted, self._tensors)
        try:
            return self._network.log_probs(sequences)
        finally:
            set_peft_model_state_dict(self._adapted, own)

    @override
    def equals_policy(self) -> bool:
        # Not `adapter_tensors`: FSDP2 would shard full parameters again.
        adapters = {
            name.replace(f".{self._adapted.active_adapter}.", "."): tensor
            for name, tensor in self._adapted.named_parameters()
            if "lora_" in name
        }
        if self._tensors:
            return all(
                torch.equal(tensor.cpu(), self._tensors[name]) for name, tensor in adapters.items()
            )
        return not any(tensor.any() for name, tensor in adapters.items() if "lora_B" in name)

    @override
    @torch.no_grad()
    def mix(self, mix: float) -> None:
        policy = self._policy_copy()
        if not self._tensors:
            self._tensors = {
                name: tensor.zero_() if "lora_B" in name else tensor
                for name, tensor in self._policy_copy().items()
            }
        for name, tensor in self._tensors.items():
            tensor.lerp_(policy[name], mix)

    @override
    def start_from_policy(self) -> None:
        self._tensors = self._policy_copy()

    @override
    def tensors(self) -> dict[str, Tensor]:
        return dict(self._tensors)

    @override
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors:
            self._tensors = {name: tensor.clone() for name, tensor in tensors.items()}

    def _policy_copy(self) -> dict[str, Tensor]:
        return {name: x.cpu().clone() for name, x in adapter_tensors(self._adapted).items()}
