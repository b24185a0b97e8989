"""`glm-grpo gallery`, as a user calls it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import urllib.request
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from glm_grpo import cli

ROOT = Path(__file__).parents[2]


def test_gallery_command_rebuilds_what_is_gone(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run.record_evaluation(0)
    run.record_step(1)
    run.record_evaluation(1)
    cli.main(["gallery", str(run.folder.path)])
    before = run.files(".")
    shutil.rmtree(run.gallery)

    cli.main(["gallery", str(run.folder.path)])

    assert run.files(".") == before
    assert capsys.readouterr().out == f"{run.folder.gallery_path}\n" * 2
    # The first evaluation against the last, with its interval.
    assert "95 %" in (run.gallery / "report.html").read_text()


def test_gallery_command_shows_a_run_that_lost_its_config(run: Any) -> None:
    run.record_step(1)
    run.folder.config_path.unlink()
    cli.main(["gallery", str(run.folder.path)])
    assert run.data("run")["problems"][0]["where"] == "config.yaml"


def test_gallery_command_shows_the_rest_where_an_evaluation_is_damaged(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run.record_evaluation(0)
    run.record_evaluation(1)
    run.folder.evaluation_path(0).write_bytes(b"PAR1")
    cli.main(["gallery", str(run.folder.path)])
    assert "no before and after: " in capsys.readouterr().err
    assert "problem" in run.data("evaluation-000000")
    assert "groups" in run.data("evaluation-000001")


def test_gallery_command_refuses_a_folder_without_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["gallery", str(tmp_path)])
    assert ended.value.code == 2
    assert "holds no run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_gallery_command_packs_the_run(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.record_step(1)
    path = tmp_path / "sent.zip"
    cli.main(["gallery", str(run.folder.path), "--zip", str(path)])
    assert capsys.readouterr().out.splitlines()[-1] == str(path)
    with zipfile.ZipFile(path) as archive:
        assert "run/gallery/data/run.js" in archive.namelist()
        assert "run/images/step-000001/kite-0.png" in archive.namelist()


def test_gallery_command_serves_until_ctrl_c(run: Any) -> None:
    run.record_step(1)
    arguments = ["-m", "glm_grpo.cli", "gallery", str(run.folder.path), "--serve", "--port", "0"]
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell starts what it runs in the background deaf to Ctrl-C, and so the tests' processes.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().decode().strip() for _ in range(2)]
        url = lines[1].removeprefix("listening on ")
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.read() == run.folder.gallery_path.read_bytes()
        os.kill(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=30)
    assert lines[0] == str(run.folder.gallery_path)
    assert (process.returncode, error) == (0, b"")
