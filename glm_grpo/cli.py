"""The command line beside train.py: glm-grpo check | eval | gallery | export."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from glm_grpo.commands import check_config, evaluate_run, export_run, summary_table
from glm_grpo.config import compose_config
from glm_grpo.present import expected_errors_explained
from glm_grpo.report.contact_sheet import write_contact_sheet
from glm_grpo.report.gallery import write_gallery
from glm_grpo.storage import RunFolder
from glm_grpo.training.evaluate import summarise
from glm_grpo.training.resume import read_config

_SHEET_COLUMNS = 8


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; expected errors end it with a message and exit code 1 or 2."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("glm_grpo").setLevel(logging.INFO)
    options = _parser().parse_args(arguments)
    with expected_errors_explained():
        options.command(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="glm-grpo", description="Beside train.py.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    check = commands.add_parser("check", help="everything that can be checked before a run")
    check.add_argument("--config-name", default="tiny", help="file in the config folder")
    check.add_argument("--config-dir", type=Path, default=Path("configs"))
    check.add_argument("overrides", nargs="*", metavar="key=value")
    check.set_defaults(command=_check)

    evaluate = commands.add_parser("eval", help="evaluate a checkpoint on the held-out prompts")
    evaluate.add_argument("run", type=Path, metavar="RUN", help="run folder, or a checkpoint in it")
    evaluate.set_defaults(command=_evaluate)

    gallery = commands.add_parser("gallery", help="write a run's gallery again from its tables")
    gallery.add_argument("run", type=Path, metavar="RUN")
    gallery.add_argument(
        "--sheet", type=Path, metavar="PNG", help="also one picture of target, before and after"
    )
    gallery.set_defaults(command=_gallery)

    export = commands.add_parser("export", help="write trained weights for other programs")
    export.add_argument("run", type=Path, metavar="RUN", help="run folder, or a checkpoint in it")
    export.add_argument("directory", type=Path, metavar="DIR", help="new or empty folder")
    export.add_argument(
        "--format",
        choices=("adapter", "pipeline"),
        help="adapter: a folder that peft loads (default where adapters were trained); pipeline: "
        "merged, a folder that GlmImagePipeline.from_pretrained loads",
    )
    export.set_defaults(command=_export)
    return parser


def _check(options: argparse.Namespace) -> None:
    config = compose_config(options.config_dir.absolute(), options.config_name, options.overrides)
    for line in check_config(config):
        _print(f"ok  {line}")


def _evaluate(options: argparse.Namespace) -> None:
    step, rows = evaluate_run(options.run)
    console = Console()
    console.print(summary_table(rows, title=f"held-out prompts, untrained and at step {step}"))


def _gallery(options: argparse.Namespace) -> None:
    folder = RunFolder(options.run)
    read_config(folder)
    _print(str(write_gallery(folder, summarise(folder))))
    if options.sheet is not None:
        write_contact_sheet(folder, options.sheet, columns=_SHEET_COLUMNS)
        _print(str(options.sheet))


def _export(options: argparse.Namespace) -> None:
    _print(export_run(options.run, options.directory, kind=options.format))


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
