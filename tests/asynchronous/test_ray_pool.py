"""What the pool makes of a collector that cannot be begun."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from glm_grpo.errors import CollectorError
from glm_grpo.training.collector_pool import Unusable
from glm_grpo.training.ray_cluster import Needs, RayCluster
from glm_grpo.training.ray_collector import CollectorSettings

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SECONDS = 120.0


def test_a_package_that_a_machine_lacks_is_named_and_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> None: ...

    # Pickled by its name, which means something here alone.
    only_here = ModuleType("only_here")
    only_here.make = make
    make.__module__, make.__qualname__ = "only_here", "make"
    monkeypatch.setitem(sys.modules, "only_here", only_here)
    needs = Needs(collectors=1, cpus=1, gpus=0.0)
    cluster = RayCluster(None, needs)
    from glm_grpo.training.ray_pool import RayPool  # noqa: PLC0415

    settings = CollectorSettings(make_stage=make, threads=1, folder=str(tmp_path))
    pool = RayPool(cluster, needs, settings)
    try:
        events = []
        end = time.monotonic() + SECONDS
        while not events and time.monotonic() < end:
            events += pool.wait(1.0)
    finally:
        pool.close()
    (event,) = events
    assert isinstance(event, Unusable)
    assert isinstance(event.error, CollectorError)
    assert "No module named 'only_here'" in str(event.error)
