"""The state of a torch optimizer as plain tensors and JSON, so that nothing needs pickle."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from glm_grpo.errors import CheckpointError


def optimizer_to_tensors(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split the state of an optimizer (Adam, AdamW, SGD, ...) into tensors and JSON.

    Returns:
        Tensors named `state/<parameter>/<key>` or `group/<group>/<key>`, and the remaining values,
        which are JSON (a tuple, such as `betas`, becomes a list).
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
    """Put back what `optimizer_to_tensors` took out.

    Args:
        optimizer: Of the same class, over the same parameters in the same order and groups.
        tensors: As returned by `optimizer_to_tensors`, whole where the parameters are shards.
        values: As returned by `optimizer_to_tensors`.

    Raises:
        CheckpointError: The state belongs to other parameters or groups, or is malformed.
    """
    try:
        state = {int(parameter): dict(rest) for parameter, rest in values["state"].items()}
        groups = [_with_tuples(group, optimizer.defaults) for group in values["groups"]]
        for name, tensor in tensors.items():
            kind, index, key = name.split("/", maxsplit=2)
            entries = state[int(index)] if kind == "state" else groups[int(index)]
            entries[key] = tensor
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"The optimizer state of the checkpoint is not as this version writes it ({error!r}). "
            "Resume with the version that wrote it, or from another checkpoint."
        ) from error
    _check_shapes(optimizer, state)
    _cut_like_parameters(optimizer, state)
    try:
        _check_kinds(optimizer, groups)
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except ValueError as error:
        raise CheckpointError(
            f"The optimizer state does not fit: {error}. Resume with the configuration of the run."
        ) from error
    _own(optimizer)


def _check_kinds(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """`load_state_dict` takes any values, over which the first update would fail.

    Raises:
        ValueError: One is of another kind than the optimizer's own.
    """
    # Of another number of groups, torch itself says so.
    for index, (group, own) in enumerate(
        zip(groups, optimizer.state_dict()["param_groups"], strict=False)
    ):
        for key in sorted({"params"} | (group.keys() & own.keys())):
            if not _is_alike(group.get(key), own[key]):
                raise ValueError(f"groups.{index}.{key} is {group.get(key)!r:.80}")


def _is_alike(value: object, own: object) -> bool:
    if isinstance(own, (list, tuple)):
        return (
            isinstance(value, (list, tuple))
            and len(value) == len(own)
            and all(map(_is_alike, value, own))
        )
    if isinstance(own, (int, float)) and not isinstance(own, bool):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return False
        return abs(value) <= sys.float_info.max
    # Switches, that may be left to torch.
    return isinstance(value, (bool, type(own))) or value is None


def _own(optimizer: Optimizer) -> None:
    """Copies what torch took over as it was: tensors of a checkpoint are its files, mapped."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device.type == "cpu":
                state[key] = value.clone()


def _cut_like_parameters(optimizer: Optimizer, state: dict[int, dict[str, Any]]) -> None:
    """Where parameters are cut over processes, so is what belongs to each of their elements."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, entries in state.items():
        parameter = parameters[index]
        if not isinstance(parameter, DTensor):
            continue
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.ndim > 0:
                # Every process has the whole, so that none has to send it.
                entries[key] = distribute_tensor(
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


def _with_tuples(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no tuples: give back those that the optimizer's defaults have."""
    return {
        key: tuple(value) if isinstance(defaults.get(key), tuple) else value
        for key, value in group.items()
    }


def _check_shapes(optimizer: Optimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
    """`load_state_dict` counts parameters only; a wrong shape would fail later, or broadcast."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, entries in state.items():
        for key, value in entries.items():
            is_per_element = isinstance(value, Tensor) and value.ndim > 0
            if index >= len(parameters):
                raise CheckpointError(
                    f"The optimizer state is of parameter {index}, but there are only "
                    f"{len(parameters)}. Resume with the configuration of the run."
                )
            if is_per_element and value.shape != parameters[index].shape:
                raise CheckpointError(
                    f"The optimizer state {key} of parameter {index} has shape "
                    f"{tuple(value.shape)}, the parameter {tuple(parameters[index].shape)}. "
                    "Resume with the configuration of the run."
                )
