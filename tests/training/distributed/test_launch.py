"""Processes that were started together are one run, or refused."""

from __future__ import annotations

import pytest

from glm_grpo.errors import ConfigError
from glm_grpo.training.distributed.launch import refuse_separate_processes

BY_ACCELERATE = {"ACCELERATE_DYNAMO_BACKEND": "NO", "MASTER_ADDR": "node1"}
BY_TORCHRUN = {"WORLD_SIZE": "16", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node1"}


@pytest.mark.parametrize(
    ("count", "environment", "message"),
    [
        # A file for GPUs on machines without any.
        (1, BY_ACCELERATE | BY_TORCHRUN, "WORLD_SIZE = 16.*ACCELERATE_USE_CPU=true"),
        (1, {"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE = 2"),
        # `srun -n2 python train.py`.
        (1, {"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS = 2.*--ntasks=1"),
        # `srun -n2 torchrun --nproc_per_node=8 train.py`: two times eight that do not meet.
        (
            8,
            {"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"},
            "SLURM_STEP_NUM_TASKS = 2.*--ntasks=1",
        ),
        # distributed_type: MULTI_CPU, num_machines: 2.
        (1, BY_ACCELERATE, "MULTI_CPU.*ddp.yaml"),
    ],
)
def test_processes_that_do_not_know_each_other_are_refused(count, environment, message) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse_separate_processes(count, environment)


@pytest.mark.parametrize(
    ("count", "environment"),
    [
        (1, {}),
        # scripts/slurm/multi_node.sbatch.
        (16, BY_ACCELERATE | BY_TORCHRUN | {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}),
        # A task for each process.
        (4, {"WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "4", "PMI_SIZE": "4"}),
        # One process in a batch script or in the shell of salloc.
        (1, {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}),
        # `srun --pty bash`.
        (1, {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PTY_PORT": "35123"}),
        # `accelerate launch` of one process.
        (1, {"ACCELERATE_DYNAMO_BACKEND": "NO"}),
        # `torchrun` of one.
        (1, {"WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}),
    ],
)
def test_one_run_is_not_refused(count, environment) -> None:
    refuse_separate_processes(count, environment)
