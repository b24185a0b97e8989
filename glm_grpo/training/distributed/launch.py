"""Check that processes started together belong to one run."""

from __future__ import annotations

from collections.abc import Mapping

from glm_grpo.errors import ConfigError

_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables in which torchrun, `accelerate launch` and MPI give the number of processes."""


def refuse_separate_processes(count: int, environment: Mapping[str, str]) -> None:
    """Refuse to run as one of several processes that do not know each other.

    Each of them would consider itself the whole run and write its folder.

    Args:
        count: Number of processes of the run, as this process knows it.
        environment: Environment variables, including the launcher's.
    """
    for name in _WORLD_SIZES:
        announced = int(environment.get(name, "1"))
        if announced > count:
            raise ConfigError(
                f"{name} = {announced}, but this process sees {count}: each would start a separate "
                "run. Start them with `accelerate launch --config_file "
                "configs/accelerate/ddp.yaml` or torchrun, on machines without GPUs with "
                f"ACCELERATE_USE_CPU=true; for a run with one process unset {name}"
            )
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    # With torchrun and accelerate, each task is a launcher; the number of groups counts them.
    joined = int(environment.get("GROUP_WORLD_SIZE", count))
    # With a pseudo-terminal, all tasks but one end at once.
    if tasks > joined and "SLURM_PTY_PORT" not in environment:
        raise ConfigError(
            f"SLURM_STEP_NUM_TASKS = {tasks}: srun started {tasks} tasks, but this one sees "
            f"{joined}: each would start a separate run. Let each start a launcher for all "
            "machines, as scripts/slurm/multi_node.sbatch does, or give srun --ntasks=1"
        )
    # When configured for several processes on CPUs, accelerate sets their master address and starts
    # one of them, without saying how many there are.
    is_part = "MASTER_ADDR" in environment and "WORLD_SIZE" not in environment
    if count == 1 and is_part and "ACCELERATE_DYNAMO_BACKEND" in environment:
        raise ConfigError(
            "`accelerate launch` was asked for several processes (it set MASTER_ADDR), but started "
            "only this one, as it does for distributed_type: MULTI_CPU or NO; use "
            "configs/accelerate/ddp.yaml, on machines without GPUs with ACCELERATE_USE_CPU=true"
        )
