"""Parse the command line and run its commands.

glm-grpo init | train | check | plan | probe | eval | gallery | rescore | compare | export | ...
"""

# Each command imports what it needs, because the models' libraries take seconds to import, and
# reading tables, printing a help text or refusing a config needs none of them.
# ruff: noqa: PLC0415

from __future__ import annotations

import argparse
import difflib
import itertools
import logging
import shlex
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from rich.console import Console, RenderableType

from glm_grpo.commands import arguments as types
from glm_grpo.plan.devices import DEVICES
from glm_grpo.streams import outlive_readers

if TYPE_CHECKING:
    from glm_grpo.config import Config

_Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"
_CHOICES = "commands"
"""Where the parser stores the parsers of the commands, by name."""

_PORT = types.whole_number(0, 2**16 - 1, remedy="0 takes any free port")


class _Parser(argparse.ArgumentParser):
    """A parser that does not require what may be left out."""

    def error(self, message: str) -> NoReturn:
        """End the program with a message.

        Raises:
            SystemExit: Always.
        """
        # argparse counts `nargs="*"` among them where positionals and options are intermixed.
        super().error(message.removesuffix(", key=value"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; errors end it with a message and exit code 1 or 2."""
    outlive_readers()
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["train"] and not {"-h", "--help"}.intersection(words):
        _train(words[1:])
        return
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("glm_grpo").setLevel(logging.INFO)
    parser = _parser()
    commands = parser.get_default(_CHOICES)
    if not words:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    chosen = commands.get(words[0])
    nearest = difflib.get_close_matches(words[0], commands, n=1)
    if chosen is None and nearest:
        parser.error(f"there is no command {words[0]!r}: did you mean {nearest[0]}?")
    # Intermixed, because key=value may stand before or after options.
    options = (
        parser.parse_args(words) if chosen is None else chosen.parse_intermixed_args(words[1:])
    )
    from glm_grpo.terminal import errors_explained

    with errors_explained(f"glm-grpo {words[0]}"):
        options.command(options)


def _train(words: Sequence[str]) -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Imports take seconds; until errors are explained, Ctrl-C ends the program silently.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from glm_grpo.commands.hydra_application import train_by_words

    train_by_words(words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="glm-grpo",
        description="Train AR-plus-diffusion image models with GRPO.",
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
    parser.set_defaults(**{_CHOICES: commands.choices})
    for add in _COMMANDS:
        add(commands)
    return parser


def _add_command(
    commands: _Commands, name: str, does: str, *examples: str, usage: str | None = None
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=does,
        description=does,
        usage=usage,
        epilog="\n  ".join(["Examples:", *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config-name",
        help="config to use (`config` if --config-dir has one, else tiny)",
    )
    command.add_argument(
        "--config-dir",
        type=Path,
        metavar="DIR",
        help="folder with your own configs, which may build on the packaged ones",
    )
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="any config key; ocr=0.5 sets the weight of a term",
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


def _add_init(commands: _Commands) -> None:
    command = _add_command(
        commands,
        "init",
        "create a folder to start from: a config, prompts, a README",
        "glm-grpo init my-run",
        "glm-grpo init my-run --config-name glm_image_24gb",
    )
    command.add_argument(
        "directory", type=types.output_folder, metavar="DIR", help="new or empty folder"
    )
    command.add_argument(
        "--config-name",
        default="tiny",
        help="packaged config to build on (tiny: the embedded model, for a CPU)",
    )
    command.set_defaults(command=_init)


def _init(options: argparse.Namespace) -> None:
    from glm_grpo.commands.init import init_folder

    for written in init_folder(options.directory, options.config_name):
        _print(str(written))
    _print(f"next: glm-grpo check --config-dir {shlex.quote(str(options.directory))}")


def _add_train(commands: _Commands) -> None:
    _add_command(
        commands,
        "train",
        "train a model; Ctrl-C saves and stops",
        "glm-grpo train train.steps=20",
        "glm-grpo train --config-dir my-run",
        "glm-grpo train --config-dir my-run -m ocr=0.1,0.3,0.6    # a sweep, one run after another",
        "glm-grpo train --config-dir my-run train.resume=auto",
        "glm-grpo train --config-dir my-run --cfg job    # print the config and exit",
        "accelerate launch -m glm_grpo train --config-dir my-run    # several processes",
        usage="glm-grpo train [--config-dir DIR] [--config-name NAME] [-m] [key=value ...]",
    )


def _add_check(commands: _Commands) -> None:
    command = _add_command(
        commands,
        "check",
        "check everything that can be checked before a run",
        "glm-grpo check --config-dir my-run",
        "glm-grpo check --config-name glm_image_80gb data.path=a.jsonl data.eval_path=b.jsonl",
    )
    _add_config(command)
    command.set_defaults(command=_check)


def _check(options: argparse.Namespace) -> None:
    config = _compose_with_prompts(options)
    from glm_grpo.commands.check import check_config

    for line in check_config(config):
        _print(f"ok  {line}")
    _print(f"next: {shlex.join(['glm-grpo', 'train', *_config_words(options)])}")


def _add_plan(commands: _Commands) -> None:
    command = _add_command(
        commands,
        "plan",
        "estimate memory and minimum time by phase, without loading a model",
        "glm-grpo plan --config-name glm_image_80gb --memory 80GB",
        "glm-grpo plan --config-dir my-run --processes 4",
        "glm-grpo plan --measured outputs/DATE/TIME --device h200",
    )
    _add_config(command)
    command.add_argument(
        "--memory",
        type=types.memory_size,
        metavar="SIZE",
        help="available memory, such as 24GB; exit code 1 if it is too little",
    )
    command.add_argument(
        "--prompt-tokens",
        type=types.whole_number(1, 10**6, remedy="give the number of tokens in the longest prompt"),
        default=256,
        metavar="N",
        help="tokens in the longest prompt (256)",
    )
    command.add_argument(
        "--processes",
        type=types.whole_number(1, 10**6, remedy="give the number of processes"),
        default=1,
        metavar="N",
        help="processes that train together (1)",
    )
    command.add_argument(
        "--sharding",
        choices=("none", "fsdp2"),
        default="none",
        help="none: each process holds the whole policy (DDP); fsdp2: it is sharded, as with "
        "configs/accelerate/fsdp2.yaml (none)",
    )
    place = command.add_mutually_exclusive_group()
    place.add_argument(
        "--device",
        choices=sorted(DEVICES),
        default="h100",
        help="device whose published figures give the minimum time of a step (h100)",
    )
    place.add_argument(
        "--cpu", action="store_true", help="plan a run without an accelerator, all in CPU memory"
    )
    command.add_argument(
        "--measured",
        type=Path,
        metavar="RUN",
        help="plan this run's own config, and compare its measured times with the minimum",
    )
    command.set_defaults(command=_plan)


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
    from glm_grpo.models.planning import Parallelism
    from glm_grpo.plan.command import plan_config

    is_sharded = options.sharding == "fsdp2"
    for part in plan_config(
        config,
        memory=options.memory,
        prompt_tokens=options.prompt_tokens,
        device=None if options.cpu else DEVICES[options.device],
        processes=Parallelism(options.processes, is_sharded=is_sharded, is_mixed=is_sharded),
        measured=measured,
    ):
        if isinstance(part, str):
            _print(part)
        else:
            _print_tables([part])


def _add_probe(commands: _Commands) -> None:
    command = _add_command(
        commands,
        "probe",
        "show what each reward term measures on the untrained model, before a run",
        "glm-grpo probe --config-dir my-run",
        "glm-grpo probe --config-dir my-run ocr=0.5",
        "glm-grpo probe --config-dir my-run --prompts 32 --credit    # by image or by place?",
    )
    _add_config(command)
    command.add_argument(
        "--prompts",
        type=types.whole_number(1, 10**9, remedy="if there are fewer prompts, all are sampled"),
        default=24,
        metavar="N",
        help="prompts to sample (24)",
    )
    command.add_argument(
        "--noises",
        type=types.whole_number(2, 1000, remedy="a spread needs at least two"),
        default=4,
        metavar="K",
        help="noises to decode one sample with (4)",
    )
    command.add_argument(
        "--credit",
        nargs="*",
        metavar="LATER",
        help="also compare the gradients with credit by image and by place, with advantage.later "
        "as in the config, 1, and these; must come last",
    )
    command.add_argument(
        "--output",
        type=types.output_folder,
        default="outputs/probe",
        help="folder for the page (outputs/probe)",
    )
    command.set_defaults(command=_probe)


def _probe(options: argparse.Namespace) -> None:
    laters = None
    if options.credit is not None:
        # The option takes all words that follow it, keys of the config too.
        options.overrides += [word for word in options.credit if "=" in word]
        given = [word for word in options.credit if "=" not in word]
        laters = types.parse_fractions(given, option="--credit")
    config = _compose_with_prompts(options)
    from glm_grpo.check import check_parts
    from glm_grpo.studio.probe.command import probe_config
    from glm_grpo.training.interrupt import stop_signals

    # All of them end it with the prompts done.
    for number in stop_signals():
        signal.signal(number, signal.default_int_handler)
    probe = probe_config(
        config,
        check_parts(config).training,
        num_prompts=options.prompts,
        noises=options.noises,
        laters=laters,
        directory=options.output,
    )
    _print_tables(probe.tables)
    _print(str(probe.page))


def _config_words(options: argparse.Namespace) -> list[str]:
    """A command's config options, for suggesting another command line."""
    named = {"--config-dir": options.config_dir, "--config-name": options.config_name}
    given = [(option, str(value)) for option, value in named.items() if value is not None]
    return [*itertools.chain.from_iterable(given), *options.overrides]


def _add_eval(commands: _Commands) -> None:
    command = _add_command(
        commands,
        "eval",
        "evaluate a checkpoint on the held-out prompts",
        "glm-grpo eval outputs/DATE/TIME",
        "glm-grpo eval outputs/DATE/TIME data.eval_path=other.jsonl    # on other prompts",
        "glm-grpo eval outputs/DATE/TIME rollout.min_p=0.02    # with another sampler",
    )
    command.add_argument("run", type=Path, metavar="RUN", help="run folder, or a checkpoint in it")
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="change prompts, sampling or decoding: data.eval_path, rollout.temperature, .top_p, "
        ".top_k, .min_p, decode.steps, .guidance_scale, .batch_size, eval.samples_per_prompt, "
        ".seed",
    )
    command.add_argument(
        "--output",
        type=types.output_folder,
        metavar="DIR",
        help="new or empty folder for images, scores and gallery (a new one in RUN/evals)",
    )
    command.set_defaults(command=_evaluate)


def _evaluate(options: argparse.Namespace) -> None:
    from glm_grpo.commands.evaluate import evaluate_run, summary_table
    from glm_grpo.run.summaries import summarise
    from glm_grpo.run.tables import evaluation_steps

    folder = evaluate_run(options.run, options.overrides, options.output)
    title = f"held-out prompts, untrained and at step {evaluation_steps(folder)[-1]}"
    _print_tables([summary_table(summarise(folder), title=title)])
    _print(f"gallery: {folder.gallery_path}")
    _print(f"to look at it:  glm-grpo gallery {shlex.quote(str(folder.path))} --serve")


def _add_gallery(commands: _Commands) -> None:
    command = _add_command(
        commands,
        "gallery",
        "rewrite the gallery of a run from its tables",
        "glm-grpo gallery outputs/DATE/TIME --serve",
        "glm-grpo gallery outputs/DATE/TIME --sheet before-after.png",
    )
    command.add_argument("run", type=Path, metavar="RUN", help="run folder, even of a crashed run")
    command.add_argument(
        "--serve", action="store_true", help="serve it to browsers on this machine until Ctrl-C"
    )
    command.add_argument(
        "--port", type=_PORT, default=8600, help="port for --serve; 0: any free one (8600)"
    )
    command.add_argument(
        "--sheet",
        type=types.output_picture,
        metavar="PNG",
        help="also write one image with target, before and after",
    )
    command.set_defaults(command=_gallery)


def _gallery(options: argparse.Namespace) -> None:
    from glm_grpo.commands.gallery import rewrite_gallery
    from glm_grpo.run.folder import RunFolder
    from glm_grpo.studio.gallery.server import serve_gallery

    for written in rewrite_gallery(
        options.run,
        sheet=options.sheet,
    ):
        _print(str(written))
    if options.serve:
        serve_gallery(RunFolder(options.run), port=options.port, announce=_announce)


def _add_rescore(commands: _Commands) -> None:
    command = _add_command(
        commands,
        "rescore",
        "show what other weights would have made of the stored scores of a run",
        "glm-grpo rescore outputs/DATE/TIME ocr=0.5",
        "glm-grpo rescore outputs/DATE/TIME ocr=0.5 reward.combine=normalize_then_sum",
    )
    command.add_argument("run", type=Path, metavar="RUN", help="run folder")
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="weight of a term, such as ocr=0.5; reward.terms.<name>.std_floor, "
        "reward.combine, advantage.normalization, .std_floor, .clip",
    )
    command.set_defaults(command=_rescore)


def _rescore(options: argparse.Namespace) -> None:
    from glm_grpo.studio.rescore.command import rescore_run

    _print(str(rescore_run(options.run, options.overrides)))


def _add_compare(commands: _Commands) -> None:
    command = _add_command(
        commands,
        "compare",
        "compare runs by one reward",
        "glm-grpo compare outputs/DATE/TIME_A outputs/DATE/TIME_B",
        "glm-grpo compare multirun/DATE/TIME ocr=1    # judge the runs of a sweep by OCR alone",
    )
    command.add_argument(
        "runs",
        type=Path,
        nargs="*",
        metavar="RUN",
        help="run folders, or a folder of runs; also weights, such as ocr=0.5",
    )
    command.add_argument(
        "--weights",
        nargs="+",
        metavar="TERM=WEIGHT",
        help="weights of the total that judges all runs (those of the first run)",
    )
    command.add_argument("--json", action="store_true", help="print the figures as JSON")
    command.set_defaults(command=_compare)


def _compare(options: argparse.Namespace) -> None:
    # A path takes precedence: a run's folder may be named after its override.
    short = [str(run) for run in options.runs if types.is_weight(str(run)) and not run.exists()]
    runs = [run for run in options.runs if str(run) not in short]
    # The option takes all words that follow it, runs too.
    given = options.weights or ()
    runs += [Path(word) for word in given if "=" not in word]
    words = [*(word for word in given if "=" in word), *short]
    weights = types.parse_weights(words, option="--weights") if words else None
    from glm_grpo.studio.compare.comparison import compare
    from glm_grpo.studio.compare.tables import comparison_json, comparison_tables

    comparison = compare(runs, weights)
    if options.json:
        _print(comparison_json(comparison))
    else:
        _print_tables(comparison_tables(comparison))


def _add_serve_reward(commands: _Commands) -> None:
    command = _add_command(
        commands,
        "serve-reward",
        "serve a reward term over HTTP, for `remote` terms of other runs",
        "glm-grpo serve-reward ocr --config-dir my-run --port 8700",
    )
    command.add_argument("name", metavar="NAME", help="term of the config")
    _add_config(command)
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    command.add_argument("--port", type=_PORT, default=8700, help="port; 0: any free one (8700)")
    command.set_defaults(command=_serve_reward)


def _serve_reward(options: argparse.Namespace) -> None:
    config = _compose(options)
    from glm_grpo.commands.serve_reward import serve_term

    serve_term(config, options.name, host=options.host, port=options.port, announce=_announce)


def _add_export(commands: _Commands) -> None:
    command = _add_command(
        commands,
        "export",
        "export trained weights for other programs",
        "glm-grpo export outputs/DATE/TIME my-adapter",
        "glm-grpo export outputs/DATE/TIME my-model --format pipeline",
    )
    command.add_argument("run", type=Path, metavar="RUN", help="run folder, or a checkpoint in it")
    command.add_argument(
        "directory", type=types.output_folder, metavar="DIR", help="new or empty folder"
    )
    command.add_argument(
        "--format",
        choices=("adapter", "pipeline"),
        help="adapter: folder that peft loads (default if adapters were trained); pipeline: folder "
        "that GlmImagePipeline.from_pretrained loads, adapters merged",
    )
    command.set_defaults(command=_export)


def _export(options: argparse.Namespace) -> None:
    from glm_grpo.commands.export import export_run

    _print(export_run(options.run, options.directory, kind=options.format))


def _announce(url: str) -> None:
    _print(f"listening on {url}")
    sys.stdout.flush()


def _print_tables(tables: Sequence[RenderableType]) -> None:
    console = Console()
    for table in tables:
        console.print(table)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")


_COMMANDS = (
    _add_init,
    _add_train,
    _add_check,
    _add_plan,
    _add_probe,
    _add_eval,
    _add_gallery,
    _add_rescore,
    _add_compare,
    _add_serve_reward,
    _add_export,
)
"""Commands in the order of the help."""


if __name__ == "__main__":
    main()
