"""The soak sees what grows, and watches a real run."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import soak
from benchmarks.soak import Sighting, measure_growth, watch_run


def sightings(resident_bytes, step_seconds=lambda step: 2.0):
    return [
        Sighting(
            step=step,
            resident_bytes=resident_bytes(step),
            descriptors=7,
            threads=9,
            disk_bytes=1_000 * step,
            step_seconds=step_seconds(step),
        )
        for step in range(1, 101)
    ]


def growth_of(seen, name):
    return next(growth for growth in measure_growth(seen) if growth.name == name)


def test_growth_is_the_slope_after_the_warm_up():
    # Caches fill for 20 steps; what leaks is 200 KB a step from then on.
    growth = growth_of(
        sightings(lambda step: 10**9 if step <= 20 else 2 * 10**9 + 200_000 * step),
        "resident_bytes",
    )
    assert growth.slope == pytest.approx(200_000)
    # Medians of steps 21..28 and 93..100.
    assert growth.first == 2 * 10**9 + 200_000 * 24.5
    assert growth.last == 2 * 10**9 + 200_000 * 96.5
    assert not growth.is_flat
    assert all(growth.is_flat for growth in measure_growth(sightings(lambda step: 10**9)))


def test_steps_that_slow_down_are_noticed():
    # 0.1 % of 2 s more every step.
    growth = growth_of(
        sightings(lambda step: 10**9, lambda step: 2.0 + 0.002 * (step - 60.5)), "step_seconds"
    )
    assert growth.limit == pytest.approx(0.001)
    assert growth.slope == pytest.approx(0.002)
    assert not growth.is_flat


def test_soak_fails_where_a_limit_is_missed_and_it_is_to(monkeypatch, capsys):
    seen = sightings(lambda step: 10**9 + 10**6 * step)
    monkeypatch.setattr(soak, "watch_run", lambda *_: iter(seen))
    soak.main([])
    assert "GROWS" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        soak.main(["--strict"])


@pytest.mark.long
def test_watch_run_sees_every_step_of_a_real_run(tmp_path):
    seen = [*watch_run(tmp_path, 3, ["reward.overlap=false", "trackers=[]"])]
    # The process may be gone before its last step is looked at.
    assert [sighting.step for sighting in seen][:2] == [1, 2]
    for sighting in seen:
        assert min(dataclasses.astuple(sighting)) > 0
        assert sighting.resident_bytes > 10**8
