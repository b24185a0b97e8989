"""Plans of runs on several processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from glm_grpo.cli import main
from glm_grpo.config import compose_config, effective_config
from glm_grpo.errors import ConfigError
from glm_grpo.models.find import FoundModel
from glm_grpo.models.planning import Parallelism
from glm_grpo.plan.memory import BatchShape, evaluation_batch, training_batch
from glm_grpo.plan.processes import refuse_for_processes
from glm_grpo.setup import memory
from glm_grpo.setup.prepared_run import prepare
from tests.plan.simple_planner import SimplePlanner

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = (
    "rollout.prompts_per_step=5",
    "rollout.group_size=2",
    "train.micro_batch_size=10",
    "rollout.height=64",
    "rollout.width=64",
)
ADAPTER = "model.adapter={rank: 8, alpha: 16.0}"
SHARDS = Parallelism(2, is_sharded=True)
MIXED = Parallelism(2, is_sharded=True, is_mixed=True)


def _compose(*overrides):
    return compose_config(CONFIGS, "tiny", [*SMALL, *overrides])


def test_sizes_are_those_of_the_process_with_most_prompts():
    # 5 prompts over 3 processes are 2, 2 and 1, of 2 images each.
    assert training_batch(_compose(), prompt_tokens=30, processes=3) == BatchShape(2, 2, 30)
    # An evaluation takes 10 // 3 images at once, a sample a prompt.
    evaluated = _compose("eval.samples_per_prompt=1")
    assert evaluation_batch(evaluated, prompt_tokens=30, processes=3) == BatchShape(3, 1, 30)


@pytest.mark.parametrize(
    ("overrides", "processes", "message"),
    [
        ((), Parallelism(6), "prompts_per_step is 5: .* 6 processes"),
        (("model.dtype=bfloat16",), Parallelism(), "dtype is bfloat16 .*model.dtype=float32"),
        (("model.dtype=bfloat16",), SHARDS, "dtype is bfloat16 .*fsdp2.yaml"),
        (("model.dtype=float16",), Parallelism(), "dtype is float16 .*model.dtype=float32"),
        ((ADAPTER, "model.dtype=float16"), MIXED, "dtype is float16.*model.dtype=bfloat16"),
        ((ADAPTER, "model.quantization=nf4"), SHARDS, "quantization is nf4: .*null"),
        (("eval.ema_decay=0.9",), SHARDS, "ema_decay is 0.9: .*null"),
    ],
    ids=[
        "more than prompts",
        "bf16 alone",
        "bf16 in shards",
        "fp16 alone",
        "fp16 in shards of bf16",
        "4 bits",
        "average",
    ],
)
def test_what_so_many_processes_cannot_run_is_refused(overrides, processes, message):
    with pytest.raises(ConfigError, match=message):
        refuse_for_processes(_compose(*overrides), processes)


def test_moments_stay_where_their_shards_are():
    config = _compose("offload=modules_and_optimizer")
    refuse_for_processes(config, SHARDS)
    used = effective_config(config, processes=2, is_sharded=True)
    assert used.config.offload == "modules"
    assert re.search("offload: modules .*modules_and_optimizer", used.note)
    assert effective_config(config).config == config


def test_processes_without_an_accelerator_share_the_memory_of_the_machine(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda _: 8 * 10**9)
    processes = Parallelism(4, on_machine=2)
    config = _compose("rollout.height=128", "rollout.width=128")
    device = torch.device("cpu")
    sources = [prepare(config).prompts.held_out]
    found = memory.check_fit(config, SimplePlanner(), sources, device, processes)
    assert re.search(r"4\.00 GB .*CPU memory.* 4 processes", found)


def test_plan_command_plans_each_of_several_processes(capsys, monkeypatch):
    planner = SimplePlanner()
    monkeypatch.setattr(FoundModel, "planner", lambda _: planner)
    arguments = ["plan", "--config-dir", str(CONFIGS), "--prompt-tokens", "30", "--cpu"]
    main([*arguments, "--processes", "2", "--sharding", "fsdp2", *SMALL])
    printed = " ".join(capsys.readouterr().out.split())
    assert "each of 2 processes" in printed
    main([*arguments, "--processes", "2", *SMALL])
    assert [each.is_sharded for each in planner.asked] == [True, False]
    assert {each.count for each in planner.asked} == {2}
    with pytest.raises(SystemExit) as refused:
        main([*arguments, "--processes", "6", *SMALL])
    assert refused.value.code == 2
