"""Who moves when, recorded with fakes; real moves are under the `gpu` marker."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from glm_grpo.models.offload import ModulePart, Offload, OptimizerPart


class RecordingPart:
    """Writes down its moves."""

    def __init__(self, name, moves):
        self.name, self.moves = name, moves

    def load(self):
        self.moves.append(f"+{self.name}")

    def evict(self):
        self.moves.append(f"-{self.name}")


@pytest.fixture
def moves():
    return []


@pytest.fixture
def offload(moves):
    names = ("vision", "policy", "decoder", "rewards", "reference", "optimizer")
    return Offload({name: RecordingPart(name, moves) for name in names})


def test_a_step_makes_room_before_it_brings_in(offload, moves):
    for phase in ("rollout", "decode", "reward", "update"):
        with offload.phase(phase):
            moves.append(phase)

    assert moves == [
        *("+policy", "rollout"),
        *("-policy", "+decoder", "decode"),
        *("-decoder", "+rewards", "reward"),
        *("-rewards", "+optimizer", "+policy", "+reference", "update"),
    ]


def test_vision_tower_is_there_while_source_images_are_read(offload, moves):
    for phase in ("sources", "rollout"):
        with offload.phase(phase):
            moves.append(phase)

    assert moves == ["+vision", "sources", "-vision", "+policy", "rollout"]


def test_what_the_next_phase_needs_stays(offload, moves):
    for phase in ("update", "rollout"):
        with offload.phase(phase):
            moves.append(phase)

    assert moves[-3:] == ["-optimizer", "-reference", "rollout"]


def test_residency_tells_what_it_moves(moves):
    offload = Offload({"rewards": RecordingPart("rewards", moves)})
    assert offload.moves("rewards")
    assert not offload.moves("decoder")
    offload.add("decoder", RecordingPart("decoder", moves))
    assert offload.moves("decoder")


def test_what_was_written_to_is_kept_whether_it_is_trained_or_not(monkeypatch):
    # On the CPU `to` makes no copy, as it does on the way to an accelerator.
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *a, **k: to(tensor, *a, **k).clone())
    reference, untouched = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
    untouched.requires_grad_(False)
    part = ModulePart([reference, untouched], device=torch.device("cpu"))
    kept, home = untouched.weight.clone(), untouched.weight.data_ptr()

    for value in (3.0, 5.0):
        part.load()
        assert untouched.weight.data_ptr() != home
        with torch.no_grad():
            for tensor in reference.state_dict().values():
                tensor.lerp_(torch.full_like(tensor, value), 1.0)
        part.evict()
        part.load()
        part.evict()
        assert (reference.weight == value).all()
        assert (reference.bias == value).all()
    assert torch.equal(untouched.weight, kept)
    assert untouched.weight.data_ptr() == home


@pytest.mark.gpu
def test_module_part_moves_weights_and_keeps_what_training_changed():
    device = torch.device("cuda")
    module = nn.Linear(4, 4)
    frozen = module.bias.requires_grad_(False)
    part = ModulePart([module], device=device)

    part.load()
    assert module.weight.device.type == frozen.device.type == "cuda"
    with torch.no_grad():
        module.weight.fill_(3.0)
    part.evict()

    assert module.weight.device.type == "cpu"
    assert module.weight.is_pinned()
    assert (module.weight == 3.0).all()
    part.load()
    assert (module.weight == 3.0).all()


@pytest.mark.gpu
def test_optimizer_part_moves_moments_and_leaves_the_step_counter():
    weight = nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    part = OptimizerPart(optimizer, device=torch.device("cuda"))

    part.evict()
    state = optimizer.state[weight]
    assert {value.device.type for value in state.values()} == {"cpu"}
    part.load()
    assert state["exp_avg"].device.type == "cuda"
    assert state["step"].device.type == "cpu"
