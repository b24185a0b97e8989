"""Parse the command line and run its commands.

glm-grpo init | train | check | plan | probe | eval | gallery | rescore | compare | export | ...
"""

# Each command imports what it needs, because the models' libraries take seconds to import, and
# reading tables, printing a help text or refusing a config needs none of them.
# ruff: noqa: PLC0415

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from rich.console import Console, RenderableType

from glm_grpo.commands import arguments as types
from glm_grpo.plan.devices import DEVICES, KNOWN, Hardware
from glm_grpo.streams import ignore_broken_pipe
from glm_grpo.terminal import ended_in_any_case, errors_explained

if TYPE_CHECKING:
    from pathlib import Path

    from glm_grpo.config import Config

_PORT = types.whole_number(0, 2**16 - 1, remedy="0 takes any free port")


class _Parser(argparse.ArgumentParser):
    """A parser that does not require what may be left out."""

    def error(self, message: str) -> NoReturn:
        # argparse counts `nargs="*"` among them where positionals and options are intermixed.
        super().error(message.removesuffix(", key=value"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; errors end it with a message and exit code 1 or 2."""
    ignore_broken_pipe()
    # Of a notebook that starts this program: its package may be missing here, and matplotlib, which
    # terms import too, would then refuse to be imported. Nothing here opens a window.
    os.environ.pop("MPLBACKEND", None)
    words = sys.argv[1:] if arguments is None else list(arguments)
    # A program that calls this function goes on after an error.
    ending = ended_in_any_case() if arguments is None else nullcontext()
    if words[:1] == ["train"] and not {"-h", "--help"}.intersection(words):
        with ending:
            _train(words[1:])
        return
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("glm_grpo").setLevel(logging.INFO)
    parser = make_parser()
    commands = parser.get_default("commands")
    if not words:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    if words[0] == "generate":
        parser.error(
            "generate is not a command: `glm-grpo export RUN DIR` writes DIR/generate.py, which "
            "generates images with the trained weights"
        )
    chosen = commands.get(words[0])
    # Intermixed, because key=value may stand before or after options.
    options = (
        parser.parse_args(words) if chosen is None else chosen.parse_intermixed_args(words[1:])
    )
    with ending, errors_explained(f"glm-grpo {words[0]}"):
        options.command(options)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="glm-grpo",
        description="Train image models that sample tokens and decode them, with GRPO.",
        epilog="`glm-grpo COMMAND --help` explains each command. Examples:\n"
        "  glm-grpo init my-run\n"
        "  glm-grpo train --config-dir my-run train.steps=20\n"
        "  glm-grpo gallery outputs/DATE/TIME --serve\n"
        "  glm-grpo rescore outputs/DATE/TIME ocr=0.5",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"glm-grpo {version('glm-grpo')}")
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", dest="subcommand", parser_class=_Parser
    )
    parser.set_defaults(commands=commands.choices)
    for name, (texts, arguments, run) in _COMMANDS.items():
        command = commands.add_parser(
            name, formatter_class=argparse.RawDescriptionHelpFormatter, **texts
        )
        for add in arguments:
            add(command)
        command.set_defaults(command=run)
    return parser


_Argument: TypeAlias = "Callable[[argparse._ActionsContainer], object]"
"""Adds itself to a parser or a group."""


_Run: TypeAlias = "Callable[[Any], None]"
"""Runs a command with its parsed options."""

_COMMANDS: dict[str, tuple[dict[str, Any], Sequence[_Argument], _Run]] = {}
"""Texts, arguments and function by name, in the order of the help, which is that of this file."""


def _command(
    does: str, *examples: str, arguments: Sequence[_Argument] = (), usage: str | None = None
) -> Callable[[_Run], _Run]:
    """Register a function `_NAME` as a command."""
    epilog = "\n  ".join(["Examples:", *examples])
    texts = {"help": does, "description": does, "usage": usage, "epilog": epilog}

    def register(run: _Run) -> _Run:
        _COMMANDS[run.__name__.removeprefix("_").replace("_", "-")] = (texts, arguments, run)
        return run

    return register


def _argument(name: str, help_text: str, **options: Any) -> _Argument:
    return lambda parser: parser.add_argument(name, help=help_text, **options)


def _number(
    name: str,
    metavar: str,
    default: int | None,
    help_text: str,
    limits: tuple[int, int],
    remedy: str,
) -> _Argument:
    kind = types.whole_number(*limits, remedy=remedy)
    said = help_text if default is None else f"{help_text} ({default})"
    return _argument(name, said, type=kind, default=default, metavar=metavar)


def _one_of(*arguments: _Argument) -> _Argument:
    def add(parser: argparse._ActionsContainer) -> None:
        group = parser.add_mutually_exclusive_group()
        for argument in arguments:
            argument(group)

    return add


def _run_folder(help_text: str) -> _Argument:
    return _argument("run", help_text, type=types.path, metavar="RUN")


def _overrides(help_text: str) -> _Argument:
    return _argument("overrides", help_text, nargs="*", metavar="key=value")


_RUN_OR_CHECKPOINT = _run_folder("run folder, or a checkpoint in it")
_NEW_FOLDER = _argument("directory", "new or empty folder", type=types.output_folder, metavar="DIR")
_CONFIG = (
    _argument("--config-name", "config to use (`config` if --config-dir has one, else tiny)"),
    _argument(
        "--config-dir",
        "folder with your own configs, which may build on the packaged ones",
        type=types.path,
        metavar="DIR",
    ),
    _overrides("any config key; ocr=0.5 sets the weight of a term"),
)


def _compose(options: argparse.Namespace, *defaults: str) -> Config:
    from glm_grpo.config import compose_config

    overrides = [*defaults, *options.overrides]
    return compose_config(options.config_dir, options.config_name, overrides)


def _compose_with_prompts(options: argparse.Namespace) -> Config:
    """Like `_compose`, for commands that read the prompts: also checks that these exist."""
    config = _compose(options)
    from glm_grpo.data.places import check_prompt_places

    check_prompt_places(config, options.config_dir)
    return config


@_command(
    "create a folder to start from: a config, prompts, a README",
    "glm-grpo init my-run",
    "glm-grpo init my-run --config-name glm_image_24gb",
    "glm-grpo init my-run --config-name janus_pro_1b_16gb reward=composition_preference",
    arguments=[
        _NEW_FOLDER,
        _argument(
            "--config-name",
            "packaged config to build on (tiny: the embedded model, for a CPU)",
        ),
        _overrides("only reward=PRESET: the preset of rewards that the folder's config uses"),
    ],
)
def _init(options: argparse.Namespace) -> None:
    from glm_grpo.commands.init import init_folder, parse_preset, propose_configs

    reward = parse_preset(options.overrides)
    for written in init_folder(options.directory, options.config_name or "tiny", reward):
        _print(str(written))
    if options.config_name is None:
        _print(propose_configs())
    _print(f"next: glm-grpo check --config-dir {shlex.quote(str(options.directory))}")


@_command(
    "train a model; Ctrl-C saves and stops",
    "glm-grpo train train.steps=20",
    "glm-grpo train --config-dir my-run",
    "glm-grpo train --config-dir my-run -m ocr=0.1,0.3,0.6    # a sweep, one run after another",
    "glm-grpo train --config-dir my-run train.resume=auto",
    "glm-grpo train --config-dir my-run --cfg job    # print the config and exit",
    "accelerate launch -m glm_grpo train --config-dir my-run    # several processes",
    usage="glm-grpo train [--config-dir DIR] [--config-name NAME] [-m] [key=value ...]",
)
def _train(words: Sequence[str]) -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Imports take seconds; until errors are explained, Ctrl-C ends the program silently.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from glm_grpo.commands.hydra_application import train_by_words

    train_by_words(words)


@_command(
    "check everything that can be checked before a run",
    "glm-grpo check --config-dir my-run",
    "glm-grpo check --config-name glm_image_80gb data.path=a.jsonl data.eval_path=b.jsonl",
    arguments=[*_CONFIG],
)
def _check(options: argparse.Namespace) -> None:
    config = _compose_with_prompts(options)
    from glm_grpo.commands.check import check_config

    for line in check_config(config):
        _print(f"ok  {line}")
    _print(f"next: {shlex.join(['glm-grpo', 'train', *_config_words(options)])}")


@_command(
    "estimate memory and minimum time by phase, without loading a model",
    "glm-grpo plan --config-name janus_pro_1b_16gb --device 16gb",
    "glm-grpo plan --config-name glm_image_24gb --device rtx4090",
    "glm-grpo plan --config-dir my-run --processes 4",
    "glm-grpo plan --measured outputs/DATE/TIME --device h200",
    arguments=[
        *_CONFIG,
        _argument(
            "--memory",
            "available memory, such as 24GB; exit code 1 if it is too little",
            type=types.memory_size,
            metavar="SIZE",
        ),
        _number(
            "--prompt-tokens",
            "N",
            None,
            "tokens in the longest prompt (256 for GLM-Image, 64 for Janus-Pro)",
            (1, 10**6),
            "give the number of tokens in the longest prompt",
        ),
        _number(
            "--processes",
            "N",
            1,
            "processes that train together",
            (1, 10**6),
            "give the number of processes",
        ),
        _argument(
            "--sharding",
            "none: each process holds the whole policy (DDP); fsdp2: it is sharded, as with "
            "configs/accelerate/fsdp2.yaml (none)",
            choices=("none", "fsdp2"),
            default="none",
        ),
        _one_of(
            _argument(
                "--device",
                f"GPU: its name ({KNOWN}), or its memory, such as 16gb; shows the time of a step, "
                "and whether the run fits (h100, without that check; for the embedded model, the "
                "CPU if there is no accelerator)",
                type=types.hardware,
                metavar="GPU",
            ),
            _argument(
                "--cpu", "plan a run without an accelerator, all in CPU memory", action="store_true"
            ),
        ),
        _argument(
            "--measured",
            "plan this run's own config, and compare its measured times with the minimum",
            type=types.path,
            metavar="RUN",
        ),
    ],
)
def _plan(options: argparse.Namespace) -> None:
    from glm_grpo.errors import ConfigError
    from glm_grpo.run.config import read_config
    from glm_grpo.run.folder import RunFolder

    measured = None if options.measured is None else RunFolder(options.measured)
    if measured is None:
        config = _compose(options, "data.path=none", "data.eval_path=none")
    elif options.cpu or options.config_name or options.config_dir or options.overrides:
        raise ConfigError(
            "--measured uses the run's own config, and compares its times with those of a device; "
            "leave out --config-name, --config-dir, key=value and --cpu"
        )
    else:
        config = read_config(measured)
    from glm_grpo.commands.plan import plan_config
    from glm_grpo.models.planning import Parallelism

    is_sharded = options.sharding == "fsdp2"
    parts = plan_config(
        config,
        memory=options.memory,
        prompt_tokens=options.prompt_tokens,
        hardware=_planned_hardware(config, options),
        parallelism=Parallelism(options.processes, is_sharded=is_sharded, is_mixed=is_sharded),
        measured=measured,
    )
    _print_all(parts)


def _planned_hardware(config: Config, options: argparse.Namespace) -> Hardware | None:
    """The hardware to plan for; None is the CPU."""
    from glm_grpo.config import EMBEDDED_MODELS

    usual = Hardware([DEVICES["h100"]])
    if options.device is None and options.measured is None and config.model.path in EMBEDDED_MODELS:
        import torch

        return usual if torch.cuda.is_available() else None
    return None if options.cpu else options.device or usual


@_command(
    "show what each reward term measures on the base model, before a run",
    "glm-grpo probe --config-dir my-run",
    "glm-grpo probe --config-dir my-run ocr=0.5",
    "glm-grpo probe --config-dir my-run --prompts 64 --gradient    # can it move the model?",
    arguments=[
        *_CONFIG,
        _number(
            "--prompts",
            "N",
            24,
            "prompts to sample",
            (1, 10**9),
            "if there are fewer prompts, all are sampled",
        ),
        _number(
            "--noises",
            "K",
            4,
            "initial noises with which to decode and score one sample",
            (2, 1000),
            "a spread needs at least two",
        ),
        _argument(
            "--gradient",
            "also measure whether batches agree on the gradient, with credit by image and, if "
            "terms score places, by place: with advantage.reward_to_go as in the config, with 1, "
            "and with these values; must come last",
            nargs="*",
            metavar="WEIGHT",
        ),
        _argument(
            "--output",
            "folder for the page (outputs/probe)",
            type=types.output_folder,
            default="outputs/probe",
        ),
    ],
)
def _probe(options: argparse.Namespace) -> None:
    weights = None
    if options.gradient is not None:
        # The option takes all words that follow it, keys of the config too.
        options.overrides += [word for word in options.gradient if "=" in word]
        given = [word for word in options.gradient if "=" not in word]
        weights = types.parse_fractions(given, option="--gradient")
    config = _compose_with_prompts(options)
    from glm_grpo.commands.probe import probe_config
    from glm_grpo.studio.probe.page import probe_tables
    from glm_grpo.training.interrupt import stop_signals

    # All of them end it with the prompts done.
    for number in stop_signals():
        signal.signal(number, signal.default_int_handler)
    probe = probe_config(
        config,
        num_prompts=options.prompts,
        noises=options.noises,
        weights=weights,
        directory=options.output,
    )
    _print_all(probe_tables(probe.report))
    _print(str(probe.page))


def _config_words(options: argparse.Namespace) -> list[str]:
    """A command's config options, for suggesting another command line."""
    named = {"--config-dir": options.config_dir, "--config-name": options.config_name}
    given = [word for name, value in named.items() if value for word in (name, str(value))]
    return [*given, *options.overrides]


@_command(
    "evaluate a checkpoint, or the base model, on the held-out prompts",
    "glm-grpo eval outputs/DATE/TIME",
    "glm-grpo eval outputs/DATE/TIME data.eval_path=other.jsonl    # on other prompts",
    "glm-grpo eval outputs/DATE/TIME rollout.min_p=0.02    # with another sampler",
    "glm-grpo eval --config-dir my-run eval.samples_per_prompt=4    # the base model",
    arguments=[
        _argument(
            "run",
            "run folder, or a checkpoint in it; leave it out to evaluate the model of a config",
            type=types.path_or_override,
            nargs="?",
            metavar="RUN",
        ),
        *_CONFIG[:2],
        _overrides(
            "with RUN, change prompts, sampling or decoding: data.eval_path, rollout.temperature, "
            ".top_p, .top_k, .min_p, decode.steps, .guidance_scale, .batch_size, "
            "eval.samples_per_prompt, .seed, .group_by; without it, any config key"
        ),
        _one_of(
            _argument("--json", "print the figures as JSON", action="store_true"),
            _argument("--markdown", "print the tables as Markdown", action="store_true"),
        ),
        _argument(
            "--output",
            "new or empty folder for images, scores and gallery (a new one in RUN/evals; without "
            "RUN, outputs/eval)",
            type=types.output_folder,
            metavar="DIR",
        ),
    ],
)
def _eval(options: argparse.Namespace) -> None:
    from glm_grpo.commands.eval import evaluate_model, evaluate_run, evaluation_tables

    run = _run_to_evaluate(options)
    if run is None:
        # Training prompts are not read.
        folder = evaluate_model(_compose(options, "data.path=none"), options.output)
    else:
        folder = evaluate_run(run, options.overrides, options.output)
    if options.json or options.markdown:
        path = folder.table_json_path if options.json else folder.table_markdown_path
        _print(path.read_text(encoding="utf-8").rstrip("\n"))
        return
    _print_all(evaluation_tables(folder))
    _print(f"tables:  {folder.table_markdown_path}")
    _print(f"gallery: {folder.gallery_path}")
    _print(f"to look at it:  glm-grpo gallery {shlex.quote(str(folder.path))} --serve")


def _run_to_evaluate(options: argparse.Namespace) -> Path | None:
    """The run to evaluate; None: the model of a config. An override may stand in its place."""
    from glm_grpo.errors import ConfigError

    run: Path | str | None = options.run
    if isinstance(run, str):
        options.overrides = [run, *options.overrides]
        run = None
    if (run is None) != bool(options.config_name or options.config_dir):
        raise ConfigError(
            "eval takes either a run folder, or --config-name or --config-dir, whose model it "
            "evaluates without training"
        )
    return run


@_command(
    "rewrite the gallery of a run from its tables",
    "glm-grpo gallery outputs/DATE/TIME --serve",
    "glm-grpo gallery outputs/DATE/TIME --sheet before-after.png",
    arguments=[
        _run_folder("run folder, even of a crashed run"),
        _argument(
            "--serve", "serve it to browsers on this machine until Ctrl-C", action="store_true"
        ),
        _argument("--port", "port for --serve; 0: any free one (8600)", type=_PORT, default=8600),
        _argument(
            "--sheet",
            "also write one image with target, before and after",
            type=types.output_png,
            metavar="PNG",
        ),
    ],
)
def _gallery(options: argparse.Namespace) -> None:
    from glm_grpo.commands.gallery import rewrite_gallery
    from glm_grpo.run.folder import RunFolder
    from glm_grpo.studio.gallery.server import serve_gallery

    for written in rewrite_gallery(options.run, sheet=options.sheet):
        _print(str(written))
    if options.serve:
        serve_gallery(RunFolder(options.run), port=options.port, announce=_announce)


@_command(
    "show what other weights would have changed in a run, from its stored scores",
    "glm-grpo rescore outputs/DATE/TIME ocr=0.5",
    "glm-grpo rescore outputs/DATE/TIME ocr=0.5 reward.combine=normalize_then_sum",
    arguments=[
        _run_folder("run folder"),
        _overrides(
            "weight of a term, such as ocr=0.5; reward.terms.<name>.std_floor, "
            "reward.combine, advantage.normalization, .std_floor, .clip"
        ),
    ],
)
def _rescore(options: argparse.Namespace) -> None:
    from glm_grpo.commands.rescore import rescore_run

    rescore_run(options.run, options.overrides)


@_command(
    "compare runs by one reward",
    "glm-grpo compare outputs/DATE/TIME_A outputs/DATE/TIME_B",
    "glm-grpo compare multirun/DATE/TIME ocr=1    # judge the runs of a sweep by OCR alone",
    arguments=[
        _argument(
            "runs",
            "run folders, or a folder of runs; also weights, such as ocr=0.5",
            type=types.path,
            nargs="*",
            metavar="RUN",
        ),
        _argument(
            "--weights",
            "weights of the total that judges all runs (those of the first run)",
            nargs="+",
            metavar="TERM=WEIGHT",
        ),
        _argument("--json", "print the figures as JSON", action="store_true"),
    ],
)
def _compare(options: argparse.Namespace) -> None:
    from glm_grpo.commands.compare import compare_runs

    _print_all(compare_runs(options.runs, options.weights or (), as_json=options.json))


@_command(
    "serve a reward term over HTTP, for `remote` terms of other runs",
    "glm-grpo serve-reward ocr --config-dir my-run --port 8700",
    arguments=[
        _argument("name", "term of the config", metavar="NAME"),
        *_CONFIG,
        _argument("--host", "address to listen on (127.0.0.1)", default="127.0.0.1"),
        _argument("--port", "port; 0: any free one (8700)", type=_PORT, default=8700),
    ],
)
def _serve_reward(options: argparse.Namespace) -> None:
    config = _compose(options)
    from glm_grpo.commands.serve_reward import serve_term

    serve_term(config, options.name, host=options.host, port=options.port, announce=_announce)


@_command(
    "export trained weights for other programs",
    "glm-grpo export outputs/DATE/TIME my-adapter",
    "glm-grpo export outputs/DATE/TIME my-model --format pipeline",
    arguments=[
        _RUN_OR_CHECKPOINT,
        _NEW_FOLDER,
        _argument(
            "--format",
            "adapter: folder that peft loads (default if adapters were trained); pipeline: folder "
            "that the model's own class loads by from_pretrained, adapters merged",
            choices=("adapter", "pipeline"),
        ),
    ],
)
def _export(options: argparse.Namespace) -> None:
    from glm_grpo.commands.export import export_run

    _print(export_run(options.run, options.directory, kind=options.format))


def _announce(url: str) -> None:
    _print(f"listening on {url}")
    sys.stdout.flush()


def _print_all(parts: Iterable[RenderableType]) -> None:
    console = Console()
    for part in parts:
        if isinstance(part, str):
            _print(part)
        else:
            console.print(part)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
