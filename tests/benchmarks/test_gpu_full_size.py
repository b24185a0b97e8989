"""The script for the full size runs whole at a small one, and its figures are what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_full_size
from benchmarks.full_size.measuring import PeakClock, speed_of
from benchmarks.full_size.models import random_decoder_part, random_language_part
from benchmarks.full_size.scale import SCALES, Bench
from benchmarks.full_size.tokens import token_step
from glm_grpo.models.glm_image.meta import PUBLISHED_ID
from glm_grpo.plan.devices import DEVICES, DeviceSpeed

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--size", "small", "--device", "cpu"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("figures") / "report.json"
    gpu_full_size.main([*SMALL, "--json", str(path)])
    return json.loads(path.read_text())


def test_report_says_what_was_measured_on_what(report):
    assert report["size"] == "small"
    assert report["device"]["name"] == "CPU"
    assert not report["device"]["is_published"]
    assert report["machine"]["torch"] == version("torch")
    assert list(report["sections"]) == ["token_step", "generate", "decode", "step"]
    assert report["left_out"] == []


def test_token_steps_are_held_against_their_floor(report):
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


def test_stock_generate_draws_the_same_grids(report):
    (row,) = report["sections"]["generate"]
    assert row["tokens"] == 260
    rates = row["tokens_per_second"] / row["stock_tokens_per_second"]
    assert row["ratio"] == pytest.approx(rates)


def test_decoding_is_held_against_its_operations(report):
    small, large = report["sections"]["decode"]
    assert (small["side"], large["side"]) == (64, 128)
    # Four times the pixels; attention grows faster, what is done once a picture less.
    assert large["floor_seconds"] == pytest.approx(4 * small["floor_seconds"], rel=0.2)
    assert small["ratio"] > 1


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


def test_sections_can_be_chosen_and_none_begins_when_time_is_over(tmp_path):
    path = tmp_path / "report.json"
    gpu_full_size.main([*SMALL, "--only", "decode", "--minutes", "0", "--json", str(path)])
    report = json.loads(path.read_text())
    assert report["sections"] == {"decode": []}
    assert report["left_out"] == ["decode"]


def test_figures_are_written_after_every_row(tmp_path, monkeypatch):
    def failing(bench):
        yield {"side": 1}
        raise RuntimeError("the machine went away")

    monkeypatch.setattr(gpu_full_size, "SECTIONS", {"decode": failing})
    path = tmp_path / "report.json"
    with pytest.raises(RuntimeError, match="went away"):
        gpu_full_size.main([*SMALL, "--only", "decode", "--json", str(path)])
    assert json.loads(path.read_text())["sections"] == {"decode": [{"side": 1}]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator")
def test_script_measures_nothing_where_there_is_no_accelerator(tmp_path, capsys):
    path = tmp_path / "report.json"
    gpu_full_size.main(["--json", str(path)])
    assert "no accelerator" in capsys.readouterr().out
    assert not path.exists()


def test_floor_of_a_token_step_is_bytes_over_bandwidth():
    slow = DeviceSpeed("slow", bandwidth=1e6, flops=1e18, link=1e6)
    bench = Bench(SCALES["small"], torch.device("cpu"), slow)
    row = next(token_step(bench))
    language = bench.scale.configs
    parts = random_language_part(language, torch.float32, bench.device)
    model = parts["vision_language_encoder"].model.language_model
    matrices = sum(p.nbytes for name, p in model.named_parameters() if "embed" not in name)
    # Head, adapters and the cache are read besides.
    assert matrices / 1e6 < row["floor_seconds"] < 2 * matrices / 1e6


def test_random_parts_have_the_type_asked_for_and_are_frozen():
    configs = SCALES["small"].configs
    cpu = torch.device("cpu")
    parts = random_language_part(configs, torch.bfloat16, cpu)
    parts |= random_decoder_part(configs, torch.bfloat16, cpu)
    for name in ("vision_language_encoder", "transformer", "vae", "text_encoder"):
        weights = [*parts[name].parameters()]
        assert {weight.dtype for weight in weights} == {torch.bfloat16}
        assert not any(weight.requires_grad for weight in weights)
        assert not parts[name].training
    assert torch.get_default_dtype() == torch.float32


def test_full_scale_runs_the_configs_of_the_cards():
    full = Bench(SCALES["full"], torch.device("cpu"), DEVICES["h100"])
    config = full.config(24, 512, 8)
    assert config.model.path == PUBLISHED_ID
    assert config.offload == "modules"
    assert [*config.reward.terms] == ["ssim"]
    assert (config.rollout.prompts_per_step, config.rollout.group_size) == (8, 8)


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


METERED = """
import json
import psutil
import torch
from benchmarks.full_size.measuring import ProcessMeter

resident = lambda: psutil.Process().memory_info().rss
torch.ones(1)
meter, before = ProcessMeter(), resident()
block = torch.ones(2**26)  # 256 MiB
grown, peak = resident() - before, meter.peak()
del block
meter.reset()
print(json.dumps([grown, peak, meter.peak()]))
"""


def test_process_meter_sees_what_was_allocated_and_forgets_it_when_reset():
    # A process of its own: what other tests began in this one comes and goes.
    done = subprocess.run(
        [sys.executable, "-c", METERED], cwd=ROOT, check=True, capture_output=True, text=True
    )
    grown, peak, afterwards = json.loads(done.stdout.splitlines()[-1])
    if grown < 0.9 * 2**28:
        pytest.skip(f"this system counts {grown} bytes where a process took 256 MiB")
    assert 0.9 * 2**28 < peak < 1.2 * 2**28
    assert afterwards < 0.2 * 2**28


def test_speed_of_an_unknown_device_is_measured():
    speed, is_published = speed_of(torch.device("cpu"))
    assert not is_published
    assert speed.bandwidth > 1e8
    assert speed.flops > 1e8
