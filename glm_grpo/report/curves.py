"""Metrics of a run as small curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glm_grpo.tables import MetricsRow

CURVE_WIDTH = 200
CURVE_HEIGHT = 48
_MARGIN = 3
_NAMES = ("reward/mean", "eval/total", "kl/reference", "ratio/clip_fraction")


@dataclass(frozen=True)
class Curve:
    """One metric over the steps, ready to be drawn as an SVG polyline.

    Attributes:
        name: Of the metric.
        points: `x,y` pairs inside `CURVE_WIDTH` by `CURVE_HEIGHT`.
        first: Value at the first step that has one.
        last: Value at the last step that has one.
        low: Smallest value.
        high: Largest value.
    """

    name: str
    points: str
    first: float
    last: float
    low: float
    high: float


def draw_curves(rows: Sequence[MetricsRow]) -> tuple[Curve, ...]:
    """Curves of the rewards, the KL and the clip fraction, of what the run recorded.

    Steps without a finite value are bridged by a straight line, and a metric with fewer than two
    values has no curve.

    Args:
        rows: As `read_metrics` returns them.
    """
    terms = {name: None for row in rows for name in row if _is_term_mean(name)}
    curves = (_draw(name, rows) for name in (*_NAMES[:2], *terms, *_NAMES[2:]))
    return tuple(curve for curve in curves if curve is not None)


def _is_term_mean(name: str) -> bool:
    # `reward/mean` itself is of the total.
    return name.count("/") == 2 and name.startswith("reward/") and name.endswith("/mean")


def _draw(name: str, rows: Sequence[MetricsRow]) -> Curve | None:
    values = [
        (float(step), float(value))
        for row in rows
        if (step := row.get("step")) is not None and (value := row.get(name)) is not None
    ]
    if len(values) < 2:
        return None
    steps = [step for step, _ in values]
    heights = [value for _, value in values]
    low, high = min(heights), max(heights)
    across = _scale(steps, CURVE_WIDTH)
    up = _scale(heights, CURVE_HEIGHT)
    points = " ".join(
        # SVG counts downwards.
        f"{x:.1f},{CURVE_HEIGHT - y:.1f}"
        for x, y in zip(across, up, strict=True)
    )
    return Curve(name, points, first=heights[0], last=heights[-1], low=low, high=high)


def _scale(values: Sequence[float], size: int) -> list[float]:
    """Map values onto the size less its margins; equal values lie in the middle."""
    low, high = min(values), max(values)
    if low == high:
        return [size / 2] * len(values)
    return [_MARGIN + (value - low) / (high - low) * (size - 2 * _MARGIN) for value in values]
