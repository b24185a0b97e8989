from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from glm_grpo.errors import ConfigError
from glm_grpo.storage import RunFolder
from glm_grpo.tables import read_metrics
from glm_grpo.training.recorder import Recorder

CONFIG = {"train": {"seed": 1, "resume": None}, "trackers": ["tensorboard"], "offload": True}


def make_recorder(path: Path, *trackers: str) -> Recorder:
    return Recorder(RunFolder(path), trackers=trackers, config=CONFIG, combine="weighted_sum")


def test_tensorboard_receives_finite_values_and_a_resumed_run_overwrites(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, "tensorboard")
    for step in (1, 2, 3):
        recorder.record_step(step, {"reward/mean": float(step), "loss/total": math.nan})
    recorder.close()
    resumed = make_recorder(tmp_path, "tensorboard")
    resumed.truncate_after(1)
    resumed.record_step(2, {"reward/mean": 20.0})
    resumed.close()

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    scalars = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert scalars == [(1, 1.0), (2, 20.0)]


class BrokenTracker(GeneralTracker):  # type: ignore[misc]
    name = "broken"
    requires_logging_directory = False
    tracker = None

    def __init__(self, project: str) -> None:
        super().__init__()
        self.configs: list[dict[str, Any]] = []

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.configs.append(values)
        assert values["train.seed"] == 1

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        raise ConnectionError("unreachable")


class UnstartableTracker(BrokenTracker):
    name = "unstartable"

    def start(self) -> None:
        raise ModuleNotFoundError("no such package")


@pytest.mark.parametrize(
    ("tracker", "reason"),
    [
        (BrokenTracker, "ConnectionError: unreachable"),
        (UnstartableTracker, "ModuleNotFoundError: no such package"),
    ],
)
def test_a_failing_tracker_warns_once_and_stops_nothing(
    tracker: type[BrokenTracker],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, tracker.name, tracker)
    recorder = make_recorder(tmp_path, tracker.name)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            recorder.record_step(step, {"reward/mean": 0.5})
        recorder.close()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert reason in warnings[0]
    assert len(read_metrics(RunFolder(tmp_path))) == 2


def test_recorder_refuses_an_unknown_tracker_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'tensorbord' is unknown\. Choose from .*tensorboard"):
        make_recorder(tmp_path, "tensorbord")
