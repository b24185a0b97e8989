"""Measure a card in one call: compare each phase with its floor, and run the GPU tests.

Sizes are those of the published model.

python -m benchmarks.gpu_card [--seconds 560] [--json FILE] [--only SECTION ...] [--dry-run]

Random weights are created on the device, and nothing is downloaded; it needs a card with 80 GB. The
most informative sections come first. Every row is printed, and appended to FILE as a line of JSON,
as soon as it is measured. A failure is recorded with its error, and the next row begins. No row
begins after the seconds are over, or after its section and those before it have used their share.

Sections: `ceilings`, `large_steps` (1024 x 1024 with the shipped settings, and edits), `decoder`,
    `tests` (those marked `gpu`), `update`, `token_step`, `whole_steps`, `flat_rewards` (a constant
    reward must not change any weight), `janus_pro` (phases of a step of the 1B model). Compiling
    takes one to two minutes a section, so in ten not all get their turn: --only chooses. --dry-run
    uses the embedded model's sizes, the CPU, and a compiler that only traces, and runs all sections
    in two minutes.

On a machine without a network, missing packages can be installed from wheels:

pip download -d wheels -c constraints.txt PACKAGE ...
pip install --no-index --find-links wheels PACKAGE ...

Reward terms are left out if lpips, open_clip_torch or rapidocr (with onnxruntime) is missing; the
tests need pytest, pytest-timeout and beartype.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.full_size.images import decoder
from benchmarks.full_size.janus_pro import janus_pro
from benchmarks.full_size.learning import update
from benchmarks.full_size.measuring import ceilings, speed_of
from benchmarks.full_size.scale import FULL, SMALL, Bench, Rows
from benchmarks.full_size.tokens import token_step
from benchmarks.full_size.training_step import flat_rewards, large_steps, whole_steps
from benchmarks.timing import ROOT, machine

_LONGEST_ERROR = 500
"""Characters of an error to keep."""

_LONGEST_OUTPUT = 2000
"""Characters to keep from the end of the tests' output."""


def tests(bench: Bench) -> Rows:
    """Run the tests marked `gpu` in a separate process."""
    yield "marked gpu", partial(_run_tests, bench)


def _run_tests(bench: Bench) -> dict[str, Any]:
    found = sorted((ROOT / "tests").rglob(bench.scale.tests))
    # Collecting all others takes half a minute.
    files = [str(path) for path in found if "pytest.mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *files]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=max(1.0, bench.seconds_left)
        )
    except subprocess.TimeoutExpired as cut:
        output = cut.stdout or b""
        text = output if isinstance(output, str) else output.decode(errors="replace")
        return {"is_complete": False, "output": text[-_LONGEST_OUTPUT:]}
    return {
        "is_complete": True,
        "exit_code": done.returncode,
        "output": (done.stdout + done.stderr)[-_LONGEST_OUTPUT:],
    }


SECTIONS: Mapping[str, tuple[Callable[[Bench], Rows], float]] = {
    "ceilings": (ceilings, 5),
    "large_steps": (large_steps, 255),
    "decoder": (decoder, 100),
    "tests": (tests, 60),
    "update": (update, 60),
    "token_step": (token_step, 60),
    "whole_steps": (whole_steps, 15),
    "flat_rewards": (flat_rewards, 5),
    "janus_pro": (janus_pro, 60),
}
"""Sections with their seconds out of 560; the next ones may use what one leaves."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=560, help="no row begins after them")
    parser.add_argument("--json", type=Path, help="file that gets a line for every row")
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS], default=[*SECTIONS])
    parser.add_argument("--dry-run", action="store_true", help="small sizes on the CPU")
    options = parser.parse_args(arguments)
    device = torch.device("cpu" if options.dry_run else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        # A missing accelerator must not count as a failure of the benchmarks.
        print("no accelerator: nothing measured; --dry-run tries the script")
        return
    begun = time.monotonic()
    speed = speed_of(device)
    bench = Bench(SMALL if options.dry_run else FULL, device, speed, begun + options.seconds)
    report = partial(_report, options.json)
    report("machine", "", {**machine(), **asdict(speed), "seconds": options.seconds})
    shares = [SECTIONS[name][1] for name in options.only]
    with _tracing_alone() if options.dry_run else nullcontext():
        for place, name in enumerate(options.only):
            part = sum(shares[: place + 1]) / sum(shares)
            own = replace(bench, ends=begun + part * options.seconds)
            for row, result in _measured(SECTIONS[name][0], own):
                report(name, row, result)
            torch.compiler.reset()


def _measured(
    section: Callable[[Bench], Rows], bench: Bench
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names and values of rows, or their errors; ends when the section's time is over."""
    rows, row = section(bench), ""
    while bench.seconds_left > 0:
        started = time.monotonic()
        try:
            row, measure = next(rows, ("", None))
            if measure is None:
                return
            if bench.is_on_accelerator:
                torch.cuda.reset_peak_memory_stats()
            result = measure()
        # Whatever fails, the others are still worth running.
        except Exception as error:
            # Free what the failed frames hold on the card.
            traceback.clear_frames(error.__traceback__)
            bench.free()
            text = f"{type(error).__name__}: {error}"
            result = {"error": text[:_LONGEST_ERROR], "at": _place_of(error)}
        yield row, {**result, "took_seconds": time.monotonic() - started}
    yield "", {"left_out": "what follows, if anything: the time of the section is over"}


def _place_of(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}"


def _report(path: Path | None, section: str, row: str, result: Mapping[str, Any]) -> None:
    line = json.dumps({"section": section, "row": row, **result}, default=str)
    print(line, flush=True)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{line}\n")


@contextmanager
def _tracing_alone() -> Iterator[None]:
    """Let `torch.compile` only trace and run the trace: Inductor would take a minute for each."""
    compiling = torch.compile

    def tracing(function: Any = None, **options: Any) -> Any:
        for name in ("backend", "mode", "options"):
            options.pop(name, None)
        return compiling(function, backend="eager", **options)

    with mock.patch.object(torch, "compile", tracing):
        yield


if __name__ == "__main__":
    main()
