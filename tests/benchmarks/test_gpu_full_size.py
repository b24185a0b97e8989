"""The script for the full size runs whole at a small one, and its figures are what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_full_size
from benchmarks.full_size.measuring import PeakClock
from benchmarks.full_size.scale import SCALES, Bench
from glm_grpo.models.glm_image.meta import PUBLISHED_ID
from glm_grpo.plan.devices import DEVICES

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--size", "small", "--device", "cpu"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("figures") / "report.json"
    gpu_full_size.main([*SMALL, "--json", str(path)])
    return json.loads(path.read_text())


@pytest.mark.long
def test_token_steps_are_held_against_their_floor(report):
    assert list(report["sections"]) == ["token_step", "generate", "decode", "step"]
    assert report["left_out"] == []
    rows = report["sections"]["token_step"]
    assert [row["samples"] for row in rows] == [1, 8]
    for row in rows:
        # 16 x 16 of the preview and 2 x 2 of a picture of 64 pixels.
        assert row["tokens"] == 260
        assert row["ratio"] == pytest.approx(row["step_seconds"] / row["floor_seconds"])
        assert row["tokens_per_second"] == pytest.approx(row["samples"] / row["step_seconds"])
        # The bound is the accelerator's.
        assert "is_held" not in row
    # Weights are read once for all samples, keys and values for each.
    assert rows[0]["floor_seconds"] < rows[1]["floor_seconds"] < 8 * rows[0]["floor_seconds"]


@pytest.mark.long
def test_steps_are_complete_with_peaks_beside_the_plan(report):
    rows = report["sections"]["step"]
    assert [(row["card_gigabytes"], row["side"]) for row in rows] == [
        (24, 64),
        (24, 128),
    ]
    for row in rows:
        assert row["is_complete"]
        assert not row["is_capped"]
        assert list(row["phases"]) == ["rollout", "decode", "update", "reward"]
        assert all(figures["planned"] > 0 for figures in row["phases"].values())
        assert sum(row["seconds"][phase] for phase in row["phases"]) <= row["seconds"]["step"]


def test_figures_are_written_after_every_row(tmp_path, monkeypatch):
    def failing(bench):
        yield {"side": 1}
        raise RuntimeError("the machine went away")

    monkeypatch.setattr(gpu_full_size, "SECTIONS", {"decode": failing})
    path = tmp_path / "report.json"
    with pytest.raises(RuntimeError, match="went away"):
        gpu_full_size.main([*SMALL, "--only", "decode", "--json", str(path)])
    assert json.loads(path.read_text())["sections"] == {"decode": [{"side": 1}]}


def test_full_scale_runs_the_configs_of_the_cards():
    full = Bench(SCALES["full"], torch.device("cpu"), DEVICES["h100"])
    config = full.config(24, *full.scale.steps[0])
    assert config.model.path == PUBLISHED_ID
    assert config.offload == "modules"
    assert [*config.reward.terms] == ["ssim"]
    assert (config.rollout.prompts_per_step, config.rollout.group_size) == (4, 8)
    assert (config.rollout.height, config.rollout.width) == (1024, 1024)


def test_peak_clock_takes_the_most_of_each_phase():
    class Readings:
        """A meter whose peaks are known."""

        def __init__(self) -> None:
            self.resets = 0
            self._left = [300, 100, 200]

        def reset(self) -> None:
            self.resets += 1

        def peak(self) -> int:
            return self._left.pop(0)

    meter = Readings()
    clock = PeakClock(meter)
    for name in ("update", "reward", "update"):
        with clock.phase(name):
            pass
    assert clock.peaks == {"update": 300, "reward": 100}
    assert meter.resets == 3
    assert clock.begun == "update"
