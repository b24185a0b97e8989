"""The Slurm scripts, with stand-ins for Slurm and for the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from glm_grpo.config import compose_config

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "scripts" / "slurm").glob("*_node.sbatch"))
"""Those that start accelerate's launcher."""

OVERRIDES = ("--config-name", "glm_image_80gb", "data.path=a b.jsonl", "data.eval_path=held.jsonl")

PROGRAMS = {
    "srun": 'while [[ "$1" == --* ]]; do shift; done\nSLURM_NODEID=1 exec "$@"',
    # Ends as the script says, or by a signal, after which torch's launcher fails.
    "accelerate": 'printf "%s\\n" "$@" > launched.part && mv launched.part launched\n'
    'trap "echo got TERM >> signals; exit 1" TERM\n'
    'for _ in $(seq "${TENTHS}"); do sleep 0.1; done\nexit "${CODE}"',
    "scontrol": 'if [[ "$1" == show ]]; then printf "first\\nsecond\\n"\n'
    'else echo "$@" >> requeued; fi',
}

JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_CPUS_PER_TASK": "64",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "first,second",
}


@pytest.fixture
def start(tmp_path: Path):
    """Starts a script as Slurm does; its launcher ends after so many tenths of a second."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)

    def start(script: Path, *, code: int = 0, tenths: int = 0, **more: str) -> subprocess.Popen:
        own = {"PATH": f"{folder}:{os.environ['PATH']}", "CODE": str(code), "TENTHS": str(tenths)}
        return subprocess.Popen(
            ["bash", str(script), *OVERRIDES], cwd=tmp_path, env={**JOB, **own, **more}
        )

    return start


def launched(folder: Path) -> list[str]:
    """What the launcher was called with, once it was."""
    end = time.monotonic() + 30
    while not (folder / "launched").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    subcommand, *arguments = (folder / "launched").read_text().splitlines()
    assert subcommand == "launch"
    return arguments


def test_there_are_scripts_for_one_machine_and_for_several() -> None:
    assert [path.stem for path in SCRIPTS] == ["multi_node", "one_node"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_launches_what_exists(script: Path, start, tmp_path: Path) -> None:
    assert start(script).wait(30) == 0
    arguments, defaults, _ = _launch_arguments(launched(tmp_path))
    assert arguments.training_script == "train.py"
    assert (ROOT / arguments.training_script).is_file()
    assert defaults.num_machines == 1
    config_name, name, *overrides = arguments.training_script_args
    assert (config_name, name) == OVERRIDES[:2]
    config = compose_config(ROOT / "configs", name, overrides)
    assert config.data.path == "a b.jsonl"
    assert config.run_dir == "outputs/slurm/4711"
    assert config.train.resume == "auto"


def test_one_launcher_of_each_machine_meets_the_others_on_the_first(start, tmp_path: Path) -> None:
    assert start(ROOT / "scripts" / "slurm" / "multi_node.sbatch").wait(30) == 0
    arguments, _, _ = _launch_arguments(launched(tmp_path))
    assert (arguments.num_machines, arguments.num_processes, arguments.machine_rank) == (2, 16, 1)
    assert (arguments.main_process_ip, arguments.main_process_port) == ("first", 24711)
    assert arguments.same_network


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_signal_stops_the_run_once_and_puts_the_job_back(
    script: Path, start, tmp_path: Path
) -> None:
    job = start(script, tenths=300)
    launched(tmp_path)
    time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    assert job.wait(30) == 0
    assert (tmp_path / "signals").read_text() == "got TERM\n"
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_run_that_fails_is_not_put_back(script: Path, start, tmp_path: Path) -> None:
    assert start(script, code=3).wait(30) == 3
    assert not (tmp_path / "requeued").exists()


def _launch_arguments(typed: list[str]):
    """As the launcher reads them, whose files are named from the root of the project."""
    at = typed.index("--config_file") + 1
    typed[at] = str(ROOT / typed[at])
    return _validate_launch_command(launch_command_parser().parse_args(typed))
