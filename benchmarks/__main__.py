"""Every phase of a step beside what one would use instead: one table, one JSON file.

python -m benchmarks [--repeats 3] [--strict] [--json outputs/bench.json]

Each benchmark runs in a process of its own, so that threads and memory of one do not weigh on the
next; the command of each row runs it alone. Short ones and those near their target are repeated
2 to 5 times as often. A target that is missed is shown, and ends the program with exit code 1 only
with --strict.
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
    ("update", "--adapter-rank", "32"),
    ("update",),
    ("decode", "--groups", "8"),
    ("rewards",),
    ("step",),
    ("overlap",),
)
"""Modules with their options."""
REPEATED_MORE = {
    ("rollout", "--prompts", "2", "--group", "8"): 5,
    ("update", "--adapter-rank", "32"): 2,
    ("update",): 2,
    ("decode", "--groups", "8"): 5,
    ("rewards",): 3,
}
"""As many times `--repeats`: where a busy moment of the machine would decide about a target."""
DEFAULT_FILE = ROOT / "outputs" / "bench.json"
"""Below a folder that git ignores."""


def main(arguments: Sequence[str] | None = None, phases: Sequence[Sequence[str]] = PHASES) -> None:
    """Command line.

    Raises:
        SystemExit: With --strict, where a target is missed.
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
    """Runs one benchmark in a process of its own.

    Args:
        phase: Module and its options.

    Raises:
        SystemExit: It failed; what it said is printed.
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
