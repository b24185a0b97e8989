"""Convert the state of a torch optimizer to plain tensors and JSON, without pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def optimizer_to_tensors(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split the state of an optimizer (Adam, AdamW, SGD, ...) into tensors and JSON.

    Returns:
        Tensors named `state/<parameter>/<key>` or `group/<group>/<key>`, and the remaining values,
        which are JSON (tuples such as `betas` become lists).
    """
    state_dict = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {"state": {}, "groups": []}
    for parameter, state in state_dict["state"].items():
        values["state"][str(parameter)] = _split(state, f"state/{parameter}", tensors)
    for index, group in enumerate(state_dict["param_groups"]):
        values["groups"].append(_split(group, f"group/{index}", tensors))
    return tensors, values


def load_optimizer(
    optimizer: Optimizer, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> None:
    """Restore a state taken by `optimizer_to_tensors`.

    Args:
        optimizer: Optimizer of the same class, over the same parameters in the same order and
            groups.
        tensors: As returned by `optimizer_to_tensors`; full tensors even if the parameters are
            sharded.
        values: As returned by `optimizer_to_tensors`.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {int(index): dict(rest) for index, rest in values["state"].items()}
    groups = [dict(group) for group in values["groups"]]
    for name, tensor in tensors.items():
        kind, index, key = name.split("/", maxsplit=2)
        if kind == "state":
            state[int(index)][key] = _cut_like(parameters[int(index)], tensor)
        else:
            groups[int(index)][key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    # torch uses the given tensors as they are, and a checkpoint's tensors are memory-mapped files.
    for entries in optimizer.state.values():
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.device.type == "cpu":
                entries[key] = value.clone()


def _cut_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Shard a value like its parameter."""
    if not isinstance(parameter, DTensor) or value.ndim == 0:
        return value
    # Every process has the whole tensor, so none needs to send it.
    return distribute_tensor(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        src_data_rank=None,
    )


def _split(source: Mapping[str, Any], prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    rest = {}
    for key, value in source.items():
        if isinstance(value, Tensor):
            tensors[f"{prefix}/{key}"] = value
        else:
            rest[key] = value
    return rest
