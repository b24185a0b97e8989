"""The full-size GLM-Image with random weights on an accelerator: time against floors, memory.

python -m benchmarks.gpu_full_size [--only token_step generate decode step] [--json FILE]
    [--size full] [--device cuda] [--minutes 9]

Sections: `token_step` (a token of every sample against the bandwidth floor, for 1, 8 and 32
samples), `generate` (tokens a second against the stock pipeline), `decode` (against the floor of
its operations), `step` (whole training steps of configs/glm_image_24gb.yaml and _80gb.yaml, the
process capped at that memory, peaks beside the plan's). Weights are made on the device, nothing is
downloaded; the 24 GB steps keep 42 GB in CPU memory. Figures are written after every row, and no
row is begun once the minutes are over.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.full_size.measuring import speed_of
from benchmarks.full_size.pictures import decode
from benchmarks.full_size.scale import SCALES, Bench
from benchmarks.full_size.tokens import generate, token_step
from benchmarks.full_size.training_step import step
from benchmarks.timing import machine

SECTIONS: Mapping[str, Callable[[Bench], Iterator[dict[str, Any]]]] = {
    "token_step": token_step,
    "generate": generate,
    "decode": decode,
    "step": step,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS], default=[*SECTIONS])
    parser.add_argument("--size", choices=[*SCALES], default="full")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0, help="no row begins after them")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        # Not measured is no failure of the other benchmarks.
        print("no accelerator: nothing measured; --size small --device cpu tries the script")
        return
    ends = time.monotonic() + 60 * options.minutes
    speed, is_published = speed_of(device)
    report: dict[str, Any] = {
        "machine": machine(),
        "size": options.size,
        "device": asdict(speed) | {"is_published": is_published},
        "sections": {},
        "left_out": [],
    }
    print(f"{speed.name}: {speed.bandwidth / 1e9:.0f} GB/s, {speed.flops / 1e12:.3g} TFLOP/s")
    bench = Bench(SCALES[options.size], device, speed)
    for name in options.only:
        report["sections"][name] = rows = []
        for row in _until(SECTIONS[name], bench, ends):
            rows.append(row)
            print(f"{name}: {_line(row)}")
            _write(report, options.json)
        if time.monotonic() >= ends:
            report["left_out"].append(name)
            _write(report, options.json)
            print(f"{name}: cut short, the minutes are over", file=sys.stderr)
        # The next section makes models of its own.
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _until(
    section: Callable[[Bench], Iterator[dict[str, Any]]], bench: Bench, ends: float
) -> Iterator[dict[str, Any]]:
    rows = section(bench)
    while time.monotonic() < ends:
        row = next(rows, None)
        if row is None:
            return
        yield row


def _line(row: Mapping[str, Any]) -> str:
    parts = []
    for key, value in row.items():
        if key == "phases":
            parts += [
                f"{phase} {figures['peak'] / 1e9:.2f} GB (plan {figures['planned'] / 1e9:.2f})"
                for phase, figures in value.items()
            ]
        elif isinstance(value, Mapping):
            parts.append(f"{key} " + ", ".join(f"{k} {v:.3g}" for k, v in value.items()))
        else:
            parts.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
    return "; ".join(parts)


def _write(report: Mapping[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
