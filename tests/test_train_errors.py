"""`train.py` and `glm-grpo` as a user runs them: mistakes found before a model is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from glm_grpo.config import compose_config, to_yaml
from tests.programs import ROOT, Programs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ocr=high"], "reward.terms.ocr.weight = 'high'"),
        (["orc=0.5"], "did you mean ocr?"),
        (["optim.learning_rat=1"], "did you mean optim.learning_rate?"),
        (["--cofnig-dir", "my-run"], "--cofnig-dir"),
        (["-m", "train.seed=0,1", "rollout.group_size=1"], "rollout.group_size = 1"),
        (["-m", "orc=0.1,0.5"], "did you mean ocr?"),
        (["--config-name", "tyni"], "tyni: did you mean tiny?"),
        (["--config-dir", "cofigs"], "`glm-grpo init cofigs`"),
    ],
    ids=str,
)
def test_train_refuses_with_exit_code_2_and_no_traceback(
    programs: Programs, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = programs.run(tmp_path, str(ROOT / "train.py"), *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    # No run is announced before.
    assert "checking:" not in result.stdout
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "outputs").exists()


def test_the_config_of_a_run_is_as_quiet_as_one_of_the_package(
    programs: Programs, tmp_path: Path
) -> None:
    run = tmp_path / "a run"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(compose_config(None, None, [f"run_dir='{run}'"])))
    (run / "metrics.jsonl").touch()
    words = ("-m", "glm_grpo", "train", "train.steps=2", "--config-dir", str(run))
    refused = programs.run(tmp_path, *words)
    assert refused.stdout.startswith("checking: ")
    assert f"run_dir = '{run}'" in refused.stderr
    # No folder of Hydra's.
    assert [path.name for path in tmp_path.iterdir()] == ["a run"]
    assert {path.name for path in run.iterdir()} == {"config.yaml", "metrics.jsonl"}


def test_the_train_command_trains_by_a_folder_of_ones_own_from_any_folder(
    programs: Programs, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.yaml").write_text(
        "defaults: [tiny, _self_]\ndata: {path: '${config_dir:}/a.txt'}\n"
        "reward: {terms: {mine: {kind: custom, weight: 1, function: 'a:b'}}}\n"
    )
    words = ("-m", "glm_grpo", "train", "--config-dir", str(own))
    changes = ("ocr=0.7", "mine=0.2")
    shown = programs.run(tmp_path, *words, *changes, "--cfg", "job", "--resolve")
    assert shown.returncode == 0, shown.stderr
    config = yaml.safe_load(shown.stdout)
    assert config["data"]["path"] == f"{own}/a.txt"
    assert {name: term["weight"] for name, term in config["reward"]["terms"].items()} == {
        **{"lpips": 0.4, "ssim": 0.2, "ocr": 0.7, "aesthetic": 0.1, "mine": 0.2}
    }
    refused = programs.run(tmp_path, *words)
    assert refused.returncode == 2
    assert f"data.path: {own}/a.txt: " in refused.stderr


def test_a_mistake_in_the_config_waits_for_no_library_of_a_model(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / "train.py"), "data.path=promts.txt"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 2
    assert "data.path: promts.txt: " in result.stderr
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "pydantic" in imported
    assert not imported & {"accelerate", "diffusers", "peft", "transformers"}
