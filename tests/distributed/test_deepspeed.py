"""ZeRO-2 and ZeRO-3 against DDP on two real processes, and checkpoints across them."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import DeepSpeedPlugin
from safetensors.torch import load_file

from glm_grpo.errors import ConfigError
from glm_grpo.training.deepspeed_settings import refuse_unfit_zero
from glm_grpo.training.engine import make_accelerator

ROOT = Path(__file__).resolve().parents[2]

HAS_DEEPSPEED = find_spec("deepspeed") is not None

pytestmark = pytest.mark.timeout(900)

COPIES = {"ACCELERATE_USE_CPU": "true"}
ZERO_2 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
ZERO_3 = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
}
"""What `accelerate launch` sets for the files of configs/accelerate/."""

ADAPTERS = ("model.adapter={rank:4,alpha:8}", "model.gradient_checkpointing=true")


@pytest.fixture(scope="module")
def learn(tmp_path_factory):
    """Runs zero_processes.py, on two processes unless told otherwise; the folder it leaves."""
    if not HAS_DEEPSPEED:
        pytest.skip("deepspeed is not installed")

    def start(settings, *overrides, resumed="-", processes=2):
        folder = tmp_path_factory.mktemp("learnt")
        ends = [
            start_process(folder, rank, port, settings, processes, (str(resumed), *overrides))
            for port in [free_port()]
            for rank in range(processes)
        ]
        told = [each.communicate(timeout=600)[0] for each in ends]
        assert [each.returncode for each in ends] == [0] * processes, "\n".join(told)
        return folder

    return start


def start_process(folder, rank, port, settings, processes, arguments):
    inherited = {
        name: value for name, value in os.environ.items() if re.match("ACCELERATE_", name) is None
    }
    environment = {
        **inherited,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **settings,
    }
    script = Path(__file__).parent / "zero_processes.py"
    return subprocess.Popen(
        [sys.executable, str(script), str(folder), *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def copies(learn):
    return learn(COPIES)


@pytest.fixture(scope="module", params=["ZeRO-2", "ZeRO-3"])
def zero(request):
    return {"ZeRO-2": ZERO_2, "ZeRO-3": ZERO_3}[request.param]


@pytest.fixture(scope="module")
def shards(learn, zero):
    return learn(zero)


def figures_of(folder):
    return json.loads((folder / "figures.json").read_text())


def assert_same_figures(folder, expected):
    ours, theirs = figures_of(folder)["reports"], figures_of(expected)["reports"]
    for own, other in zip(ours, theirs, strict=True):
        assert own == pytest.approx(other, abs=1e-4, nan_ok=True)


def assert_same_checkpoint(folder, expected):
    """Weights to a hundredth of a learning rate, moments to a thousandth of their largest."""
    ours, theirs = (load_file(each / "policy.safetensors") for each in (folder, expected))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=1e-5, rtol=0, msg=name)
    ours, theirs = (load_file(each / "optimizer.safetensors") for each in (folder, expected))
    assert ours.keys() == theirs.keys()
    for name, moment in ours.items():
        scale = theirs[name].abs().max().item()
        torch.testing.assert_close(moment, theirs[name], atol=1e-3 * scale, rtol=0, msg=name)
    ours, theirs = (
        json.loads((each / "optimizer.json").read_text()) for each in (folder, expected)
    )
    assert ours == theirs


@pytest.mark.slow
def test_zero_gives_the_figures_and_the_checkpoint_of_copies(shards, copies):
    assert_same_figures(shards, copies)
    assert_same_checkpoint(shards, copies)
    # There was something to be equal in: each gradient was scaled down.
    norms = [figures_of(copies)["reports"][update]["grad_norm"] for update in (0, 2, 4)]
    assert min(norms) > 1


@pytest.mark.slow
def test_zero_makes_no_step_on_a_gradient_that_is_0_or_not_finite(shards):
    figures = figures_of(shards)
    assert figures["stepped"] == [0, 2, 4]
    assert [report["is_skipped"] for report in figures["reports"]] == [False] * 3 + [True, False]
    assert figures["reports"][1]["grad_norm"] == 0
    assert load_file(shards / "optimizer.safetensors")["state/0/step"] == 3


@pytest.mark.slow
def test_one_process_goes_on_from_zero(learn, shards, copies):
    after_shards = learn(COPIES, resumed=shards, processes=1)
    after_copies = learn(COPIES, resumed=copies, processes=1)
    assert_same_figures(after_shards, after_copies)
    assert_same_checkpoint(after_shards, after_copies)


@pytest.mark.slow
# The 640 numbers of an adapter do not divide among three processes.
@pytest.mark.parametrize("processes", [2, 3])
def test_zero_goes_on_from_copies(learn, zero, processes):
    adapters = learn(COPIES, *ADAPTERS)
    expected = learn(COPIES, *ADAPTERS, resumed=adapters)
    found = learn(zero, *ADAPTERS, resumed=adapters, processes=processes)
    assert_same_figures(found, expected)
    assert_same_checkpoint(found, expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_files_for_accelerate_say_what_is_tested_here(configs_dir, stage):
    settings = yaml.safe_load((configs_dir / f"accelerate/deepspeed_zero{stage}.yaml").read_text())
    assert settings["distributed_type"] == "DEEPSPEED"
    assert settings["mixed_precision"] == "no"
    assert settings["deepspeed_config"]["zero_stage"] == stage
    assert settings["deepspeed_config"]["zero3_init_flag"] is False


@pytest.mark.skipif(HAS_DEEPSPEED, reason="deepspeed is installed")
def test_a_launch_by_deepspeed_without_it_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ConfigError, match="DeepSpeed, which is not installed: pip install"):
        make_accelerator()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"zero_stage": 1}, "zero_stage is 1: it is 2 or 3 here"),
        ({"zero3_init_flag": True}, "zero3_init_flag is true: transformers would"),
        ({"gradient_clipping": 1.0}, "gradient_clipping is 1.0: gradients are clipped to optim."),
        ({"offload_optimizer_device": "cpu"}, "offload_optimizer_device is cpu: the trainer was"),
        ({"offload_param_device": "nvme"}, "offload_param_device is nvme: the trainer was not"),
    ],
)
def test_settings_of_deepspeed_that_the_trainer_has_others_for_are_refused(settings, told):
    good = {"zero_stage": 3, "zero3_init_flag": False}
    refuse_unfit_zero(DeepSpeedPlugin(**good))
    with pytest.raises(ConfigError, match=f"^accelerate's {told}"):
        refuse_unfit_zero(DeepSpeedPlugin(**good | settings))
