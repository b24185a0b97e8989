"""`train.py` as a user runs it: mistakes that are found before a model is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optim.learning_rat=1"], "did you mean optim.learning_rate?"),
        (["rollout.group_size='8'"], "rollout.group_size = '8'"),
        (["-m", "train.seed=0,1", "rollout.group_size=1"], "nothing to be compared with"),
        (["--config-name", "small"], "Cannot find primary config 'small'"),
    ],
    ids=["unknown key", "wrong type", "a sweep out of range", "unknown config"],
)
def test_train_refuses_with_exit_code_2_and_no_traceback(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = run_train(tmp_path, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "outputs").exists()
