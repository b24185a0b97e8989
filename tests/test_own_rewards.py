"""A file of the user's called `rewards.py`, in the folder that Python searches first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text("def sharp(prompts, images): ...\n")
    return tmp_path


def test_it_does_not_hide_the_package_of_that_name(folder: Path) -> None:
    done = python(folder, "-m", "glm_grpo", "check", "train.steps=0")
    assert "train.steps = 0" in done.stderr
    assert "Traceback" not in done.stderr
    code = "import glm_grpo, rewards.types; print(rewards.__file__)"
    assert Path(python(folder, "-c", code).stdout.strip()).parent.name == "rewards"


def test_where_it_was_imported_first_its_name_is_said(folder: Path) -> None:
    done = python(folder, "-c", "import rewards, glm_grpo")
    assert f"{folder}/rewards.py " in done.stderr
