"""`train.py` as a user runs it: mistakes that are found before a model is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


def run_train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(folder, str(ROOT / "train.py"), *arguments)


def run_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
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
        (["--config-name", "tyni"], "config 'tyni'. Did you mean tiny? There are glm_image_16gb, "),
        (["--config-dir", "cofigs"], "There is no folder of configs "),
        (["hydra.run.dir=/dev/null/run"], "/dev/null/run: Not a directory; name a folder"),
        (["hydra.run.dir=.", "hydra.sweep.dir=/dev/null/x", "-m"], "/dev/null/x: Not a directory"),
    ],
    ids=[
        "unknown key",
        "wrong type",
        "a sweep out of range",
        "unknown config",
        "unknown folder",
        "no folder",
        "-m",
    ],
)
def test_train_refuses_with_exit_code_2_and_no_traceback(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = run_train(tmp_path, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    # Which run of a sweep it was, Hydra says.
    assert ("Error executing job" in result.stderr) == ("train.seed=0,1" in arguments)
    assert not (tmp_path / "outputs").exists()


def test_the_train_command_trains_by_a_folder_of_ones_own_from_any_folder(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.yaml").write_text(
        "defaults: [tiny, _self_]\ndata: {path: '${config_dir:}/a.txt'}\n"
        "reward: {terms: {mine: {kind: custom, weight: 1, function: 'a:b'}}}\n"
    )
    words = ("-m", "glm_grpo", "train", "--config-dir", str(own))
    shown = run_python(tmp_path, *words, "ocr=0.7", "mine=0.2", "--cfg", "job", "--resolve")
    assert shown.returncode == 0, shown.stderr
    config = yaml.safe_load(shown.stdout)
    assert config["data"]["path"] == f"{own}/a.txt"
    assert {name: term["weight"] for name, term in config["reward"]["terms"].items()} == {
        **{"lpips": 0.4, "ssim": 0.2, "ocr": 0.7, "aesthetic": 0.1, "mine": 0.2}
    }
    refused = run_python(own, *words, "-m", "ocr=0.1,0.3", "rollout.group_size=1")
    assert refused.returncode == 2
    assert "nothing to be compared with" in refused.stderr
    assert "Traceback" not in refused.stderr


NOT_UTF_8 = "caf\udce9"
"""b'caf\\xe9', as Python hands on a name that is not UTF-8."""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train.py", f"run_dir={NOT_UTF_8}"], "'run_dir=caf\\udce9' is not UTF-8; "),
        (["train.py", f"hydra.run.dir={NOT_UTF_8}"], "'hydra.run.dir=caf\\udce9' is not UTF-8; "),
        (["train.py", f"data.path={NOT_UTF_8}.txt"], "'data.path=caf\\udce9.txt' is not UTF-8; "),
        (["train.py", "--config-name", NOT_UTF_8], "primary config 'caf\\udce9'"),
        (["train.py", "--config-dir", NOT_UTF_8], "no folder of configs"),
        (
            ["check", "--config-dir", NOT_UTF_8],
            "argument --config-dir: 'caf\\udce9' must be UTF-8, ",
        ),
        (["gallery", NOT_UTF_8], "argument RUN: 'caf\\udce9' must be UTF-8, "),
        (["compare", "good", NOT_UTF_8], "argument RUN: 'caf\\udce9' must be UTF-8, "),
        (["export", "good", NOT_UTF_8], "argument DIR: 'caf\\udce9' must be UTF-8, "),
        (["eval", "x" * 300], " must have at most 255 bytes between"),
        (
            ["rescore", "/".join(["x" * 99] * 50)],
            " must have at most 4095 bytes",
        ),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_a_name_that_cannot_be_written_down_is_refused(
    tmp_path: Path, arguments: list[str], told: str
) -> None:
    program, *others = arguments
    start = [str(ROOT / program)] if program == "train.py" else ["-m", "glm_grpo.cli", program]
    result = run_python(tmp_path, *start, *others)
    assert result.returncode == 2
    assert told in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "program", [(str(ROOT / "train.py"),), ("-m", "glm_grpo.cli", "gallery", "run")]
)
def test_a_current_folder_that_cannot_be_written_down_is_refused(
    tmp_path: Path, program: tuple[str, ...]
) -> None:
    folder = tmp_path / NOT_UTF_8
    folder.mkdir()
    result = run_python(folder, *program)
    assert result.returncode == 2
    assert "the current folder is " in result.stderr
    assert "caf\\udce9', whose path must be UTF-8" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "program",
    [
        (str(ROOT / "train.py"),),
        ("-m", "glm_grpo.cli", "check", "--config-dir", str(ROOT / "configs")),
    ],
    ids=["train.py", "glm-grpo check"],
)
@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (("rollout.group_size=1",), "nothing to be compared with"),
        (("data.path=promts.txt",), "data.path: promts.txt: no such file or folder in "),
    ],
    ids=["a key", "a file"],
)
def test_a_mistake_in_the_config_waits_for_no_library_of_a_model(
    tmp_path: Path, program: tuple[str, ...], mistake: tuple[str, ...], said: str
) -> None:
    result = run_python(tmp_path, "-X", "importtime", *program, *mistake)
    assert said in result.stderr
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "pydantic" in imported
    assert not imported & {"accelerate", "diffusers", "peft", "transformers"}
