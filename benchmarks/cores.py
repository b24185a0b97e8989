"""Gain of threads on a product as small as a token's, which tells how near the cores are.

A virtual machine's cores may be moved apart on their host, where each hands results on to the other
more slowly. A large product hardly notices, a token step of small products does: then two threads
are no faster than one.
"""

from __future__ import annotations

import time

import torch

_ROWS, _WIDTH, _OUTPUTS = 16, 160, 768
"""The embedded model's largest map at 2 x 8 images."""
_WEIGHTS = 8
_PASSES = 30


def threads_gain() -> float:
    """Seconds on one thread over seconds on all that are in use, of the same small products.

    Takes about 30 ms. Leaves the number of threads as it was.
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
