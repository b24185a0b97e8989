"""What a run measured stands beside the floors of its own config."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console

from glm_grpo.cli import main
from glm_grpo.commands.plan import plan_config
from glm_grpo.config import compose_config
from glm_grpo.errors import StorageError
from glm_grpo.models.find import find_model
from glm_grpo.models.planning import UNDIVIDED
from glm_grpo.plan.devices import DEVICES, DeviceSpeed, Hardware
from glm_grpo.plan.floors import PhaseFloor, step_work, work_of_run
from glm_grpo.plan.measured import device_lines, measured_seconds, measured_table
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.provenance import Provenance, write_provenance

DEVICE = DeviceSpeed("a card", bandwidth=1.0, flops=100.0, link=1.0)
FLOORS = {
    "rollout": PhaseFloor(2.0, 10.0),
    "decode": PhaseFloor(1.0, 100.0),
    "offload": PhaseFloor(0.5),
}


@pytest.fixture
def make_run(tmp_path):
    """Writes steps into a run folder."""

    def make(*steps):
        folder = RunFolder(tmp_path / "a-run")
        folder.path.mkdir()
        rows = [
            {"step": number, **{f"time/{name}": value for name, value in times.items()}}
            for number, times in enumerate(steps)
        ]
        folder.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return make


def _step(rollout, decode, step):
    return {"rollout": rollout, "decode": decode, "step": step}


@pytest.fixture
def run(make_run):
    # The evaluation of step 0, and a first step that does not count.
    return make_run(
        {"evaluation": 50.0},
        _step(90.0, 90.0, 900.0),
        _step(3.0, 2.0, 6.0),
        _step(4.0, 4.0, 9.0) | {"evaluation": 50.0, "records": 7.0},
        _step(5.0, 9.0, 16.0),
    )


def test_measured_seconds_are_medians_without_the_first_step(run):
    # Between phases 1, 1 and 2 s.
    assert measured_seconds(run) == {
        "rollout": 4.0,
        "decode": 4.0,
        "between phases": 1.0,
        "step": 9.0,
    }


def test_measured_seconds_need_a_second_step(make_run):
    with pytest.raises(StorageError, match="two steps"):
        measured_seconds(make_run({"evaluation": 1.0}, _step(1.0, 1.0, 2.0)))


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_measured_table_has_ratios_and_utilisation(run, capsys, is_asynchronous):
    table = measured_table(run, FLOORS, DEVICE, is_asynchronous=is_asynchronous)
    Console(width=80).print(table)
    rows = [line.strip(" │").split("│") for line in capsys.readouterr().out.splitlines()]
    found = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows if len(row) == 5}
    expected = {
        "rollout": ["2 s", "4 s", "2 x", "2.5%"],
        "decode": ["1 s", "4 s", "4 x", "25.0%"],
        "between phases": ["500 ms", "1 s", "2 x", "-"],
        # 110 operations in 9 s.
        "step": ["3.5 s", "9 s", "2.57 x", "12.2%"],
    }
    assert found == dict([*expected.items()][: 2 if is_asynchronous else 4])


@pytest.mark.parametrize(
    ("devices", "number"),
    [
        ("", 0),
        ("NVIDIA H200", 0),
        ("2 x NVIDIA H200", 0),
        ("CPU (2 threads)", 1),
        ("NVIDIA H200; NVIDIA H100 80GB HBM3", 1),
    ],
)
def test_another_device_than_that_of_the_run_is_named(run, devices, number):
    assert device_lines(run, DEVICES["h200"]) == []
    write_provenance(run, Provenance("2026-01-01", {}, {}, {}, {}, {}, devices=devices))
    lines = device_lines(run, DEVICES["h200"])
    assert len(lines) == number
    assert all(f"on {devices}: " in line and "H200 SXM" in line for line in lines)


def test_plan_of_a_run_asks_not_whether_it_fits(run, configs_dir):
    # It did, perhaps on several devices.
    parts = plan_config(
        compose_config(configs_dir, "tiny", []),
        memory=None,
        prompt_tokens=None,
        hardware=Hardware([DEVICES["h200"]], memory=1),
        parallelism=UNDIVIDED,
        measured=run,
    )
    assert not any("it fits" in str(part) or "expect about" in str(part) for part in parts)


def test_plan_of_a_run_takes_no_other_config(tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["plan", "--measured", str(tmp_path), "ocr=1"])
    assert refused.value.code == 2
    assert "--measured" in capsys.readouterr().err


class Captions:
    """Prompts of 1, 4 and 400 words."""

    def captions(self):
        return ["sign " * count for count in (400, 1, 4)]


def test_work_of_a_run_is_that_of_its_median_prompt_on_a_known_card(configs_dir, monkeypatch):
    planner, card = find_model("tiny").planner(), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    overrides = ["rollout.height=64", "rollout.width=64"]
    config = compose_config(configs_dir, "tiny", overrides)
    tokens = planner.longest_prompt_tokens(["sign " * 4], height=64, width=64)
    options = {"prompt_tokens": tokens, "device": DEVICES["h200"], "processes": 2}

    work = work_of_run(config, planner, Captions(), card, 2)

    assert work == step_work(config, planner, **options)
    # Of float32, in which the embedded model computes.
    assert work.peak_flops == 2 * 67e12
    collected = compose_config(configs_dir, "tiny", [*overrides, "train.mode=async"])
    elsewhere = work_of_run(collected, planner, Captions(), card, 2)
    assert (elsewhere.rollout, elsewhere.decode) == (0.0, 0.0)
    assert elsewhere.update == work.update
    assert work_of_run(config, planner, Captions(), torch.device("cpu"), 2) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an abacus")
    assert work_of_run(config, planner, Captions(), card, 2) is None
