"""Run hundreds of real steps, during which memory, disk and step time must stay flat.

python -m benchmarks.soak [--steps 500] [--json FILE] [key=value ...]

A separate process trains the embedded model on small pictures, and is observed from outside after
every step. Growth is the slope of a straight line through the observations after the first fifth,
in which libraries fill their caches. `--strict` ends with exit code 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.timing import ROOT
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics

WARM_UP = 0.2
"""Fraction of the steps to ignore."""

LIMITS: Mapping[str, float] = {
    "resident_bytes": 100_000,
    "descriptors": 0.01,
    "threads": 0.01,
    "step_seconds": 0.0005,
}
"""Largest growth per step; for seconds, as a fraction of the median step."""

SETTINGS = (
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.height=64",
    "rollout.width=64",
    "train.micro_batch_size=4",
    "train.checkpoint_every=50",
    "train.eval_every=100",
    "eval.samples_per_prompt=1",
    # Its prompts have no targets.
    *("lpips=null", "ssim=null"),
)
_WORDS = ("GO", "ON", "UP", "IN", "AT", "BY", "SO", "WE", "NO", "IT")
_PROMPT = 'A red sign that says "{}"\n'
_KILOBYTE = 1024


@dataclass(frozen=True)
class Sighting:
    """Observation of a run after a step, from outside.

    Attributes:
        step: Training step, from 1.
        descriptors: Number of the process's open files.
        disk_bytes: Size of the run folder, including the gallery.
        step_seconds: Duration as measured by the run itself.
    """

    step: int
    resident_bytes: int
    descriptors: int
    threads: int
    disk_bytes: int
    step_seconds: float


@dataclass(frozen=True)
class Growth:
    """Growth of one measure.

    Attributes:
        first: Median over the first tenth of the counted steps.
        last: Median over their last tenth.
        slope: Growth per step.
        limit: Largest allowed slope; None: no limit.
    """

    name: str
    first: float
    last: float
    slope: float
    limit: float | None

    @property
    def is_flat(self) -> bool:
        """Whether the limit holds."""
        return self.limit is None or self.slope <= self.limit


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        SystemExit: With --strict, if a limit is missed.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        sightings = [*watch_run(Path(directory), options.steps, options.overrides)]
    growths = measure_growth(sightings)
    for growth in growths:
        verdict = "" if growth.limit is None else "flat" if growth.is_flat else "GROWS"
        print(
            f"{growth.name:16} {growth.first:14,.4g} -> {growth.last:14,.4g}  "
            f"{growth.slope:+12,.4g} a step  {verdict}"
        )
    if options.json is not None:
        result = {
            "growth": [asdict(growth) for growth in growths],
            "sightings": [asdict(sighting) for sighting in sightings],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1))
    if options.strict and not all(growth.is_flat for growth in growths):
        raise SystemExit(1)


def watch_run(directory: Path, steps: int, overrides: Sequence[str]) -> Iterator[Sighting]:
    """Train in a separate process, and observe it after every step.

    Args:
        directory: Empty folder for the run and its prompts.
        overrides: Further settings.

    Raises:
        RuntimeError: The run failed; the message contains the end of its output.
    """
    prompts, run_dir, log = directory / "prompts.txt", directory / "run", directory / "log.txt"
    prompts.write_text("".join(map(_PROMPT.format, _WORDS)))
    command = [
        *(sys.executable, str(ROOT / "train.py"), *SETTINGS, f"train.steps={steps}"),
        *(f"data.path={prompts}", f"data.eval_path={prompts}", f"run_dir={run_dir}"),
        *overrides,
    ]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
    seen = 0
    while seen < steps and process.poll() is None:
        time.sleep(0.05)
        rows = read_metrics(RunFolder(run_dir))
        if len(rows) - 1 > seen:
            seen = len(rows) - 1
            seconds = float(rows[seen]["time/step"] or 0)
            try:
                yield _look_at(process.pid, run_dir, step=seen, seconds=seconds)
            except (FileNotFoundError, KeyError):
                # It ended in the meantime, and a process that is gone has no memory.
                break
    if process.wait() != 0:
        raise RuntimeError(f"the run failed: {log.read_text()[-2000:]}")


def measure_growth(sightings: Sequence[Sighting]) -> list[Growth]:
    """Fit a line through each measure, without the warm-up steps."""
    counted = sightings[int(len(sightings) * WARM_UP) :]
    tenth = max(1, len(counted) // 10)
    steps = [float(sighting.step) for sighting in counted]
    measures: Mapping[str, Callable[[Sighting], float]] = {
        "resident_bytes": lambda sighting: sighting.resident_bytes,
        "descriptors": lambda sighting: sighting.descriptors,
        "threads": lambda sighting: sighting.threads,
        "disk_bytes": lambda sighting: sighting.disk_bytes,
        "step_seconds": lambda sighting: sighting.step_seconds,
    }
    growths = []
    for name, measure in measures.items():
        values = [float(measure(sighting)) for sighting in counted]
        limit = LIMITS.get(name)
        if name == "step_seconds" and limit is not None:
            limit *= statistics.median(values)
        growths.append(
            Growth(
                name,
                first=statistics.median(values[:tenth]),
                last=statistics.median(values[-tenth:]),
                slope=statistics.linear_regression(steps, values).slope,
                limit=limit,
            )
        )
    return growths


def _look_at(pid: int, run_dir: Path, *, step: int, seconds: float) -> Sighting:
    process = Path(f"/proc/{pid}")
    status = dict(
        line.split(":", maxsplit=1) for line in (process / "status").read_text().splitlines()
    )
    return Sighting(
        step=step,
        resident_bytes=int(status["VmRSS"].split()[0]) * _KILOBYTE,
        descriptors=len([*(process / "fd").iterdir()]),
        threads=int(status["Threads"]),
        disk_bytes=_bytes_below(run_dir),
        step_seconds=seconds,
    )


def _bytes_below(folder: Path) -> int:
    """Size of all files in a folder; files may disappear during counting."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


if __name__ == "__main__":
    main()
