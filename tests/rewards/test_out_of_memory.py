import numpy as np
import pytest
import torch

from rewards.out_of_memory import asked_bytes, is_out_of_memory

FAR_TOO_MUCH = 10**15


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
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        work()
    assert is_out_of_memory(caught.value)
    assert asked_bytes(caught.value) == asked


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        # As torch words them.
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of "
                "23.64 GiB of which 512.00 MiB is free."
            ),
            3 * 2**29,
        ),
        (RuntimeError("CUDA error: out of memory"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), None),
    ],
)
def test_errors_of_cuda_are_known_by_class_or_message(error, asked):
    assert is_out_of_memory(error)
    assert asked_bytes(error) == asked


def test_other_errors_are_not_errors_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not is_out_of_memory(caught.value)
    assert not is_out_of_memory(ValueError("out of memory"))
