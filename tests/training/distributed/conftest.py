"""Scripts that run in two real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def found_by_two_processes(tmp_path_factory):
    """Starts a script of this folder in two processes, each of which writes RANK.json."""

    def start(script):
        folder = tmp_path_factory.mktemp("found")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        cpu = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            [sys.executable, *launcher, str(Path(__file__).parent / script), str(folder)],
            cwd=ROOT,
            env={**os.environ, **cpu, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        paths = sorted(folder.glob("*.json"))
        assert len(paths) == 2, ended.stdout + ended.stderr
        return [json.loads(path.read_text()) for path in paths]

    return start
