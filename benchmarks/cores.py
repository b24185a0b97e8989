"""Measure the gain of threads on token-sized products, which reveals how close the cores are.

A host may place the cores of a virtual machine far apart, so that exchanging results between them
is slower. Large products hardly notice this, but a token step of small products does: two threads
are then no faster than one.
"""

from __future__ import annotations

import time

import torch

_ROWS, _WIDTH, _OUTPUTS = 16, 160, 768
"""Sizes of the embedded model's largest matrix product at 2 x 8 images."""
_WEIGHTS = 8
_PASSES = 30


def threads_gain() -> float:
    """Ratio of the seconds on one thread to the seconds on all threads in use, for small products.

    Takes about 30 ms, and restores the number of threads.
    """
    rows = torch.ones(_ROWS, _WIDTH)
    weights = [torch.ones(_OUTPUTS, _WIDTH) for _ in range(_WEIGHTS)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = _seconds(rows, weights)
    finally:
        torch.set_num_threads(threads)
    return alone / _seconds(rows, weights)


def _seconds(rows: torch.Tensor, weights: list[torch.Tensor]) -> float:
    _multiply(rows, weights, _PASSES // 4)
    begun = time.perf_counter()
    _multiply(rows, weights, _PASSES)
    return time.perf_counter() - begun


def _multiply(rows: torch.Tensor, weights: list[torch.Tensor], passes: int) -> None:
    for _ in range(passes):
        for weight in weights:
            torch.nn.functional.linear(rows, weight)
