"""The engine on two real processes: gradients of unequal parts, and launches that are refused."""

from __future__ import annotations

import re

import pytest
import torch
from accelerate.state import AcceleratorState

from glm_grpo.errors import ConfigError
from glm_grpo.terminal import exit_code
from glm_grpo.training.distributed.strategy import make_accelerator


@pytest.mark.parametrize("micro_batch_size", ["1", "3"])
def test_unequal_parts_in_micro_batches_give_the_update_of_the_whole_batch(found, micro_batch_size):
    whole = found[0]["alone"]
    parts = [each["team"][micro_batch_size] for each in found]

    expected = torch.tensor(whole["logits"])
    for part in parts:
        torch.testing.assert_close(torch.tensor(part["logits"]), expected, atol=1e-6, rtol=0)
        for report, other in zip(part["reports"], whole["reports"], strict=True):
            assert report == pytest.approx(other, abs=1e-6)
    # There was something to be equal in: clipped ratios, a KL, a gradient that was scaled down.
    last = whole["reports"][-1]
    assert last["ratio/clip_fraction"] > 0
    assert last["kl/reference"] > 0.1
    assert whole["reports"][0]["optim/grad_norm"] > 0.25


@pytest.mark.parametrize(
    ("micro_batch_size", "first", "second"),
    [
        # Four images in one process, two in the other; a single one stands in.
        ("1", [1, 1, 1, 1], [1, 1, 1, 1]),
        ("3", [3, 1], [2, 1]),
    ],
)
def test_processes_replay_equally_often(found, micro_batch_size, first, second):
    replayed = [each["team"][micro_batch_size]["replayed"] for each in found]
    assert replayed == [first * 3, second * 3]


@pytest.mark.parametrize(
    ("launch", "told"),
    [
        ("accumulation", "gradient_accumulation_steps is 4"),
        ("bf16 without shards", "mixed_precision is bf16.*model.dtype"),
        ("fp8", "mixed_precision is fp8.*model.dtype"),
        ("shards of the first kind", "fsdp_version is 1"),
        ("DeepSpeed", "DEEPSPEED.*configs/accelerate/fsdp2.yaml"),
        ("models loaded by one", "fsdp_cpu_ram_efficient_loading is true"),
    ],
)
def test_launches_that_the_trainer_does_not_run_on_are_refused(found, launch, told):
    for each in found:
        assert re.search(told, each["refused"][launch])
    assert exit_code(ConfigError()) == 2


def test_shards_that_compute_in_bf16_keep_log_probs_and_gradients_in_fp32(found):
    for each in found:
        assert each["mixed"]["has shards"]
        assert each["mixed"]["types"] == ["torch.bfloat16", "torch.float32", "None"]


def test_a_mac_trains_on_its_cpu_because_apples_gpu_has_no_float64(monkeypatch):
    for place in ("torch.backends.mps.is_available", "accelerate.state.is_mps_available"):
        monkeypatch.setattr(place, lambda *_, **__: True)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        assert make_accelerator().device.type == "cpu"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
