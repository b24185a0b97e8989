"""Recognise out-of-memory errors, of which torch, numpy and Python each have their own."""

from __future__ import annotations

import re

import torch

_SIGNS = (
    "out of memory",  # CUDA and its libraries, also when pinning CPU memory
    "can't allocate memory",  # torch's CPU allocator
    "bad_alloc",  # C++
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Messages of out-of-memory errors without a class of their own."""

_ASKED = re.compile(r"(?:[Tt]ried to allocate|Unable to allocate) ([\d.]+) ([KMGTP]i)?B?(?:ytes)?")

_FACTORS = {None: 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on an accelerator or in CPU memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def asked_bytes(error: BaseException) -> int | None:
    """Size of the failed allocation in bytes; None if the error does not state it."""
    found = _ASKED.search(str(error))
    return None if found is None else round(float(found[1]) * _FACTORS[found[2]])
