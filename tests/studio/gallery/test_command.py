"""`glm-grpo gallery`, as a user calls it."""

from __future__ import annotations

import os
import shutil
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm_grpo import cli
from tests.programs import Programs


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


def test_gallery_command_shows_the_rest_where_an_evaluation_is_damaged(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run.record_evaluation(0)
    run.record_evaluation(1)
    run.folder.evaluation_path(0).write_bytes(b"PAR1")
    cli.main(["gallery", str(run.folder.path)])
    assert "before and after cannot be compared: " in capsys.readouterr().err
    assert "problem" in run.data("evaluation-000000")
    assert "groups" in run.data("evaluation-000001")


def test_gallery_command_shows_a_run_that_cannot_be_written_to(
    run: Any,
    tmp_path: Path,
    make_read_only: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run.record_evaluation(1)
    cli.main(["gallery", str(run.folder.path)])
    before, sheet = run.files("."), tmp_path / "elsewhere.png"
    make_read_only(run.folder.path)
    capsys.readouterr()
    cli.main(["gallery", str(run.folder.path), "--sheet", str(sheet)])
    said = capsys.readouterr()
    assert said.out == f"{run.folder.gallery_path}\n{sheet}\n"
    assert "not writable" in said.err
    assert sheet.is_file()
    assert run.files(".") == before


def test_gallery_command_fails_where_no_gallery_is_there_and_none_can_be_written(
    run: Any, make_read_only: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run.record_step(1)
    make_read_only(run.folder.path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["gallery", str(run.folder.path)])
    assert ended.value.code == 1
    assert "Read-only file system" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("", "mine contains no run; give the folder of a run, such as outputs/DATE/TIME\n"),
        ("outputs/a/b/metrics.jsonl", "; the newest is outputs/a/b\n"),
        ("mine/c/metrics.jsonl", "; the newest is mine/c\n"),
        ("mine/config.yaml", "mine contains no run, only a config to start from; give "),
    ],
)
def test_gallery_command_refuses_a_folder_without_a_run(
    made: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    if made:
        Path(made).parent.mkdir(parents=True, exist_ok=True)
        Path(made).write_text("defaults: [tiny]\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["gallery", "mine"])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not Path("mine/gallery").exists()


def test_gallery_command_serves_until_ctrl_c(run: Any, tmp_path: Path, programs: Programs) -> None:
    run.record_step(1)
    command = ("gallery", str(run.folder.path), "--serve", "--port", "0")
    program = programs.start(tmp_path, "-m", "glm_grpo", *command)
    while "listening on " not in program.said():
        assert program.wait(0.05) is None, program.stderr.read_text()
    page, line = program.said().splitlines()
    with urllib.request.urlopen(line.removeprefix("listening on "), timeout=10) as answer:
        assert answer.read() == run.folder.gallery_path.read_bytes()
    os.kill(program.pid, signal.SIGINT)
    assert program.wait() == 0
    assert page == str(run.folder.gallery_path)
    assert program.stderr.read_text() == ""
