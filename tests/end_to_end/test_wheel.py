"""A wheel carries configs, prompts and weights, and trains in an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PROJECT = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "configs", "glm_grpo", "rewards")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    project = folder / "project"
    project.mkdir()
    for name in PROJECT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, project / name)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(folder))
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(project)], check=True)
    (path,) = folder.glob("*.whl")
    return path


def test_a_wheel_has_every_file_of_the_packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    packages = {
        path.relative_to(ROOT).as_posix()
        for package in ("glm_grpo", "rewards")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    configs = {f"glm_grpo/{path.relative_to(ROOT)}" for path in ROOT.glob("configs/**/*.yaml")}
    assert packages | configs <= inside


def test_a_wheel_in_an_empty_folder_trains(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    empty.mkdir()

    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", "glm_grpo", *words],
            cwd=empty,
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            check=False,
        )

    assert run("init", "my-run").returncode == 0
    small = ("rollout.prompts_per_step=1", "rollout.group_size=2", "eval.samples_per_prompt=1")
    quick = ("train.steps=1", "decode.steps=1", "trackers=[]", "run_dir=run")
    ended = run("train", "--config-dir", "my-run", *small, *quick)
    assert ended.returncode == 0, ended.stderr
    assert "held-out prompts, before and after" in ended.stdout
    assert (empty / "run" / "gallery" / "index.html").is_file()
