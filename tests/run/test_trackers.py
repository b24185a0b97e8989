"""TensorBoard is read back, W&B writes offline; nothing leaves the machine."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, WandBTracker
from accelerate.utils import LoggerType
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.io.gfile import LocalFileSystem

from glm_grpo.config import RunSection
from glm_grpo.errors import ConfigError
from glm_grpo.run import trackers as trackers_module
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.trackers import Trackers, check_trackers, hint_at_trackers
from glm_grpo.run.writing import encode
from glm_grpo.types import Evaluation, Experience, PromptBatch, Rollout

ABOUT = RunSection(name="larger groups", notes="As before,\nwith 16 images.", tags=("ocr", "wide"))
CONFIG = {"train": {"seed": 1, "resume": None}, "trackers": ["tensorboard"], "offload": True}
NAMES = ("reward/mean", "reward/ocr/advantage_share", "correlation/lpips/ssim")

OPT_OUTS = {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
}


@pytest.fixture(autouse=True, scope="module")
def local_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No network, no account, and nothing outside the folders of the tests."""
    here = tmp_path_factory.mktemp("here")
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith("WANDB_"):
                patch.delenv(name)
        for name, value in OPT_OUTS.items():
            patch.setenv(name, value)
        patch.setenv("WANDB_CACHE_DIR", str(here / "cache"))
        patch.chdir(here)
        # As in a run, which has an Accelerator: accelerate's trackers ask it for the main process.
        PartialState()
        yield
    assert {path.name for path in here.iterdir()} <= {"cache"}


def skip_without(package: str) -> None:
    """Does not import it, which has effects of its own."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def log_run(path: Path, name: str, evaluation: Evaluation) -> None:
    """Evaluations at steps 0 and 2, a step between them, and an end."""
    trackers = Trackers((name,), RunFolder(path), CONFIG, ABOUT)
    trackers.log_evaluation(replace(evaluation, step=0))
    for step in (0, 1):
        trackers.log(step, values_of(step))
    trackers.log_groups(experience_of(evaluation), encode(evaluation.images), 1)
    trackers.log_evaluation(replace(evaluation, step=2))
    trackers.log(2, values_of(2))
    trackers.close()


def experience_of(evaluation: Evaluation) -> Experience:
    """A step that sampled and scored the same; without pixels, as it is recorded."""
    totals, seeds = evaluation.totals, evaluation.images.decode_seeds
    pixels = evaluation.images.pixels[..., :0, :0]
    return Experience(
        prompts=PromptBatch(evaluation.prompts, totals.shape[1], 32, 32, 0, seeds),
        rollout=Rollout(torch.zeros(*totals.shape, 1).long(), torch.zeros(*totals.shape, 1), None),
        images=replace(evaluation.images, pixels=pixels),
        scores=evaluation.scores,
        totals=totals,
        penalties=torch.zeros_like(totals),
        advantages=(totals - totals.nanmean()).nan_to_num()[..., None],
    )


def log_resumed_run(path: Path, name: str, evaluation: Evaluation) -> None:
    """The same run, killed and resumed from its checkpoint of step 1: step 2 comes again."""
    config = {**CONFIG, "train": {"seed": 1, "resume": "auto"}}
    trackers = Trackers((name,), RunFolder(path), config, ABOUT, first_step=2)
    trackers.log_evaluation(replace(evaluation, step=2))
    for step in (2, 3):
        trackers.log(step, values_of(step))
    trackers.close()


def values_of(step: int) -> dict[str, float]:
    return {**dict.fromkeys(NAMES, step + 0.5), "loss/total": math.nan}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory, make_evaluation) -> Path:
    """The folder of a run that was resumed, with TensorBoard's records of it."""
    folder = tmp_path_factory.mktemp("tensorboard") / "2026-11-21" / "16-02-07"
    log_run(folder, "tensorboard", make_evaluation())
    # Its files are read in the order of the seconds in which they were begun.
    time.sleep(1.1)
    log_resumed_run(folder, "tensorboard", make_evaluation())
    return folder


def read_events(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_tensorboard_receives_finite_values_and_a_resumed_run_overwrites(logged) -> None:
    events = read_events(logged)

    assert events.Tags()["scalars"] == list(NAMES)
    for name in NAMES:
        scalars = [(event.step, event.value) for event in events.Scalars(name)]
        assert scalars == [(0, 0.5), (1, 1.5), (2, 2.5), (3, 3.5)]


def test_tensorboard_shows_a_strip_a_prompt_and_a_table_of_scores_and_notes(logged) -> None:
    events = read_events(logged)

    (said,) = events.Tensors("run/text_summary")[0].tensor_proto.string_val
    assert said.decode().split("\n\n") == [ABOUT.name, ABOUT.notes, "ocr, wide"]
    # Beside the run there is no other, such as a folder for the configuration.
    assert {path.is_file() for path in (logged / "tensorboard").iterdir()} == {True}
    groups = ["rollout/group 1", "rollout/group 2"]
    assert events.Tags()["images"] == ["evaluation/sign", "evaluation/field-1", *groups]
    strips = events.Images("evaluation/sign")
    # Target and two samples of 8 pixels, two gaps of 4.
    assert [(strip.step, strip.width, strip.height) for strip in strips] == [(0, 32, 4), (2, 32, 4)]
    (text,) = events.Tensors("evaluation/table/text_summary")[0].tensor_proto.string_val
    lines = text.decode().splitlines()
    assert lines[0] == "| prompt_id | prompt | sample | total | clip | ocr | ocr note |"
    assert lines[3] == '| sign | a sign "CAT" | 1 | 0.020 | 0.010 | 0.010 | word 1 |'
    assert lines[5] == "| field-1 | a \\| field | 1 | 0.220 | 0.110 |  |  |"


def test_tensorboard_shows_the_groups_of_a_step_and_how_their_rewards_are_spread(logged) -> None:
    events = read_events(logged)

    (text,) = events.Tensors("rollout/table/text_summary")[0].tensor_proto.string_val
    lines = text.decode().splitlines()
    assert lines[0].startswith("| prompt_id | prompt | sample | total | advantage | clip | ocr |")
    # The best image first: totals 0 and 0.02.
    assert lines[2] == '| sign | a sign "CAT" | 1 | 0.020 | -0.090 | 0.010 | 0.010 | word 1 |'
    assert [strip.step for strip in events.Images("rollout/group 1")] == [1]
    (rewards,) = events.Histograms("rollout/reward")
    (advantages,) = events.Histograms("rollout/advantage")
    assert (rewards.step, rewards.histogram_value.num) == (1, 4)
    assert rewards.histogram_value.max == pytest.approx(0.22)
    assert advantages.histogram_value.sum == pytest.approx(0.0, abs=1e-6)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_goes_on_after_a_write_that_failed(
    tmp_path: Path, make_evaluation, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    trackers = Trackers(("tensorboard",), RunFolder(tmp_path), CONFIG, ABOUT, first_step=1)
    trackers.log(1, values_of(1))
    append = LocalFileSystem.append

    def fill(files: LocalFileSystem, path: str, content: bytes, binary_mode: bool) -> None:
        append(files, path, content[: len(content) // 2], binary_mode)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "append", fill)
        trackers.log(2, values_of(2))
    trackers.log_evaluation(replace(make_evaluation(), step=2))
    trackers.log(3, values_of(3))
    trackers.close()

    warning, _ = caplog.messages
    assert "No space left on device" in warning
    events = read_events(tmp_path)
    for name in NAMES:
        scalars = [(event.step, event.value) for event in events.Scalars(name)]
        assert scalars == [(1, 1.5), (3, 3.5)]
    assert [strip.step for strip in events.Images("evaluation/sign")] == [2]


def test_tensorboard_shows_an_image_without_a_total_last_and_without_a_number(
    tmp_path: Path, make_evaluation
) -> None:
    evaluation = make_evaluation()
    evaluation.scores.raw[0, 1, 0] = evaluation.totals[0, 1] = math.nan
    log_run(tmp_path, "tensorboard", evaluation)
    events = read_events(tmp_path)
    (text,) = events.Tensors("rollout/table/text_summary")[0].tensor_proto.string_val
    lines = [line.split(" | ") for line in text.decode().splitlines()]
    assert [line[2] for line in lines[2:4]] == ["0", "1"]
    assert (lines[3][3], lines[3][5]) == ("", "")
    (rewards,) = events.Histograms("rollout/reward")
    assert rewards.histogram_value.num == 3


def wandb_files(folder: Path) -> list[Path]:
    """Offline, each start has a file; `wandb sync` puts those of one id into one run."""
    return sorted((folder / "wandb").glob("offline-run-*/*.wandb"))


def test_wandb_shows_images_and_goes_on_in_the_same_run_inside_the_run_folder(
    tmp_path: Path, make_evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without("wandb")
    logged: list[tuple[int, dict[str, Any]]] = []
    log = WandBTracker.log

    def log_and_note(self: WandBTracker, values: dict[str, Any], step: int) -> None:
        logged.append((step, values))
        log(self, values, step=step)

    monkeypatch.setattr(WandBTracker, "log", log_and_note)
    log_run(tmp_path, "wandb", make_evaluation())
    log_resumed_run(tmp_path, "wandb", make_evaluation())

    run_id = json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    assert [file.name for file in wandb_files(tmp_path)] == [f"run-{run_id}.wandb"] * 2
    metrics = [(step, values) for step, values in logged if NAMES[0] in values]
    assert metrics == [(step, dict.fromkeys(NAMES, step + 0.5)) for step in (0, 1, 2, 2, 3)]
    tables = [(step, values["evaluation"]) for step, values in logged if "evaluation" in values]
    assert [step for step, _ in tables] == [0, 2, 2]
    rows = [dict(zip(tables[0][1].columns, row, strict=True)) for row in tables[0][1].data]
    assert [row["ocr note"] for row in rows] == ["word 0", "word 1", None, None]
    assert rows[1]["image"].image.getpixel((0, 0)) == (1, 1, 1)
    assert rows[2]["target"] is None
    assert any({"rollout/reward", "rollout/advantage"} <= values.keys() for _, values in logged)
    assert "WANDB_DATA_DIR" not in os.environ


def test_wandb_does_as_the_environment_says(
    tmp_path: Path, make_evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without("wandb")
    # It reads its variables once a process.
    importlib.import_module("wandb").teardown()
    variables = {"WANDB_DIR": str(tmp_path), "WANDB_RUN_ID": "mine"}
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    log_run(tmp_path / "run", "wandb", make_evaluation())

    assert [path.name for path in wandb_files(tmp_path)] == ["run-mine.wandb"]


class PlainTracker(GeneralTracker):  # type: ignore[misc]
    """Of a user's own, registered with accelerate: takes metrics, knows no images."""

    name = "plain"
    requires_logging_directory = False
    tracker = None
    logged: list[int | None] = []  # noqa: RUF012 - one list for all that are made

    def __init__(self, project: str) -> None:
        super().__init__()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        assert values["train.seed"] == 1

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.logged.append(step)


class BrokenTracker(PlainTracker):
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        raise ConnectionError("unreachable")


class UnstartableTracker(PlainTracker):
    def start(self) -> None:
        raise PermissionError("no such key")


@pytest.mark.parametrize(
    ("tracker", "reason"),
    [
        (BrokenTracker, "ConnectionError: unreachable"),
        (UnstartableTracker, "PermissionError: no such key"),
    ],
)
def test_a_failing_tracker_warns_at_once_and_at_the_end_and_stops_nothing(
    tracker: type[PlainTracker],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "plain", tracker)
    trackers = Trackers(("plain",), RunFolder(tmp_path), CONFIG, ABOUT)
    for step in (1, 2):
        trackers.log(step, {"reward/mean": 0.5})
    (warning,) = caplog.messages
    assert reason in warning
    trackers.close()
    (_, repeated) = caplog.messages
    assert repeated.startswith(f"Tracker plain failed during the run ({reason})")


def test_other_trackers_get_metrics_and_no_images(
    tmp_path: Path, make_evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "plain", PlainTracker)
    log_run(tmp_path, "plain", make_evaluation())

    assert PlainTracker.logged == [0, 1, 2]


def test_a_tracker_that_is_not_installed_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers_module, "get_available_trackers", lambda: [LoggerType.TENSORBOARD])
    check_trackers(["tensorboard"])
    with pytest.raises(ConfigError, match="'wandb' .*pip install wandb"):
        check_trackers(["tensorboard", "wandb"])


@pytest.mark.parametrize(
    ("variables", "entry", "is_hinted"),
    [
        ({}, "machine elsewhere login user password key", True),
        ({}, "machine api.wandb.ai login user password key", False),
        ({"WANDB_API_KEY": "key"}, "", False),
        ({"WANDB_MODE": "offline"}, "", False),
    ],
)
def test_wandb_without_a_key_is_hinted_at(
    variables: dict[str, str],
    entry: str,
    is_hinted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skip_without("wandb")
    (tmp_path / "netrc").write_text(entry)
    monkeypatch.delenv("WANDB_MODE")
    for name, value in {"NETRC": str(tmp_path / "netrc"), **variables}.items():
        monkeypatch.setenv(name, value)
    hints = hint_at_trackers(["tensorboard", "wandb"])
    assert [hint.partition(":")[0] for hint in hints] == ["wandb"] * is_hinted
    assert hint_at_trackers(["tensorboard"]) == []
