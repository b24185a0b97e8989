"""Compare every phase of a step with its usual alternative: one table, one JSON file.

python -m benchmarks [--repeats 3] [--strict] [--json outputs/bench.json]

Each benchmark runs in a separate process, so that its threads and memory do not affect the next;
the command in each row runs it separately. Short benchmarks, and those near their target, are
repeated 2 to 5 times as often. A missed target is shown; only with --strict does it end the program
with exit code 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.timing import ROOT, Result, from_json, option_parser, publish

PHASES: tuple[tuple[str, ...], ...] = (
    ("rollout", "--prompts", "2", "--group", "8"),
    ("rollout", "--prompts", "8", "--group", "8"),
    ("janus_pro", "--prompts", "2", "--group", "4"),
    ("update", "--adapter-rank", "32"),
    ("update",),
    ("decode", "--groups", "8"),
    ("rewards",),
    ("step",),
    ("overlap",),
)
"""Modules and their options."""
REPEATED_MORE = {
    ("rollout", "--prompts", "2", "--group", "8"): 5,
    ("update", "--adapter-rank", "32"): 2,
    ("update",): 2,
    ("decode", "--groups", "8"): 5,
    ("rewards",): 3,
}
"""Factor of `--repeats` for benchmarks where a busy moment of the machine could decide."""
DEFAULT_FILE = ROOT / "outputs" / "bench.json"
"""In a folder that git ignores."""


def main(arguments: Sequence[str] | None = None, phases: Sequence[Sequence[str]] = PHASES) -> None:
    """Run the command line.

    Raises:
        SystemExit: With --strict, if a target is missed.
    """
    parser = option_parser(__doc__)
    parser.set_defaults(json=DEFAULT_FILE)
    parser.add_argument("--strict", action="store_true", help="exit code 1 where one is missed")
    options = parser.parse_args(arguments)
    results: list[Result] = []
    for phase in phases:
        sys.stderr.write(f"{' '.join(phase)} ...\n")
        repeats = options.repeats * REPEATED_MORE.get(tuple(phase), 1)
        results += run_phase(phase, repeats=repeats)
    publish(results, options.json)
    sys.stderr.write(f"written to {options.json}\n")
    if options.strict and any(result.verdict == "missed" for result in results):
        raise SystemExit(1)


def run_phase(phase: Sequence[str], *, repeats: int) -> list[Result]:
    """Run one benchmark in a separate process.

    Args:
        phase: Module and its options.

    Raises:
        SystemExit: The benchmark failed; its output is printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        done = subprocess.run(
            [
                *(sys.executable, "-m", f"benchmarks.{phase[0]}", *phase[1:]),
                *("--repeats", str(repeats), "--json", str(file)),
            ],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        if done.returncode != 0:
            sys.stderr.write(done.stderr)
            raise SystemExit(f"benchmarks.{phase[0]} ended with exit code {done.returncode}")
        return [from_json(value) for value in json.loads(file.read_text())["results"]]


if __name__ == "__main__":
    main()
