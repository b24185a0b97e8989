from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf.errors import InterpolationKeyError

from glm_grpo import terminal as present
from glm_grpo.config import compose_config
from glm_grpo.errors import DataError, ModelError
from glm_grpo.terminal import announce_checks, errors_explained, run_hydra_application
from rewards.types import RewardError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("line 3 is empty"), 2),
        (ModelError("no weights"), 1),
        (RewardError("ocr failed"), 1),
        (ConfigCompositionException("Could not override"), 2),
        (InterpolationKeyError("no such key"), 2),
    ],
)
def test_expected_errors_end_with_their_message_and_exit_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught, errors_explained("a test"):
        raise error
    assert caught.value.code == code
    printed = capsys.readouterr().err
    assert str(error) in printed
    assert "Traceback" not in printed


def test_ctrl_c_ends_as_in_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, errors_explained("a test"):
        raise KeyboardInterrupt
    assert caught.value.code == 130
    assert capsys.readouterr().err == "Interrupted.\n"


@pytest.fixture
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where tracebacks go."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_a_defect_ends_in_two_lines_and_its_traceback_is_kept_for_its_owner_alone(
    temporary_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught, errors_explained("glm-grpo plan"):
        raise KeyError("a-key")
    assert caught.value.code == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("Unexpected error in glm-grpo plan: KeyError: ")
    (kept,) = temporary_folder.iterdir()
    assert str(kept) in second
    assert kept.stat().st_mode & 0o077 == 0
    trace = kept.read_text()
    assert "Traceback (most recent call last)" in trace
    assert Path(__file__).name in trace


def test_a_defect_where_no_file_can_be_written_prints_its_traceback(
    temporary_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    temporary_folder.rmdir()
    with pytest.raises(SystemExit), errors_explained("glm-grpo plan"):
        raise KeyError("defect")
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_developer_gets_the_traceback_of_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(present, "_IS_TRACEBACK_PRINTED", True)
    with pytest.raises(KeyError, match="defect"), errors_explained("a test"):
        raise KeyError("defect")


def test_a_current_folder_that_is_gone_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(SystemExit) as caught, errors_explained("a test"):
        pass
    assert caught.value.code == 2
    assert "the current folder does not exist" in capsys.readouterr().err


def test_windows_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as caught, errors_explained("a test"):
        pass
    assert caught.value.code == 2
    assert "Windows is not supported; work in its Linux" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["folder", "word"])
def test_bytes_that_are_not_utf8_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    path = tmp_path / os.fsdecode(b"run-\xff")
    if place == "folder":
        path.mkdir()
        monkeypatch.chdir(path)
    else:
        monkeypatch.setattr(sys, "argv", ["glm-grpo", "rescore", str(path)])
    with pytest.raises(SystemExit) as caught, errors_explained("a test"):
        pass
    assert caught.value.code == 2
    assert f"'{tmp_path}/run-\\xff' is not UTF-8" in capsys.readouterr().err


def test_names_that_are_not_read_as_utf8_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    with pytest.raises(SystemExit) as caught, errors_explained("a test"):
        pass
    assert caught.value.code == 2
    assert "are read as ascii here" in capsys.readouterr().err


def test_run_hydra_application_explains_what_the_application_raises(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def application() -> None:
        raise ConfigCompositionException(
            "Could not override 'optim.lerning_rate'.\n"
            "To append to your config use +optim.lerning_rate=1"
        )

    with pytest.raises(SystemExit):
        run_hydra_application(application)
    assert "did you mean optim.learning_rate?" in capsys.readouterr().err
    assert "HYDRA_FULL_ERROR" not in os.environ


def test_a_command_whose_reader_is_gone_ends_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "glm_grpo", "--help"]
    # With a buffer, it is written when the interpreter ends.
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    ended = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, env=buffered, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_nothing_heavy_is_imported_before_hydra_reads_the_command_line() -> None:
    # What train.py imports at its top, and what Hydra makes before it calls it.
    modules = "glm_grpo.terminal", "glm_grpo.training.interrupt", "glm_grpo.commands.sweep"
    program = f"import hydra, sys, {', '.join(modules)}; print(*sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not {"torch", "numpy", "transformers", "pyarrow"} & {*ended.stdout.split()}


def test_announce_checks_says_what_a_config_has(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    changes = ["run.name=larger groups", "model.path='a\x1b[31m'", "ssim=null"]
    config = compose_config(None, None, changes)
    announce_checks(config)
    said = (
        r"checking: run larger groups, model a\x1b[31m, prompts tiny:train, "
        "terms lpips ocr aesthetic"
    )
    assert caplog.messages == [said]
    # Of several processes, one says it.
    monkeypatch.setenv("RANK", "1")
    announce_checks(config)
    assert caplog.messages == [said]
