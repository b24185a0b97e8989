"""`train.py` as a user runs it: mistakes that are found before a model is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(folder, str(ROOT / "train.py"), *arguments)


def run_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
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
    # Which run of a sweep it was, Hydra says.
    assert ("Error executing job" in result.stderr) == ("-m" in arguments)
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    "program",
    [
        (str(ROOT / "train.py"),),
        ("-m", "glm_grpo.cli", "check", "--config-dir", str(ROOT / "configs")),
    ],
    ids=["train.py", "glm-grpo check"],
)
def test_a_mistake_in_the_config_waits_for_no_library_of_a_model(
    tmp_path: Path, program: tuple[str, ...]
) -> None:
    result = run_python(tmp_path, "-X", "importtime", *program, "rollout.group_size=1")
    assert "nothing to be compared with" in result.stderr
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "pydantic" in imported
    assert not imported & {"accelerate", "diffusers", "peft", "transformers"}
