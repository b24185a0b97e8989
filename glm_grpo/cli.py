"""The command line beside train.py.

glm-grpo check | plan | probe | eval | gallery | rescore | compare | export | serve-reward
"""

# Each command imports what it needs: the libraries of the models take seconds, and reading tables,
# printing a help text or refusing a config needs none of them.
# ruff: noqa: PLC0415

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from glm_grpo.commands import arguments as types
from glm_grpo.output import guard_output
from glm_grpo.plan.devices import DEVICES

if TYPE_CHECKING:
    from glm_grpo.config import Config

_PORT = types.whole_number(0, 2**16 - 1, remedy="0 takes any that is free")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; errors end it with a message and exit code 1 or 2."""
    guard_output(is_run=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("glm_grpo").setLevel(logging.INFO)
    # It warns of kernels that only CPUs would use.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        options = _parser().parse_args(arguments)
        from glm_grpo.terminal import errors_explained, refuse_stripped_docstrings

        with errors_explained(f"glm-grpo {options.subcommand}"):
            refuse_stripped_docstrings()
            options.command(options)
    finally:
        # Here, where it may still end the command; at the end of Python it is too late.
        sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="glm-grpo",
        description="Everything but training, which train.py does.",
        epilog="`glm-grpo COMMAND --help` says more of each command. Examples:\n"
        "  glm-grpo check --config-name glm_image_80gb data.path=prompts.jsonl\n"
        "  glm-grpo gallery RUN --serve\n"
        "  glm-grpo rescore RUN reward.terms.ocr.weight=0.5\n"
        "  glm-grpo compare RUN_A RUN_B",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"glm-grpo {version('glm-grpo')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="subcommand")

    check = commands.add_parser("check", help="everything that can be checked before a run")
    _add_config(check)
    check.set_defaults(command=_check)

    plan = commands.add_parser(
        "plan", help="will it fit? memory and least time by phase, no model is loaded"
    )
    _add_config(plan)
    plan.add_argument(
        "--memory",
        type=types.memory_size,
        metavar="SIZE",
        help="what there is, such as 24GB; exit code 1 if too little",
    )
    plan.add_argument(
        "--prompt-tokens",
        type=types.whole_number(1, 10**6, remedy="give the tokens of the longest prompt"),
        default=256,
        metavar="N",
        help="of the longest prompt (256)",
    )
    plan.add_argument(
        "--processes",
        type=types.whole_number(1, 10**6, remedy="give the processes of the launch"),
        default=1,
        metavar="N",
        help="that train together (1)",
    )
    plan.add_argument(
        "--sharding",
        type=types.name,
        choices=("none", "fsdp2"),
        default="none",
        help="none: each process holds the policy (DDP); fsdp2: it is cut over them, as by "
        "configs/accelerate/fsdp2.yaml (none)",
    )
    place = plan.add_mutually_exclusive_group()
    place.add_argument(
        "--device",
        type=types.name,
        choices=sorted(DEVICES),
        default="h100",
        help="whose published figures the least time of a step follows from (h100)",
    )
    place.add_argument(
        "--cpu", action="store_true", help="of a run without an accelerator, all in CPU memory"
    )
    plan.set_defaults(command=_plan)

    probe = commands.add_parser(
        "probe", help="before a run: what each reward term measures on the untrained model"
    )
    _add_config(probe)
    probe.add_argument(
        "--prompts",
        type=types.whole_number(1, 10**9, remedy="with more than there are, all are sampled"),
        default=24,
        metavar="N",
        help="sampled (24)",
    )
    probe.add_argument(
        "--noises",
        type=types.whole_number(2, 1000, remedy="two at least, for a spread to be seen"),
        default=4,
        metavar="K",
        help="noises one sample is decoded under (4)",
    )
    probe.add_argument(
        "--branches",
        type=types.whole_number(2, 1000, remedy="two at least; leave it out for none"),
        metavar="M",
        help="images to each preview, to see what previews decide; takes M times as long",
    )
    probe.add_argument(
        "--share",
        type=types.word,
        nargs="+",
        default=[],
        metavar="TERM=SHARE",
        help="propose weights that give the terms these shares of the advantage; write last",
    )
    probe.add_argument(
        "--output", type=types.output_folder, default="probe", help="folder of the page"
    )
    probe.set_defaults(command=_probe)

    evaluate = commands.add_parser("eval", help="evaluate a checkpoint on the held-out prompts")
    evaluate.add_argument(
        "run", type=types.path, metavar="RUN", help="run folder, or a checkpoint in it"
    )
    evaluate.set_defaults(command=_evaluate)

    gallery = commands.add_parser("gallery", help="write a run's gallery again from its tables")
    gallery.add_argument(
        "run", type=types.path, metavar="RUN", help="run folder, also of a crashed run"
    )
    gallery.add_argument(
        "--serve", action="store_true", help="show it to browsers on this machine until Ctrl-C"
    )
    gallery.add_argument(
        "--port", type=_PORT, default=8600, help="for --serve; 0: any that is free (8600)"
    )
    gallery.add_argument(
        "--zip",
        type=types.output_file(".zip"),
        metavar="FILE",
        help="also pack gallery and pictures, to be sent",
    )
    gallery.add_argument(
        "--sheet",
        type=types.output_file(".png"),
        metavar="PNG",
        help="also one picture of target, before and after",
    )
    gallery.set_defaults(command=_gallery)

    rescore = commands.add_parser(
        "rescore", help="what other weights would have made of a run's stored scores"
    )
    rescore.add_argument("run", type=types.path, metavar="RUN")
    rescore.add_argument(
        "overrides",
        type=types.word,
        nargs="*",
        metavar="key=value",
        help="reward.terms.<name>.weight, .share, .at_least or .std_floor, reward.combine, "
        "advantage.*",
    )
    rescore.set_defaults(command=_rescore)

    compare = commands.add_parser("compare", help="judge runs by one reward")
    compare.add_argument(
        "runs", type=types.path, nargs="+", metavar="RUN", help="run folders, or that of a sweep"
    )
    compare.add_argument(
        "--weights",
        type=types.word,
        nargs="+",
        metavar="TERM=WEIGHT",
        help="of the total all runs are judged by (the weights of the first run)",
    )
    compare.add_argument(
        "--html", action="store_true", help="show the pictures of all runs side by side on the page"
    )
    compare.add_argument(
        "--output", type=types.output_folder, default="compare", help="folder of the page"
    )
    compare.set_defaults(command=_compare)

    serve = commands.add_parser(
        "serve-reward", help="serve a term over HTTP, for `remote` terms of runs elsewhere"
    )
    serve.add_argument("name", type=types.name, metavar="NAME", help="a term of the config")
    _add_config(serve)
    serve.add_argument(
        "--host", type=types.host, default="127.0.0.1", help="address to listen at (127.0.0.1)"
    )
    serve.add_argument("--port", type=_PORT, default=8700, help="0: any that is free (8700)")
    serve.set_defaults(command=_serve_reward)

    export = commands.add_parser("export", help="write trained weights for other programs")
    export.add_argument(
        "run", type=types.path, metavar="RUN", help="run folder, or a checkpoint in it"
    )
    export.add_argument(
        "directory", type=types.output_folder, metavar="DIR", help="new or empty folder"
    )
    export.add_argument(
        "--format",
        type=types.name,
        choices=("adapter", "pipeline"),
        help="adapter: a folder that peft loads (default where adapters were trained); pipeline: "
        "merged, a folder that GlmImagePipeline.from_pretrained loads",
    )
    export.set_defaults(command=_export)
    return parser


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config-name", type=types.name, default="tiny", help="file in the config folder"
    )
    command.add_argument("--config-dir", type=types.path, default=Path("configs"))
    command.add_argument("overrides", type=types.word, nargs="*", metavar="key=value")


def _compose(options: argparse.Namespace) -> Config:
    from glm_grpo.config import compose_config

    return compose_config(options.config_dir.absolute(), options.config_name, options.overrides)


def _check(options: argparse.Namespace) -> None:
    config = _compose(options)
    from glm_grpo.commands.check import check_config

    for line in check_config(config):
        _print(f"ok  {line}")


def _plan(options: argparse.Namespace) -> None:
    config = _compose(options)
    from glm_grpo.models.planning import Parallelism
    from glm_grpo.plan.command import plan_config

    is_sharded = options.sharding == "fsdp2"
    for part in plan_config(
        config,
        memory=options.memory,
        prompt_tokens=options.prompt_tokens,
        device=None if options.cpu else DEVICES[options.device],
        processes=Parallelism(options.processes, is_sharded=is_sharded, is_mixed=is_sharded),
    ):
        if isinstance(part, str):
            _print(part)
        else:
            _print_tables([part])


def _probe(options: argparse.Namespace) -> None:
    shares = types.parse_weights(options.share, option="--share")
    config = _compose(options)
    from glm_grpo.probe.command import probe_config

    tables, page = probe_config(
        config,
        num_prompts=options.prompts,
        noises=options.noises,
        branches=options.branches,
        shares=shares,
        directory=options.output,
    )
    _print_tables(tables)
    _print(str(page))


def _evaluate(options: argparse.Namespace) -> None:
    from glm_grpo.commands.evaluate import evaluate_run, summary_table

    step, rows = evaluate_run(options.run)
    console = Console()
    console.print(summary_table(rows, title=f"held-out prompts, untrained and at step {step}"))


def _gallery(options: argparse.Namespace) -> None:
    from glm_grpo.commands.gallery import rewrite_gallery
    from glm_grpo.gallery.server import serve_gallery
    from glm_grpo.run.folder import RunFolder

    for written in rewrite_gallery(options.run, sheet=options.sheet, archive=options.zip):
        _print(str(written))
    if options.serve:
        serve_gallery(RunFolder(options.run), port=options.port, announce=_announce)


def _rescore(options: argparse.Namespace) -> None:
    from glm_grpo.rescore.command import rescore_run

    sheet = rescore_run(options.run, options.overrides)
    if sheet is not None:
        _print(str(sheet))


def _compare(options: argparse.Namespace) -> None:
    weights = None
    if options.weights is not None:
        weights = types.parse_weights(options.weights, option="--weights")
    from glm_grpo.compare.comparison import compare
    from glm_grpo.compare.page import comparison_tables, write_comparison

    comparison = compare(options.runs, weights)
    _print_tables(comparison_tables(comparison))
    _print(str(write_comparison(comparison, options.output, has_samples=options.html)))


def _serve_reward(options: argparse.Namespace) -> None:
    config = _compose(options)
    from glm_grpo.commands.serve_reward import serve_term

    serve_term(config, options.name, host=options.host, port=options.port, announce=_announce)


def _announce(url: str) -> None:
    _print(f"listening on {url}")
    sys.stdout.flush()


def _print_tables(tables: Sequence[Table]) -> None:
    console = Console()
    for table in tables:
        console.print(table)


def _export(options: argparse.Namespace) -> None:
    from glm_grpo.commands.export import export_run

    _print(export_run(options.run, options.directory, kind=options.format))


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
