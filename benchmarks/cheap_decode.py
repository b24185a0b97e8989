"""Images a second against rank correlation with the full decode, by denoising steps.

python -m benchmarks.cheap_decode [--prompts 8] [--group 8] [--repeats 3] [--json FILE]
                                  [--picture docs/images/cheap_decode.png]

The embedded model samples images for as many prompts. The same tokens are decoded with 1, 2, 3 and
all 4 steps of configs/tiny.yaml, in turns, and scored by its reward. Printed for each: images a
second (drawn, not scored; medians), and Spearman's correlation with the scores of the full decode,
inside groups, for each term and for the total.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from glm_grpo.builders.models import build_models
from glm_grpo.builders.prompts import build_batch, build_prompts
from glm_grpo.builders.settings import collect_settings
from glm_grpo.config import compose_config
from glm_grpo.gallery.chart_style import FONT_SIZE, LIGHT, begin_figure, style_axes, to_png
from glm_grpo.models.base import Decoder
from glm_grpo.training.monitors.recheck import compare_ranks
from glm_grpo.types import PromptBatch, Rollout

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TOTAL = "total"


@dataclass(frozen=True)
class Measured:
    """The decode with some number of steps.

    Attributes:
        images_per_second: Drawn, not scored; median.
        rank_correlations: With the full decode, by term, and `total`; NaN without an order.
    """

    steps: int
    images_per_second: float
    slowest: float
    fastest: float
    rank_correlations: Mapping[str, float]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args(arguments)
    rows = _measure(options)
    ratio = rows[0].images_per_second / rows[-1].images_per_second
    _print_table(rows)
    sys.stdout.write(f"{rows[0].steps} step against {rows[-1].steps}: {ratio:.2f} x\n")
    if options.json is not None:
        report = {
            "prompts": options.prompts,
            "group": options.group,
            "repeats": options.repeats,
            "threads": torch.get_num_threads(),
            "ratio": ratio,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if options.picture is not None:
        options.picture.write_bytes(_draw(rows))


def _measure(options: argparse.Namespace) -> list[Measured]:
    """From one step to the full decode."""
    images = options.prompts * options.group
    config = compose_config(
        CONFIGS,
        "tiny",
        [
            f"rollout.prompts_per_step={options.prompts}",
            f"rollout.group_size={options.group}",
            f"train.micro_batch_size={images}",
        ],
    )
    models = build_models(config, torch.device("cpu"), needs_reference=False)
    batch = build_batch(config, build_prompts(config).training, 0)
    settings = collect_settings(config)
    rollout = models.policy.sample(batch, policy_step=0)
    decoders = [models.decoder.with_steps(steps + 1) for steps in range(models.decoder.steps)]
    seconds: list[list[float]] = [[] for _ in decoders]
    pictures = [_decode_timed(decoder, batch, rollout)[0] for decoder in decoders]
    for _ in range(options.repeats):
        for decoder, times in zip(decoders, seconds, strict=True):
            times.append(_decode_timed(decoder, batch, rollout)[1])
    tables = [models.scorer.score(batch.prompts, drawn) for drawn in pictures]
    rows = []
    for decoder, times, table in zip(decoders, seconds, tables, strict=True):
        agreement = compare_ranks(table, tables[-1], mode=settings.combine)
        row = Measured(
            steps=decoder.steps,
            images_per_second=images / statistics.median(times),
            slowest=images / max(times),
            fastest=images / min(times),
            rank_correlations={**agreement.terms, TOTAL: agreement.total},
        )
        rows.append(row)
    return rows


def _decode_timed(
    decoder: Decoder, batch: PromptBatch, rollout: Rollout
) -> tuple[UInt8[Tensor, "P G 3 H W"], float]:
    started = time.perf_counter()
    pixels = decoder.decode(batch, rollout.token_ids).pixels
    return pixels, time.perf_counter() - started


def _print_table(rows: Sequence[Measured]) -> None:
    names = [*rows[0].rank_correlations]
    sys.stdout.write("steps  images/s" + "".join(f"{name:>11}" for name in names) + "\n")
    for row in rows:
        correlations = "".join(f"{row.rank_correlations[name]:11.3f}" for name in names)
        sys.stdout.write(f"{row.steps:5}  {row.images_per_second:8.1f}{correlations}\n")


def _draw(rows: Sequence[Measured]) -> bytes:
    """A PNG: a line for each term, a broad one for the total; points are numbers of steps."""
    theme = LIGHT
    figure = begin_figure(theme, height=3.2)
    axes = figure.add_subplot()
    style_axes(axes, theme)
    speeds = [row.images_per_second for row in rows]
    names = [*rows[0].rank_correlations]
    for name, colour in zip(reversed(names), theme.series, strict=False):
        axes.plot(
            speeds,
            [row.rank_correlations[name] for row in rows],
            marker="o",
            label=name,
            color=colour,
            linewidth=3.0 if name == TOTAL else 1.4,
            markersize=7.0 if name == TOTAL else 4.0,
            zorder=1.0 if name == TOTAL else 2.0,
        )
    lowest = min(value for row in rows for value in row.rank_correlations.values())
    for row in rows:
        axes.annotate(
            f"{row.steps} {'step' if row.steps == 1 else 'steps'}",
            (row.images_per_second, 1.0),
            xytext=(0.0, 7.0),
            textcoords="offset points",
            ha="center",
            fontsize=FONT_SIZE,
            color=theme.ink,
        )
    axes.set_ylim(min(lowest, 0.9) - 0.01, 1.015)
    axes.set_yticks([tick for tick in axes.get_yticks() if tick <= 1.0])
    axes.margins(x=0.1)
    axes.set_xlabel("images/s, drawn and not scored", color=theme.ink, fontsize=FONT_SIZE)
    axes.set_ylabel("rank correlation in groups", color=theme.ink, fontsize=FONT_SIZE)
    axes.legend(loc="lower left", frameon=False, fontsize=FONT_SIZE, labelcolor=theme.ink)
    return to_png(figure)


if __name__ == "__main__":
    main()
