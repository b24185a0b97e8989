"""Draw curves of a healthy run beside those of runs whose learning rate does not suit.

python -m tools.site.curves OUT.svg --score reward/ocr/mean \
    HEALTHY="the rate of the config" SMALL="a hundredth" LARGE="twenty times"

Needs matplotlib, which is no dependency of the package: pip install matplotlib
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

COLOURS = ("#2f855a", "#718096", "#c05621")
WINDOW = 5
"""Steps in the moving average of a score, because each step has other prompts."""


def read_curve(run: Path, name: str) -> tuple[list[int], list[float]]:
    """Read one metric of a run by step, without zeros, which a logarithmic axis cannot show."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    points = [(row["step"], row[name]) for row in rows if row.get(name)]
    return [step for step, _ in points], [value for _, value in points]


def smooth(values: list[float]) -> list[float]:
    """Mean of the last `WINDOW` values at each step."""
    starts = (max(0, end - WINDOW) for end in range(1, len(values) + 1))
    return [sum(values[start:end]) / (end - start) for end, start in enumerate(starts, start=1)]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--score", required=True, help="metric of the first panel")
    parser.add_argument("runs", nargs="+", metavar="RUN=LABEL")
    options = parser.parse_args()
    matplotlib.rcParams.update({"font.size": 9, "svg.hashsalt": "curves", "svg.fonttype": "path"})
    titles = {
        options.score: f"{options.score}\nmean of {WINDOW} steps",
        "kl/reference": "kl/reference\nnats per token",
    }
    figure, axes = plt.subplots(1, len(titles), figsize=(8, 2.8), layout="constrained")
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for run, colour in zip(options.runs, COLOURS, strict=True):
            folder, label = run.split("=", 1)
            steps, values = read_curve(Path(folder), name)
            shown = smooth(values) if name == options.score else values
            axis.plot(steps, shown, color=colour, label=label)
        axis.set_title(title, loc="left", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("step")
        axis.xaxis.get_major_locator().set_params(integer=True)
        if name == "kl/reference":
            axis.set_yscale("log")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(options.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
