from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from glm_grpo import terminal
from glm_grpo.cli import main
from glm_grpo.commands.hydra_application import announce_checks
from glm_grpo.config import compose_config
from glm_grpo.errors import ConfigError, DataError, ModelError
from glm_grpo.terminal import errors_explained
from rewards.types import RewardError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("line 3 is empty"), 2),
        (ModelError("no weights"), 1),
        (RewardError("ocr failed"), 1),
    ],
)
def test_expected_errors_end_with_their_message_and_exit_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught, errors_explained("a test"):
        raise error
    assert caught.value.code == code
    assert capsys.readouterr().err == f"{type(error).__name__}: {error}\n"


def test_a_refusal_that_all_processes_share_is_printed_by_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as caught, errors_explained("a test"):
        raise ConfigError("train.steps = -1")
    assert (caught.value.code, capsys.readouterr().err) == (2, "")
    # Any other error may be its own.
    with pytest.raises(SystemExit), errors_explained("a test"):
        raise ModelError("no weights")
    assert "no weights" in capsys.readouterr().err


def test_ctrl_c_ends_as_in_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, errors_explained("a test"):
        raise KeyboardInterrupt
    assert caught.value.code == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_a_defect_ends_in_two_lines_and_its_traceback_is_kept_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as caught, errors_explained("glm-grpo plan"):
        raise KeyError("a-key")
    assert caught.value.code == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "glm-grpo plan: KeyError: " in first
    (kept,) = tmp_path.iterdir()
    assert str(kept) in second
    assert kept.stat().st_mode & 0o077 == 0
    trace = kept.read_text()
    assert Path(__file__).name in trace


def test_a_developer_gets_the_traceback_of_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_IS_TRACEBACK_PRINTED", True)
    with pytest.raises(KeyError, match="defect"), errors_explained("a test"):
        raise KeyError("defect")


def test_windows_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as caught, errors_explained("a test"):
        pass
    assert caught.value.code == 2
    assert "Windows" in capsys.readouterr().err


def test_a_command_whose_reader_is_gone_ends_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "glm_grpo", "--help"]
    # With a buffer, it is written when the interpreter ends.
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    ended = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, env=buffered, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_announce_checks_says_what_a_config_has(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    changes = ["run.name=larger groups", "model.path='a\x1b[31m'", "ssim=null"]
    config = compose_config(None, None, changes)
    announce_checks(config)
    (said,) = caplog.messages
    for named in ("larger groups", r"model a\x1b[31m", "tiny:train", "terms lpips ocr aesthetic"):
        assert named in said
    # Of several processes, one says it, and how many they are.
    monkeypatch.setenv("WORLD_SIZE", "2")
    announce_checks(config)
    monkeypatch.setenv("RANK", "1")
    announce_checks(config)
    assert caplog.messages == [said, f"{said}, processes 2"]


def test_a_command_that_fails_inside_another_program_does_not_end_it_later() -> None:
    before = threading.active_count()
    with pytest.raises(SystemExit):
        main(["gallery", "no-such-run"])
    assert threading.active_count() == before
