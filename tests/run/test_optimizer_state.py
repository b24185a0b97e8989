from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from glm_grpo.run.checkpoints import load_checkpoint, save_checkpoint
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.optimizer_state import load_optimizer, optimizer_to_tensors

MakeOptimizer = Callable[[nn.Module], Optimizer]


def make_model(size: int = 3) -> nn.Linear:
    model = nn.Linear(size, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
    return model


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        inputs = torch.sin(torch.arange(12.0).reshape(4, 3) + step)
        model(inputs).square().sum().backward()
        optimizer.step()


def two_groups(model: nn.Module) -> Optimizer:
    weight, bias = model.parameters()
    groups: list[dict[str, Any]] = [
        {"params": [weight]},
        {"params": [bias], "lr": 0.03, "betas": (0.5, 0.7)},
    ]
    return AdamW(groups, lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: Adam(model.parameters(), lr=0.01, amsgrad=True),
        lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9),
        two_groups,
    ],
    ids=["adam", "sgd", "adamw-two-groups"],
)
def test_optimizer_continues_as_if_never_stopped(make: MakeOptimizer, tmp_path: Path) -> None:
    model, resumed_model = make_model(), make_model()
    optimizer = make(model)
    train(model, optimizer, range(5))
    tensors, values = optimizer_to_tensors(optimizer)
    path = save_checkpoint(
        RunFolder(tmp_path),
        step=5,
        tensors={"policy": model.state_dict(), "optimizer": tensors},
        metadata={"optimizer": values},
    )

    checkpoint = load_checkpoint(path)
    resumed_model.load_state_dict(dict(checkpoint.tensors["policy"]))
    resumed = make(resumed_model)
    load_optimizer(resumed, checkpoint.tensors["optimizer"], checkpoint.metadata["optimizer"])
    assert resumed.param_groups[-1]["lr"] == optimizer.param_groups[-1]["lr"]

    train(model, optimizer, range(5, 10))
    train(resumed_model, resumed, range(5, 10))
    for parameter, twin in zip(model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(parameter, twin)


def test_load_optimizer_takes_the_learning_rate_of_the_state() -> None:
    source = Adam(make_model().parameters(), lr=0.125)
    target = Adam(make_model().parameters(), lr=0.5)
    load_optimizer(target, *optimizer_to_tensors(source))
    assert target.param_groups[0]["lr"] == 0.125


def test_optimizer_state_holds_nothing_but_tensors_and_json() -> None:
    model = make_model()
    optimizer = Adam(model.parameters(), lr=0.01)
    train(model, optimizer, range(1))
    tensors, values = optimizer_to_tensors(optimizer)
    assert sorted(tensors) == [
        f"state/{index}/{key}" for index in (0, 1) for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    assert json.loads(json.dumps(values))["groups"][0]["betas"] == [0.9, 0.999]


def test_load_optimizer_keeps_no_tensor_of_the_checkpoint() -> None:
    model = make_model()
    optimizer = Adam(model.parameters())
    train(model, optimizer, range(1))
    tensors, values = optimizer_to_tensors(optimizer)
    resumed = Adam(make_model().parameters())
    load_optimizer(resumed, tensors, values)
    # A checkpoint's tensors are its files, mapped; they are removed while the run goes on.
    given = {tensor.data_ptr() for tensor in tensors.values()}
    kept = [x for state in resumed.state.values() for x in state.values() if isinstance(x, Tensor)]
    assert len(kept) == 6
    assert not given & {tensor.data_ptr() for tensor in kept}
