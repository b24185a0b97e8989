import numpy as np
import pytest
import torch

from rewards.out_of_memory import asked_bytes, is_out_of_memory

FAR_TOO_MUCH = 10**15


def _raised(work):
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("there was memory enough")


@pytest.mark.parametrize(
    ("work", "asked"),
    [
        # 4 bytes a number; 8 bytes a number, which numpy writes as 7.11 PiB; nothing is said.
        (lambda: torch.empty(FAR_TOO_MUCH), 4 * FAR_TOO_MUCH),
        (lambda: np.empty(FAR_TOO_MUCH), round(7.11 * 2**50)),
        (lambda: bytearray(FAR_TOO_MUCH * 1000), None),
    ],
    ids=["torch", "numpy", "python"],
)
def test_errors_of_memory_are_known_with_what_was_asked_for(work, asked):
    error = _raised(work)
    assert is_out_of_memory(error)
    assert asked_bytes(error) == asked


def test_errors_of_cuda_are_known_by_class_or_message():
    # As torch words them.
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 23.64 GiB "
        "of which 512.00 MiB is free."
    )
    assert is_out_of_memory(error)
    assert asked_bytes(error) == 3 * 2**29
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    handle = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert is_out_of_memory(RuntimeError(handle))
    assert asked_bytes(RuntimeError(handle)) is None


def test_other_errors_are_not_errors_of_memory():
    mismatch = _raised(lambda: torch.ones(2, 3) @ torch.ones(2, 3))
    assert isinstance(mismatch, RuntimeError)
    assert not is_out_of_memory(mismatch)
    assert not is_out_of_memory(ValueError("out of memory"))
