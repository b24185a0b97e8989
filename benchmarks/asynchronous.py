"""Measure images per second with and without collectors, for a scorer that waits.

python -m benchmarks.asynchronous [--collectors 2] [--age 1] [--steps 12] [--repeats 3]

Runs train.py on the embedded model with one reward term: a function that waits for a second per
request, like a judge behind HTTP. A request contains a prompt's group of images. Both runs learn
from the same batches; the rate excludes the first two steps, in which models load and the pipeline
fills. Ray must be installed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from jaxtyping import Float32, UInt8
from torch import Tensor

from benchmarks.timing import ROOT, Labels, Result, Target, compare, option_parser, publish
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from rewards.types import Prompt

TARGET = Target("at least", 1.6)
WAIT_SECONDS = 1.0
"""Duration of a request."""
PROMPTS, GROUP, PIXELS = 8, 2, 64
"""Sizes of a step; pictures are small so that the scorer dominates, even on two cores."""
FILLING = 2
"""Number of first steps that do not count."""


def remote_judge(
    prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
) -> Float32[Tensor, " N"]:
    """Mean brightness, 0..1, after the time that a judge takes to answer."""
    del prompts
    time.sleep(WAIT_SECONDS)
    return pixels.float().mean(dim=(1, 2, 3)) / 255


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = option_parser(__doc__)
    parser.add_argument("--collectors", type=int, default=2)
    parser.add_argument("--age", type=int, default=1, help="async.max_policy_age")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args(arguments)
    result = measure(options.collectors, options.age, options.steps, options.repeats)
    publish([result], options.json)


def measure(collectors: int, age: int, steps: int, repeats: int) -> Result:
    """Run the same steps with and without collectors, in turns."""
    mode = (
        "train.mode=async",
        f"async.collectors={collectors}",
        f"async.max_policy_age={age}",
    )
    rates: dict[str, list[float]] = {"async": [], "sync": []}
    for _ in range(repeats):
        rates["sync"].append(images_per_second(steps))
        rates["async"].append(images_per_second(steps, *mode))
    words = "collector" if collectors == 1 else "collectors"
    return compare(
        Labels(
            phase=f"{collectors} {words} at age {age}, scorer waits {WAIT_SECONDS:g} s",
            against="collecting and learning in turns",
            unit="images/s",
            command=(
                f"python -m benchmarks.asynchronous --collectors {collectors} --age {age} "
                f"--steps {steps} --repeats {repeats}"
            ),
        ),
        rates["async"],
        rates["sync"],
        target=TARGET if (collectors, age) == (2, 1) else None,
    )


def images_per_second(steps: int, *overrides: str) -> float:
    """Images per second of a run, without its first steps.

    Raises:
        SystemExit: The run failed; its output is printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        done = subprocess.run(
            [
                *(sys.executable, "train.py", f"run_dir={run_dir}", f"train.steps={steps}"),
                *(f"rollout.prompts_per_step={PROMPTS}", f"rollout.group_size={GROUP}"),
                *(f"rollout.height={PIXELS}", f"rollout.width={PIXELS}"),
                f"train.micro_batch_size={PROMPTS * GROUP}",
                *("train.eval_every=1000", "eval.samples_per_prompt=1", "trackers=[]"),
                *(f"reward.terms.{name}=null" for name in ("lpips", "ssim", "ocr", "aesthetic")),
                "+reward.terms.judge.kind=custom",
                "+reward.terms.judge.function=benchmarks.asynchronous:remote_judge",
                *("+reward.terms.judge.weight=1", "reward.allow_untied=true"),
                f"data.path={_prompts(Path(folder), range(16))}",
                f"data.eval_path={_prompts(Path(folder), range(16, 18))}",
                *overrides,
            ],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            # Both use the same number of threads: a collector computes with one thread.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if done.returncode != 0:
            sys.stderr.write(done.stdout + done.stderr)
            raise SystemExit(f"train.py ended with exit code {done.returncode}")
        rows = read_metrics(RunFolder(run_dir))
    # The evaluation after the last step is not part of that step's time.
    seconds = [float(row["time/step"] or 0) for row in rows[1 + FILLING :]]
    return PROMPTS * GROUP / statistics.mean(seconds)


def _prompts(folder: Path, numbers: range) -> Path:
    path = folder / f"prompts-{numbers.start}.txt"
    path.write_text("".join(f'a red sign "{number}"\n' for number in numbers))
    return path


if __name__ == "__main__":
    main()
