"""A wheel, unpacked into an empty folder, trains: configs, prompts and weights travel with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "configs", "glm_grpo", "rewards")


def test_a_wheel_has_all_that_a_run_needs(tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    for name in PROJECT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, project / name)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(tmp_path))
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(project)], check=True)
    shutil.rmtree(project)
    (wheel,) = tmp_path.glob("*.whl")
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

    tree = {str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml")}
    inside = site / "glm_grpo"
    assert {str(path.relative_to(inside)) for path in inside.glob("configs/**/*")} >= tree
    assert run("init", "my-run").returncode == 0
    small = ("rollout.prompts_per_step=1", "rollout.group_size=2", "eval.samples_per_prompt=1")
    quick = ("train.steps=1", "decode.steps=1", "trackers=[]", "run_dir=run")
    ended = run("train", "--config-dir", "my-run", *small, *quick)
    assert ended.returncode == 0, ended.stderr
    assert "held-out prompts, before and after" in ended.stdout
    assert (empty / "run" / "gallery" / "index.html").is_file()
