"""Values of the command line: every option of every command, at and beyond its bounds."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from glm_grpo import cli
from glm_grpo.commands import arguments
from glm_grpo.commands.arguments import memory_size, parse_weights
from glm_grpo.errors import ConfigError
from glm_grpo.probe.command import WrittenProbe

LONG = "a" * 5000
NUMBERS = ("-1", "1.5", "1e400", "nan", "9" * 40, "9" * 5000, "many")

NEEDED = {"RUN": "no_run", "NAME": "ocr", "DIR": "new", "key=value": "no.such.key=1"}
"""By metavar, what a positional argument is given where another option is looked at: nothing is
loaded, sampled or served with it."""


def _commands() -> dict[str, argparse.ArgumentParser]:
    (choices,) = (
        action.choices for action in cli._parser()._actions if action.dest == "subcommand"
    )
    assert isinstance(choices, dict)
    return choices


def _options() -> Iterator[tuple[str, argparse.Action]]:
    """Every option and positional argument that takes a value, of every command."""
    for command, parser in _commands().items():
        for action in parser._actions:
            if action.nargs != 0:
                yield command, action


OPTIONS = [
    pytest.param(command, action, id=f"{command} {action.option_strings or action.metavar}")
    for command, action in _options()
]


def command_line(command: str, action: argparse.Action, value: str) -> list[str]:
    """The value for one argument of a command, and for the others what `NEEDED` has."""
    words = [command]
    for other in _commands()[command]._actions:
        if not other.option_strings:
            words.append(value if other.dest == action.dest else NEEDED[str(other.metavar)])
    # Behind the positional ones, of which it would swallow those to come.
    return [*words, action.option_strings[-1], value] if action.option_strings else words


def refusal_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert "Traceback" not in said
    assert "Unexpected error" not in said
    return said


def hostile_values(action: argparse.Action) -> Iterator[str]:
    """What no such argument can be."""
    yield from ("", "\0")
    if action.type is not arguments.word:
        yield LONG
    if isinstance(action.default, int) or action.type is memory_size:
        yield from NUMBERS
    if action.dest == "port":
        yield "65536"


@pytest.mark.parametrize(("command", "action"), OPTIONS)
def test_every_option_refuses_what_it_cannot_be_before_anything_begins(
    command: str,
    action: argparse.Action,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert action.type is not None, "it takes whatever is written"
    named = "/".join(action.option_strings) or str(action.metavar)
    for value in hostile_values(action):
        said = refusal_of(command_line(command, action, value), capsys)
        # By argparse, so before the command began.
        assert f"glm-grpo {command}: error: argument {named}: " in said
        assert len(said) < 3000
    assert list(tmp_path.iterdir()) == []


@settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(data=st.data())
def test_no_value_of_any_option_ends_in_a_traceback(
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
    configs_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # A folder that `init` may write to is no refusal.
    options = [each for each in _options() if each[1].dest != "directory" or each[0] != "init"]
    command, action = data.draw(st.sampled_from(options))
    value = data.draw(
        st.text(max_size=40)
        | st.integers().map(str)
        | st.floats().map(str)
        | st.sampled_from([*NUMBERS, LONG, "../" * 2000, "/dev/null/x", "a=1", "x.txt", "\x1b[2J"])
    )
    # Help is no refusal.
    assume(not value.startswith(("-h", "--h")))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("here"))
        words = command_line(command, action, value)
        is_composing = "--config-dir" in _commands()[command]._option_string_actions
        if is_composing and action.dest not in ("config_dir", "config_name"):
            words += ["--config-dir", str(configs_dir)]
        refusal_of(words, capsys)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["gallery", "run", "--sheet", "x.txt"], "'x.txt' must end in .png"),
        (["gallery", "run", "--zip", "x.tar.gz"], r"'x.tar.gz' must end in .zip"),
        (["gallery", "run", "--zip", "folder.zip"], "'folder.zip' is a folder; write the name"),
        (["gallery", "run", "--zip", "file/x.zip"], "needs a folder where .*/file is a file"),
        (["gallery", "run", "--port", "65536"], "'65536' must be a whole number from 0 to 65535"),
        (["compare", "a", "b", "--output", "file"], "'file' needs a folder where .*/file is a"),
        (["probe", "--noises", "1"], "--noises: '1' must be a whole number from 2 .* a spread"),
        (["probe", "--share", "ocr=1", "ocr=1"], "--share 'ocr=1': must be .* each term once"),
        (["plan", "--memory", "9" * 40 + "GB"], r"must be a number and a unit, 1e\+18 bytes at"),
        (["plan", "--prompt-tokens", "9" * 40], "whole number from 1 to 1000000; give the tokens"),
        (["serve-reward", "ocr", "--host", "a" * 64], "cannot be the name of a host"),
        (["export", "file/x", "file/y"], "needs a folder where .*/file is a file"),
    ],
)
def test_a_refused_value_comes_with_its_rule_and_remedy(
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.zip").mkdir()
    monkeypatch.chdir(tmp_path)
    assert re.search(told, refusal_of(words, capsys))


@pytest.mark.parametrize(("given", "meant"), [("trian", "train"), ("evaluate", "eval")])
def test_a_misspelt_command_is_told_the_one_that_was_meant(
    given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal_of([given, "--config-dir", "my-run"], capsys)
    assert f"there is no command '{given}': did you mean {meant}?" in said


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GB", 24 * 10**9), ("1.5 GiB", 3 * 2**29), ("7b", 7), ("2MB", 2_000_000), ("3KB", 3000)],
)
def test_memory_size_reads_a_number_and_a_unit(text: str, size: int) -> None:
    assert memory_size(text) == size


@pytest.mark.parametrize("text", ["24", "GB", "-1GB", "0GB", "24 XB", "1e3GB", ""])
def test_memory_size_refuses_what_is_not_a_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"{re.escape(repr(text))}.*KiB, MiB, GiB"):
        memory_size(text)


def test_parse_weights_reads_terms_and_numbers() -> None:
    words = ["lpips=0.4", "reward.terms.ocr.weight=-1e-1"]
    assert parse_weights(words, option="--weights") == {"lpips": 0.4, "ocr": -0.1}
    with pytest.raises(ConfigError, match=r"ocr\.weight=1': must be .* each term once"):
        parse_weights(["ocr=1", "reward.terms.ocr.weight=1"], option="--weights")
    assert parse_weights([], option="--share") == {}
    for size in ("1e-50", "-1e13"):
        with pytest.raises(ConfigError, match=f"ocr={size}': a weight must be 0, or of a size"):
            parse_weights([f"ocr={size}"], option="--weights")


def test_keys_may_stand_before_and_behind_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refusal_of(["plan", "train.stps=1", "--cpu", "train.seeed=2", "--memory", "1GB"], capsys)
    assert "train.stps" in said or "train.seeed" in said
    assert "unrecognized" not in said
    assert "unrecognized arguments: --cup" in refusal_of(["plan", "--cup"], capsys)


def test_a_weight_among_the_runs_of_compare_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seed=1").mkdir()
    # The folder of a run stays one, whatever its name looks like.
    said = refusal_of(["compare", "seed=1", "ocr=0.5"], capsys)
    assert "runs seed=1: a comparison needs at least two" in said
    assert "'ocr=much': must be the name of a term" in refusal_of(
        ["compare", "seed=1", "ocr=much"], capsys
    )


@pytest.mark.parametrize("word", ["ocr", "ocr=", "=0.5", "ocr=much", "ocr=nan", "ocr=inf", "a=1"])
def test_parse_weights_refuses_other_words(word: str) -> None:
    rule = rf"--share '{word}': must be the name of a term.*write --share lpips=0.4"
    with pytest.raises(ConfigError, match=rule):
        parse_weights(["a=1", word], option="--share")


def test_probe_prints_the_command_that_uses_the_proposed_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written = WrittenProbe([], ("ocr=0.057", "aesthetic=0.943"), tmp_path / "index.html")
    monkeypatch.setattr("glm_grpo.probe.command.probe_config", lambda *_, **__: written)
    cli.main(["probe", "--config-name", "tiny", "train.steps=3", "run.name=a b"])
    assert capsys.readouterr().out.splitlines()[0] == (
        "to use the proposed weights:  glm-grpo train --config-name tiny train.steps=3 "
        "'run.name=a b' ocr=0.057 aesthetic=0.943"
    )
