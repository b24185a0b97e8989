from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError

from glm_grpo import terminal as present
from glm_grpo.errors import ConfigError, DataError, ModelError
from glm_grpo.terminal import announce_loading, errors_explained, run_hydra_application
from rewards.types import RewardError
from tests.programs import Programs


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


def test_a_current_folder_that_cannot_be_written_down_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as caught, errors_explained("a test"):
        pass
    assert caught.value.code == 2
    assert "caf\\udce9', whose path must be UTF-8" in capsys.readouterr().err


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


WRITER = """
import logging, os, sys
from glm_grpo.output import guard_output
from glm_grpo.terminal import errors_explained

kind, descriptor, place = sys.argv[1:]
if place == "gone":
    reader, target = os.pipe()
    os.close(reader)
else:
    target = os.open(place, os.O_WRONLY)
os.dup2(target, int(descriptor))
guard_output(is_run=kind == "run")
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s", force=True)
try:
    with errors_explained("a test"):
        for number in range(20_000):
            logging.info("line %d of the log", number)
        # As libraries do that hold the descriptor.
        os.write(1, b"written past Python")
        sys.stderr.write("done\\n")
finally:
    sys.stdout.flush()
"""
GOES_ON = "standard output takes no more ({}): the run goes on"


@pytest.mark.parametrize(
    ("kind", "place", "code", "said"),
    [
        ("run", "gone", 0, GOES_ON.format("Broken pipe")),
        ("run", "/dev/full", 0, GOES_ON.format("No space left on device")),
        ("command", "gone", 141, None),
        ("command", "/dev/full", 1, "StorageError: standard output cannot be written: No space"),
    ],
)
def test_output_that_nobody_takes_ends_a_command_in_order_and_no_run(
    programs: Programs, tmp_path: Path, kind: str, place: str, code: int, said: str | None
) -> None:
    ended = programs.run(tmp_path, "-c", WRITER, kind, "1", place)
    assert ended.returncode == code
    lines = ended.stderr.splitlines()
    assert ("done" in lines) == (code == 0)
    others = [line for line in lines if line != "done"]
    assert len(others) == bool(said)
    assert all(line.startswith(said or "") for line in others)


def test_messages_that_stderr_does_not_take_end_nothing(programs: Programs, tmp_path: Path) -> None:
    ended = programs.run(tmp_path, "-c", WRITER, "command", "2", "/dev/full")
    assert ended.returncode == 0
    assert "line 19999 of the log" in ended.stdout


def test_a_run_whose_output_was_closed_goes_on() -> None:
    # Python has no stream then, so that the process must begin so.
    program = 'exec "$0" -c "$1" run 2 /dev/null <&- >&-'
    words = ["bash", "-c", program, sys.executable, WRITER]
    ended = subprocess.run(words, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, b"")


def test_python_without_docstrings_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(present, "sys", SimpleNamespace(flags=SimpleNamespace(optimize=2)))
    with pytest.raises(ConfigError, match="started with -OO .*start it without, or with -O"):
        present.refuse_stripped_docstrings()


def test_nothing_heavy_is_imported_before_the_first_line_of_a_run() -> None:
    # What train.py imports at its top, and what Hydra makes before it calls it.
    modules = "glm_grpo.terminal", "glm_grpo.training.interrupt", "glm_grpo.commands.sweep"
    program = f"import hydra, sys, {', '.join(modules)}; print(*sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not {"torch", "numpy", "transformers", "pyarrow"} & {*ended.stdout.split()}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {
                "run": {"name": "larger groups"},
                "model": {"path": "tiny"},
                "data": {"path": "${oc.env:NOWHERE_SET}"},
                "reward": {"terms": {"ocr": {"weight": 1.0}, "ssim": None, "near": {"kind": "x"}}},
            },
            "loading: run larger groups, model tiny, terms ocr near",
        ),
        ({"model": {"path": "a\x1b[31m"}, "reward": 3}, "loading: model a\\x1b[31m"),
        ({"model": {"path": "???"}}, "loading: "),
    ],
)
def test_announce_loading_says_what_a_config_has(
    values: dict[str, object], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    announce_loading(OmegaConf.create(values))
    assert [record.getMessage() for record in caplog.records] == [said]


def test_announce_loading_is_for_one_process(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("RANK", "1")
    announce_loading(OmegaConf.create({"model": {"path": "tiny"}}))
    assert not caplog.records
