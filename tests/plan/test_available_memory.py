import pytest
import torch

from glm_grpo.plan.machine_memory import available_memory, cpu_memory


@pytest.fixture
def meminfo(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       9000 kB\nMemAvailable:   2000 kB\nSwapFree:  5 kB\n")
    return path


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("1000000\n", 1_000_000),
        # A limit beyond the machine, as where there is none in the first version.
        ("9223372036854771712\n", 2_048_000),
        ("max\n", 2_048_000),
    ],
)
def test_cpu_memory_is_what_is_available_at_most_what_the_container_may_have(
    tmp_path, meminfo, limit, expected
):
    path = tmp_path / "memory.max"
    path.write_text(limit)
    assert cpu_memory(meminfo, [path, tmp_path / "missing"]) == expected


def test_cpu_memory_is_unknown_where_the_system_does_not_say(tmp_path, meminfo):
    assert cpu_memory(tmp_path / "missing", []) is None
    meminfo.write_text("MemTotal: 9000 kB\n")
    assert cpu_memory(meminfo, []) is None


def test_available_memory_is_that_of_the_device():
    assert available_memory(torch.device("meta")) is None
    there = available_memory(torch.device("cpu"))
    assert there is None or there > 0
