from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from glm_grpo.errors import StorageError
from glm_grpo.training.run_folder import shared_run_dir

ROOT = Path(__file__).resolve().parents[2]
PROCESS = """
import sys
from accelerate import PartialState
from glm_grpo.training.run_folder import shared_run_dir
state = PartialState(cpu=True)
try:
    print(shared_run_dir(sys.argv[1]))
finally:
    state.destroy_process_group()
"""


def test_shared_run_dir_creates_the_folder(tmp_path: Path) -> None:
    assert shared_run_dir(str(tmp_path / "outputs" / "today")) == tmp_path / "outputs" / "today"
    assert (tmp_path / "outputs" / "today").is_dir()


def test_shared_run_dir_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shared_run_dir("here") == tmp_path / "here"


def test_shared_run_dir_keeps_what_is_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    shared_run_dir(str(tmp_path))
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def test_shared_run_dir_refuses_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="set run_dir to another one"):
        shared_run_dir(str(tmp_path / "file"))


def run_two_processes(run_dirs: tuple[str, str]) -> list[subprocess.CompletedProcess[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, run_dir],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, run_dir in enumerate(run_dirs)
    ]
    results = []
    for process in processes:
        try:
            output, errors = process.communicate(timeout=200)
        finally:
            process.kill()
        results.append(
            subprocess.CompletedProcess(process.args, process.returncode, output, errors)
        )
    return results


def test_two_processes_agree_on_the_main_folder(tmp_path: Path) -> None:
    main, other = run_two_processes((str(tmp_path / "10-00-00"), str(tmp_path / "10-00-01")))
    assert main.stdout.strip() == str(tmp_path / "10-00-00")
    assert other.stdout == main.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["10-00-00"]


def test_two_processes_both_learn_of_a_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for result in run_two_processes((str(tmp_path / "file"), str(tmp_path / "elsewhere"))):
        assert result.returncode == 1
        assert "cannot be created" in result.stderr
