"""What the pool makes of a collector that cannot be begun."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray is not installed: pip install -e '.[ray]'",
    ),
]

SCRIPT = """
import sys
from types import ModuleType

from glm_grpo.training.asynchronous.ray_cluster import Needs, RayCluster
from glm_grpo.training.asynchronous.ray_collector import CollectorSettings

# Pickled by its name, which means something in this process alone.
only_here = ModuleType("only_here")
exec("def make(): ...", only_here.__dict__)
only_here.make.__module__ = "only_here"
sys.modules["only_here"] = only_here
needs = Needs(collectors=1, cpus=1, gpus=0.0)
cluster = RayCluster(None, needs)
from glm_grpo.training.asynchronous.ray_pool import RayPool

settings = CollectorSettings(make_models=only_here.make, threads=1, folder=".")
pool = RayPool(cluster, needs, settings)
events = []
while not events:
    events += pool.wait(1.0)
pool.close()
print(type(events[0]).__name__, type(events[0].error).__name__, events[0].error)
"""


def test_a_package_that_a_machine_lacks_is_named_and_tried_once() -> None:
    # Ray reads its settings where it is imported first, which other tests have done in this one.
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240, check=True
    )
    said = done.stdout[done.stdout.index("Unusable CollectorError") :]
    assert "a collector could not be begun" in said
    assert "No module named 'only_here'" in said
