"""The command line: help, values that are refused before anything begins, what options do."""

from __future__ import annotations

import re
import runpy
import threading
from importlib.metadata import version
from pathlib import Path

import pytest

from glm_grpo import cli
from glm_grpo.commands.arguments import hardware, memory_size, parse_weights
from glm_grpo.commands.hydra_application import run_hydra
from glm_grpo.commands.probe import WrittenProbe
from glm_grpo.config import Config
from glm_grpo.errors import ConfigError
from glm_grpo.models.planning import Parallelism
from glm_grpo.plan.devices import DEVICES, Hardware
from tests.studio.probe.reports import make_report, make_term

COMMANDS = (
    *("init", "train", "check", "plan", "probe", "eval", "gallery", "rescore", "compare"),
    *("serve-reward", "export"),
)


def refusal_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: glm-grpo {command}")
    assert f"  glm-grpo {command} " in said.partition("Examples:")[2]


@pytest.mark.parametrize(
    "words",
    [
        *("init ~/x", "export ~/x ~/x", "gallery ~/x --sheet=~/x.png", "eval ~/x --output=~/x"),
        *("rescore ~/x", "compare ~/x ~/x", "plan --measured=~/x", "check --config-dir=~/x"),
        *("probe --config-dir=~/x --output=~/x", "serve-reward ocr --config-dir=~/x"),
    ],
)
def test_a_tilde_in_a_path_is_the_home_folder(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/mine")
    commands = cli.make_parser().get_default("commands")
    name, *others = words.split()
    given = str(vars(commands[name].parse_intermixed_args(others)))
    assert given.count("/home/mine/x") == words.count("~")
    assert "~" not in given


def test_train_reads_a_tilde_in_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=f"{tmp_path}/mine"):
        run_hydra(["--config-dir=~/mine"])


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    assert (
        tuple(re.findall(r"^    ([a-z-]+)(?:  |$)", capsys.readouterr().out, re.MULTILINE))
        == COMMANDS
    )


def test_the_package_is_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["glm_grpo", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("glm_grpo", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"glm-grpo {version('glm-grpo')}\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["trian", "--config-dir", "my-run"], "'trian'"),
        (["generate", "my-run"], "`glm-grpo export RUN DIR` writes DIR/generate.py"),
        (["plan", "--cup"], "--cup$"),
        (["check", "--config", "a"], "--config-name, --config-dir"),
        (["plan", "--memory", "24"], "--memory: '24' .*unit"),
        (["plan", "--device", "abacus"], "--device: 'abacus' .*rtx4090.* such as 16gb"),
        (["plan", "--device", "3090ti"], "--device: '3090ti' .*rtx4090.* such as 16gb"),
        (["probe", "--noises", "1"], "--noises: '1' .* from 2 "),
        (["probe", "--gradient", "0", "2"], "--gradient '2': .* 0 to 1"),
        (["gallery", "run", "--sheet", "x.txt"], "--sheet: 'x.txt' .*.png"),
        (["gallery", "run", "--sheet", "folder.png"], "--sheet: 'folder.png' .*folder"),
        (["gallery", "run", "--sheet", "file/x.png"], "--sheet: 'file/x.png' .*folder"),
        (["gallery", "run", "--port", "65536"], "--port: '65536' .* 0 to 65535"),
        (["eval", "a", "--output", "file"], "'file' .*folder"),
        (["eval", "train.seed=1"], "either a run folder, or --config-name"),
        (["eval", "folder.png", "--config-name", "tiny"], "either a run folder, or --config-name"),
        (["eval", "a", "--json", "--markdown"], "--markdown: not allowed with .*--json"),
    ],
    ids=ascii,
)
def test_a_refused_value_comes_with_its_rule_and_remedy(
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    monkeypatch.chdir(tmp_path)
    assert re.search(told, refusal_of(words, capsys))


def test_train_names_the_variable_that_chooses_a_gpu() -> None:
    with pytest.raises(ConfigError, match="--device: choose the GPU .*CUDA_VISIBLE_DEVICES=3"):
        run_hydra(["--device", "cuda:3"])


def test_a_refused_train_leaves_the_program_that_called_it_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    # The thread that ends a hanging program after some seconds would end this one.
    threads = threading.enumerate()
    with pytest.raises(SystemExit):
        cli.main(["train", "--device", "cuda:3"])
    assert threading.enumerate() == threads


@pytest.mark.parametrize("name", ["rtx4090", "RTX 4090", "rtx-4090", "4090"])
def test_a_card_is_known_by_the_ways_in_which_its_name_is_written(name: str) -> None:
    assert hardware(name).devices == [DEVICES["rtx4090"]]


PLAN = {
    "memory": None,
    "prompt_tokens": None,
    "hardware": Hardware([DEVICES["h100"]]),
    "measured": None,
}
ALONE = Parallelism(1, is_sharded=False, is_mixed=False)
SHARDED = Parallelism(4, is_sharded=True, is_mixed=True)
SERVED = {"announce": cli._announce}


@pytest.mark.parametrize(
    ("words", "function", "expected"),
    [
        (
            "plan --config-name glm_image_80gb",
            "commands.plan.plan_config",
            {**PLAN, "parallelism": ALONE},
        ),
        # The embedded model, where there is no accelerator.
        ("plan", "commands.plan.plan_config", {**PLAN, "hardware": None, "parallelism": ALONE}),
        (
            "plan --memory 24GB --prompt-tokens 64 --cpu",
            "commands.plan.plan_config",
            {
                **PLAN,
                "memory": 24 * 10**9,
                "prompt_tokens": 64,
                "hardware": None,
                "parallelism": ALONE,
            },
        ),
        (
            "plan --processes 4 --sharding fsdp2 --device a100",
            "commands.plan.plan_config",
            {**PLAN, "hardware": Hardware([DEVICES["a100"]], 80 * 10**9), "parallelism": SHARDED},
        ),
        (
            "serve-reward ocr",
            "commands.serve_reward.serve_term",
            {"host": "127.0.0.1", "port": 8700, **SERVED},
        ),
        (
            "serve-reward ocr --host localhost --port 0",
            "commands.serve_reward.serve_term",
            {"host": "localhost", "port": 0, **SERVED},
        ),
        ("export run new --format pipeline", "commands.export.export_run", {"kind": "pipeline"}),
        (
            "gallery run --sheet a.png",
            "commands.gallery.rewrite_gallery",
            {"sheet": Path("a.png")},
        ),
        (
            "gallery run --serve --port 0",
            "studio.gallery.server.serve_gallery",
            {"port": 0, **SERVED},
        ),
    ],
)
def test_options_reach_what_they_are_for(
    words: str,
    function: str,
    expected: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[dict[str, object]] = []

    def take(*_: object, **options: object) -> str:
        given.append(options)
        return ""

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("glm_grpo.commands.gallery.rewrite_gallery", lambda *_, **__: "")
    monkeypatch.setattr(f"glm_grpo.{function}", take)
    cli.main(words.split())
    assert given == [expected]


def test_probe_takes_keys_behind_the_values_of_gradient(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: dict[str, object] = {}

    def probe(config: Config, **options: object) -> WrittenProbe:
        given.update(options, steps=config.train.steps)
        return WrittenProbe(make_report(make_term()), tmp_path / "index.html")

    monkeypatch.setattr("glm_grpo.commands.probe.probe_config", probe)
    sizes = ("--prompts", "3", "--noises", "5", "--output", str(tmp_path / "p"))
    cli.main(["probe", "--config-name", "tiny", *sizes, "--gradient", "0", "train.steps=3"])
    assert given == {
        "num_prompts": 3,
        "noises": 5,
        "weights": [0.0],
        "steps": 3,
        "directory": tmp_path / "p",
    }


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GB", 24 * 10**9), ("1.5 GiB", 3 * 2**29), ("7b", 7), ("2MB", 2_000_000), ("3KB", 3000)],
)
def test_memory_size_reads_a_number_and_a_unit(text: str, size: int) -> None:
    assert memory_size(text) == size


def test_parse_weights_reads_terms_and_numbers() -> None:
    words = ["lpips=0.4", "reward.terms.ocr.weight=-1e-1"]
    assert parse_weights(words, option="--weights") == {"lpips": 0.4, "ocr": -0.1}


@pytest.mark.parametrize("word", ["ocr", "=0.5", "ocr=much", "ocr=nan", "reward.terms.a.weight=1"])
def test_parse_weights_refuses_other_words(word: str) -> None:
    rule = rf"--weights '{word}': .*TERM=NUMBER"
    with pytest.raises(ConfigError, match=rule):
        parse_weights(["a=1", word], option="--weights")


def test_keys_may_stand_before_and_behind_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Config] = []

    def take(config: Config, **_: object) -> str:
        given.append(config)
        return ""

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("glm_grpo.commands.plan.plan_config", take)
    cli.main(["plan", "train.steps=7", "--cpu", "train.seed=2", "--memory", "1GB"])
    (config,) = given
    assert (config.train.steps, config.train.seed) == (7, 2)


def test_a_weight_among_the_runs_of_compare_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seed=1").mkdir()
    # The folder of a run stays one, whatever its name looks like.
    said = refusal_of(["compare", "seed=1", "ocr=0.5"], capsys)
    assert "seed=1 " in said
    assert "TERM=NUMBER" not in said
    assert "'ocr=much'" in refusal_of(["compare", "seed=1", "ocr=much"], capsys)
