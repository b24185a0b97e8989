"""The files of configs/accelerate, read as `accelerate launch` reads them."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env

from glm_grpo.models.glm_image.network import GlmImageNetwork
from tests.programs import Programs

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))

START = """
import json
from glm_grpo.training.distributed.strategy import has_shards, make_accelerator
accelerator = make_accelerator()
print(json.dumps([has_shards(accelerator), accelerator.mixed_precision]))
"""


def environment(name: str) -> dict[str, str]:
    """What the launcher gives its processes."""
    path = ROOT / "configs" / "accelerate" / f"{name}.yaml"
    typed = ["--config_file", str(path), "--main_process_port", "0", "train.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(typed))
    return prepare_multi_gpu_env(arguments)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_one_of_the_launchers(path: Path) -> None:
    # It refuses keys that it does not know.
    loaded = load_config_from_file(str(path))
    assert loaded.num_processes == 8
    assert loaded.num_machines == 1


@pytest.mark.parametrize(
    ("name", "expected"), [("ddp", [False, "no"]), ("fsdp2", [True, "bf16"])], ids=["ddp", "fsdp2"]
)
def test_a_file_brings_an_environment_that_the_trainer_takes(
    programs: Programs, tmp_path: Path, name: str, expected: list[object]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # As the only process, without an accelerator.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    cpu = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    inherited = {
        key: value
        for key, value in environment(name).items()
        if key in os.environ or re.match("ACCELERATE_|FSDP_", key)
    }
    env = {**inherited, **alone, **cpu, "MASTER_PORT": str(port)}
    started = programs.run(tmp_path, "-c", START, env=env)
    assert started.returncode == 0, started.stderr
    assert json.loads(started.stdout.splitlines()[-1]) == expected


def test_shards_are_put_together_layer_by_layer() -> None:
    loaded = load_config_from_file(str(ROOT / "configs" / "accelerate" / "fsdp2.yaml"))
    assert loaded.distributed_type == DistributedType.FSDP
    assert [loaded.fsdp_config["fsdp_transformer_layer_cls_to_wrap"]] == (
        GlmImageNetwork._no_split_modules
    )
