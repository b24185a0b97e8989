from __future__ import annotations

import pytest
import torch

from benchmarks import cores


@pytest.fixture(autouse=True)
def three_threads():
    """Torch at three threads, and as it was afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_gain_is_seconds_on_one_thread_over_seconds_on_all(monkeypatch) -> None:
    seconds = {1: 3.0, 3: 2.0}
    monkeypatch.setattr(cores, "_seconds", lambda *_: seconds[torch.get_num_threads()])
    assert cores.threads_gain() == 1.5
    assert torch.get_num_threads() == 3


def test_threads_are_as_before_where_measuring_fails(monkeypatch) -> None:
    def fail(*_: object) -> float:
        raise MemoryError

    monkeypatch.setattr(cores, "_seconds", fail)
    with pytest.raises(MemoryError):
        cores.threads_gain()
    assert torch.get_num_threads() == 3
