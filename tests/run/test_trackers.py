"""Each tracker is read back with its own reader; nothing leaves the machine."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import logging
import math
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from accelerate.utils import LoggerType
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from glm_grpo.config import RunSection
from glm_grpo.errors import ConfigError
from glm_grpo.run import trackers as trackers_module
from glm_grpo.run.folder import RunFolder, append_line
from glm_grpo.run.recorder import Recorder, encode
from glm_grpo.run.tables import read_metrics
from glm_grpo.run.trackers import Trackers, check_trackers
from glm_grpo.run.wandb_file import last_wandb_step, wandb_records
from glm_grpo.types import Advantages, Evaluation, Experience, PromptBatch, Rollout

ABOUT = RunSection(name="larger groups", notes="As before,\nwith 16 images.", tags=("ocr", "wide"))
CONFIG = {"train": {"seed": 1, "resume": None}, "trackers": ["tensorboard"], "offload": True}
NAMES = ("reward/mean", "reward/ocr/advantage_share", "correlation/lpips/ssim")

OPT_OUTS = {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(autouse=True, scope="module")
def local_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No network, no account, and nothing outside the folders of the tests."""
    here = tmp_path_factory.mktemp("here")
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_", "HF_TOKEN")):
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


def make_recorder(path: Path, *trackers: str) -> Recorder:
    return Recorder(RunFolder(path), trackers=trackers, config=CONFIG, combine="weighted_sum")


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
        rewards=evaluation.rewards,
        totals=totals,
        penalties=torch.zeros_like(totals),
        advantages=Advantages(totals - totals.mean(), torch.zeros(len(totals), dtype=torch.bool)),
    )


def log_resumed_run(path: Path, name: str, evaluation: Evaluation) -> None:
    """The same run, killed and resumed from its checkpoint of step 1: step 2 comes again."""
    config = {**CONFIG, "train": {"seed": 1, "resume": "auto"}}
    trackers = Trackers((name,), RunFolder(path), config, ABOUT)
    trackers.go_on_after(1)
    trackers.log_evaluation(replace(evaluation, step=2))
    for step in (2, 3):
        trackers.log(step, values_of(step))
    trackers.close()


def values_of(step: int) -> dict[str, float]:
    return {**dict.fromkeys(NAMES, step + 0.5), "loss/total": math.nan}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory, make_evaluation) -> Callable[[str], Path]:
    """The folder of a run that was resumed, with a tracker's records of it."""

    @functools.cache
    def log(name: str) -> Path:
        skip_without(name)
        # Trackio reads its folder when it is imported, which another test may have done.
        for module in [each for each in sys.modules if each.split(".")[0] == name == "trackio"]:
            del sys.modules[module]
        folder = tmp_path_factory.mktemp(name) / "2026-11-21" / "16-02-07"
        log_run(folder, name, make_evaluation())
        if name == "tensorboard":
            # Its files are read in the order of the seconds in which they were begun.
            time.sleep(1.1)
        log_resumed_run(folder, name, make_evaluation())
        return folder

    return log


def read_events(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_tensorboard_receives_finite_values_and_a_resumed_run_overwrites(logged) -> None:
    events = read_events(logged("tensorboard"))

    assert events.Tags()["scalars"] == list(NAMES)
    for name in NAMES:
        scalars = [(event.step, event.value) for event in events.Scalars(name)]
        assert scalars == [(0, 0.5), (1, 1.5), (2, 2.5), (3, 3.5)]


def test_tensorboard_keeps_a_step_whose_evaluation_alone_is_made_up_for(
    tmp_path: Path, make_evaluation
) -> None:
    trackers = Trackers(("tensorboard",), RunFolder(tmp_path), CONFIG)
    for step in (1, 2, 3):
        trackers.log(step, {"reward/mean": float(step)})
    trackers.close()
    resumed = Trackers(("tensorboard",), RunFolder(tmp_path), CONFIG)
    resumed.go_on_after(2)
    resumed.log_evaluation(replace(make_evaluation(), step=2))
    resumed.log(2, {"eval/total": 0.5})
    resumed.close()

    events = read_events(tmp_path)
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2]
    assert [event.step for event in events.Scalars("eval/total")] == [2]


def test_tensorboard_shows_a_strip_a_prompt_and_a_table_of_scores_and_notes(logged) -> None:
    events = read_events(logged("tensorboard"))

    (said,) = events.Tensors("run/text_summary")[0].tensor_proto.string_val
    assert said.decode().split("\n\n") == [ABOUT.name, ABOUT.notes, "ocr, wide"]
    # Beside the run there is no other, such as a folder for the configuration.
    assert {path.is_file() for path in (logged("tensorboard") / "tensorboard").iterdir()} == {True}
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
    events = read_events(logged("tensorboard"))

    (text,) = events.Tensors("rollout/table/text_summary")[0].tensor_proto.string_val
    lines = text.decode().splitlines()
    assert lines[0].startswith("| prompt_id | prompt | sample | total | advantage | clip | ocr |")
    # The best picture first: totals 0 and 0.02.
    assert lines[2] == '| sign | a sign "CAT" | 1 | 0.020 | -0.090 | 0.010 | 0.010 | word 1 |'
    assert [strip.step for strip in events.Images("rollout/group 1")] == [1]
    (rewards,) = events.Histograms("rollout/reward")
    (advantages,) = events.Histograms("rollout/advantage")
    assert (rewards.step, rewards.histogram_value.num) == (1, 4)
    assert rewards.histogram_value.max == pytest.approx(0.22)
    assert advantages.histogram_value.sum == pytest.approx(0.0, abs=1e-6)


def records_of(path: Path) -> Iterator[Any]:
    # Its process writes the last of them when it ends.
    importlib.import_module("wandb").teardown()
    return wandb_records(path)


def wandb_history(path: Path) -> list[dict[str, Any]]:
    rows = []
    for record in records_of(path):
        if record.HasField("history"):
            items = record.history.item
            rows.append({".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def wandb_files(folder: Path) -> list[Path]:
    """Offline, each start has a file; `wandb sync` puts those of one id into one run."""
    return sorted((folder / "wandb").glob("offline-run-*/*.wandb"))


def test_wandb_goes_on_in_the_same_run_inside_the_run_folder(logged) -> None:
    folder = logged("wandb")

    run_id = json.loads((folder / "trackers.json").read_text())["wandb"]
    first, second = wandb_files(folder)
    assert first.name == second.name == f"run-{run_id}.wandb"
    assert [row["_step"] for row in wandb_history(first)] == [0, 1, 2]
    for row in wandb_history(first):
        assert {name: row[name] for name in NAMES} == dict.fromkeys(NAMES, row["_step"] + 0.5)
        assert "loss/total" not in row
    assert [row["_step"] for row in wandb_history(second)] == [2, 3]
    assert "WANDB_DATA_DIR" not in os.environ


def log_killed_run(path: Path, name: str) -> None:
    """A run whose tracker lost steps 2 and 3 in a kill, resumed from the checkpoint of step 3."""
    folder = RunFolder(path)
    trackers = Trackers((name,), folder, CONFIG)
    for step in range(4):
        append_line(folder.metrics_path, json.dumps({"step": step, "loss": step + 0.5, "kl": None}))
        if step < 2:
            trackers.log(step, {"loss": step + 0.5})
    trackers.close()
    trackers = Trackers((name,), folder, CONFIG)
    trackers.go_on_after(3)
    append_line(folder.metrics_path, json.dumps({"step": 4, "loss": 4.5}))
    trackers.log(4, {"loss": 4.5})
    trackers.close()


def test_wandb_is_given_the_steps_that_it_lost_in_a_kill(tmp_path: Path) -> None:
    skip_without("wandb")
    log_killed_run(tmp_path, "wandb")
    rows = [
        [(row["_step"], row["loss"]) for row in wandb_history(f)] for f in wandb_files(tmp_path)
    ]
    assert rows == [[(0, 0.5), (1, 1.5)], [(2, 2.5), (3, 3.5), (4, 4.5)]]


def test_a_wandb_file_that_a_kill_has_torn_is_read_up_to_there(logged, tmp_path) -> None:
    path = wandb_files(logged("wandb"))[0]
    importlib.import_module("wandb").teardown()
    content = path.read_bytes()
    last = [record for record in wandb_records(path) if record.HasField("history")][-1]
    torn = tmp_path / "torn.wandb"
    torn.write_bytes(content[: content.index(last.SerializeToString()) + 9])
    assert (last_wandb_step(path), last_wandb_step(torn)) == (2, 1)


def test_trackio_is_given_the_steps_that_it_lost_in_a_kill(tmp_path: Path, monkeypatch) -> None:
    skip_without("trackio")
    for module in [each for each in sys.modules if each.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, module)
    log_killed_run(tmp_path, "trackio")
    assert [row[1:] for row in trackio_rows(tmp_path)] == [
        (step, {"loss": step + 0.5}) for step in range(5)
    ]


def test_wandb_receives_the_config_and_an_image_table(logged) -> None:
    folder = logged("wandb")

    path = wandb_files(folder)[0]
    updates = [update for record in records_of(path) for update in record.config.update]
    config = {update.key or ".".join(update.nested_key): update.value_json for update in updates}
    assert (config["train.seed"], config["offload"]) == ("1", "true")
    (run,) = [record.run for record in records_of(path) if record.HasField("run")]
    said = (run.display_name, run.notes, tuple(run.tags))
    assert said == (ABOUT.name, ABOUT.notes, ABOUT.tags)
    (groups,) = [row for row in wandb_history(path) if "rollout._type" in row]
    assert groups["_step"] == 1
    assert {"rollout/reward._type", "rollout/advantage._type"} <= groups.keys()
    shown = [row for row in wandb_history(path) if "evaluation._type" in row]
    assert [row["_step"] for row in shown] == [0, 2]
    tables = [record.artifact for record in records_of(path) if record.HasField("artifact")]
    files = {entry.path: Path(entry.local_path) for entry in tables[0].manifest.contents}
    assert all(file.is_relative_to(folder) for file in files.values())
    table = json.loads(files["evaluation.table.json"].read_text())
    assert table["columns"][:5] == ["prompt_id", "prompt", "sample", "target", "image"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["ocr note"] for row in rows] == ["word 0", "word 1", None, None]
    assert [row["ocr"] for row in rows] == [0.0, pytest.approx(0.01), None, None]
    assert Image.open(files[rows[1]["image"]["path"]]).getpixel((0, 0)) == (1, 1, 1)
    assert rows[2]["target"] is None


def test_wandb_does_as_the_environment_says(
    tmp_path: Path, make_evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without("wandb")
    # It reads its variables once a process.
    importlib.import_module("wandb").teardown()
    variables = {"WANDB_DIR": str(tmp_path), "WANDB_PROJECT": "signs", "WANDB_RUN_ID": "mine"}
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    log_run(tmp_path / "run", "wandb", make_evaluation())

    (path,) = wandb_files(tmp_path)
    (run,) = [record.run for record in records_of(path) if record.HasField("run")]
    assert (run.project, run.run_id) == ("signs", "mine")


@pytest.fixture
def mlflow_client(monkeypatch: pytest.MonkeyPatch):
    """A client of what `log_run` stored in a folder; asked for after it."""
    skip_without("mlflow")

    def connect(path):
        # The slim package reads and writes plain files, where it is told to.
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        directory = path / "mlflow"
        database = directory / "mlflow.db"
        uri = f"sqlite:///{database}" if database.exists() else directory.as_uri()
        return importlib.import_module("mlflow").MlflowClient(uri)

    return connect


def only_run(client):
    (experiment,) = client.search_experiments(filter_string="name = 'glm-grpo'")
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def test_mlflow_goes_on_in_the_same_run_inside_the_run_folder(logged, mlflow_client) -> None:
    folder = logged("mlflow")

    assert "MLFLOW_TRACKING_URI" not in os.environ
    client = mlflow_client(folder)
    run = only_run(client)
    assert (run.info.status, run.data.params["train.seed"]) == ("FINISHED", "1")
    assert run.info.run_name == ABOUT.name
    assert run.data.tags["mlflow.note.content"] == ABOUT.notes
    assert run.data.tags["tags"] == "ocr, wide"
    assert set(run.data.metrics) == set(NAMES)
    for name in NAMES:
        history = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
        # The step that was repeated stands twice, with the same value.
        assert history == [(0, 0.5), (1, 1.5), (2, 2.5), (2, 2.5), (3, 3.5)]


def test_mlflow_shows_an_image_table_and_strips_once_an_evaluation(logged, mlflow_client) -> None:
    client = mlflow_client(logged("mlflow"))

    run_id = only_run(client).info.run_id
    tables = [file.path for file in client.list_artifacts(run_id, "evaluation")]
    assert tables == ["evaluation/step-000000.json", "evaluation/step-000002.json"]
    groups = [file.path for file in client.list_artifacts(run_id, "rollout")]
    assert groups == ["rollout/step-000001.json"]
    table = json.loads(Path(client.download_artifacts(run_id, tables[1])).read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["ocr note"] for row in rows] == ["word 0", "word 1", None, None]
    assert rows[3]["total"] == pytest.approx(0.22)
    image = Image.open(client.download_artifacts(run_id, rows[0]["image"]["filepath"]))
    assert image.size == (8, 4)
    strips = [Path(file.path).name for file in client.list_artifacts(run_id, "images")]
    names = sorted(
        name.split("+timestamp")[0]
        for name in strips
        if name.endswith(".png") and not name.startswith("rollout")
    )
    assert names == [
        f"evaluation~{prompt}+step+{step}" for prompt in ("field-1", "sign") for step in (0, 2)
    ]


def test_mlflow_writes_where_the_environment_says(
    tmp_path: Path, make_evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "elsewhere").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    log_run(tmp_path / "run", "mlflow", make_evaluation())

    assert (tmp_path / "elsewhere").is_dir()
    assert not (tmp_path / "run" / "mlflow").exists()


def trackio_rows(folder: Path) -> list[tuple[str, int, dict[str, Any]]]:
    """Name of the run, step and values of every row."""
    with sqlite3.connect(folder / "trackio" / "glm-grpo.db") as database:
        query = "SELECT run_name, step, metrics FROM metrics ORDER BY rowid"
        return [(run, step, json.loads(row)) for run, step, row in database.execute(query)]


def test_trackio_goes_on_in_the_same_run_inside_the_run_folder(logged) -> None:
    name = "larger groups 2026-11-21-16-02-07"
    rows = [row[1:] for row in trackio_rows(logged("trackio")) if row[0] == name]

    values = [(step, values) for step, values in rows if NAMES[0] in values]
    assert [step for step, _ in values] == [0, 1, 2, 2, 3]
    assert all(row == dict.fromkeys(NAMES, step + 0.5) for step, row in values)
    assert "TRACKIO_DIR" not in os.environ


def test_trackio_receives_an_image_table(logged) -> None:
    folder = logged("trackio")

    shown = [(step, row) for _, step, row in trackio_rows(folder) if "evaluation" in row]
    assert [step for step, _ in shown[:2]] == [0, 2]
    (_, step, groups), (_, _, spread) = [
        row for row in trackio_rows(folder) if any(key.startswith("rollout") for key in row[2])
    ]
    assert (step, len(groups["rollout"]["_value"])) == (1, 4)
    assert list(spread) == ["rollout/reward", "rollout/advantage"]
    cells = shown[1][1]["evaluation"]["_value"]
    assert [cell["ocr note"] for cell in cells] == ["word 0", "word 1", None, None]
    path = folder / "trackio" / "media" / cells[1]["image"]["file_path"]
    assert Image.open(path).convert("RGB").getpixel((0, 0)) == (1, 1, 1)


def test_trackio_receives_the_config_and_speaks_through_the_log(
    tmp_path: Path, logged, make_evaluation, caplog, capfd
) -> None:
    # Trackio has one folder a process.
    folder = logged("trackio")
    with caplog.at_level(logging.INFO):
        log_run(tmp_path / "a" / "run", "trackio", make_evaluation())

    with sqlite3.connect(folder / "trackio" / "glm-grpo.db") as connection:
        query = "SELECT config FROM configs WHERE run_name = 'larger groups a-run'"
        ((config,),) = connection.execute(query)
    assert json.loads(config)["train.seed"] == 1
    said = [record.getMessage() for record in caplog.records]
    assert any(message.startswith("trackio: Created new run") for message in said)
    assert "\x1b" not in "".join(said)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_another_run_of_the_process_does_not_mix_with_the_first(
    name: str, tmp_path: Path, logged, mlflow_client, make_evaluation
) -> None:
    first, second = logged(name), tmp_path / "sweep" / "1"
    log_run(second, name, make_evaluation())

    ids = [json.loads((run / "trackers.json").read_text())[name] for run in (first, second)]
    assert ids[0] != ids[1]
    if name == "wandb":
        assert [len(wandb_files(run)) for run in (first, second)] == [2, 1]
    elif name == "mlflow":
        assert only_run(mlflow_client(second)).info.run_id == ids[1]
    else:
        # Trackio has one folder a process.
        assert [row[1] for row in trackio_rows(first) if row[0] == ids[1]] == [0, 0, 1, 1, 1, 2, 2]


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
        raise PermissionError("no such key")


@pytest.mark.parametrize(
    ("tracker", "reason"),
    [
        (BrokenTracker, "ConnectionError: unreachable"),
        (UnstartableTracker, "PermissionError: no such key"),
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
            recorder.track_step(step, {"reward/mean": 0.5})
        recorder.close()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert reason in warnings[0]
    assert len(read_metrics(RunFolder(tmp_path))) == 2


class PlainTracker(BrokenTracker):
    """Of a user's own, registered with accelerate: takes metrics, knows no pictures."""

    name = "plain"
    logged: list[int | None] = []  # noqa: RUF012 - one list for all that are made

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.logged.append(step)


def test_other_trackers_get_metrics_and_no_pictures(
    tmp_path: Path, make_evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "plain", PlainTracker)
    log_run(tmp_path, "plain", make_evaluation())

    assert PlainTracker.logged == [0, 1, 2]


class ForgetfulTracker(PlainTracker):
    """Refuses its configuration."""

    finished: list[str] = []  # noqa: RUF012 - one list for all that are made

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        raise ValueError("too long")

    def finish(self) -> None:
        self.finished.append(self.name)


def test_a_tracker_that_fails_while_it_starts_is_finished(
    tmp_path: Path, make_evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "plain", ForgetfulTracker)
    log_run(tmp_path, "plain", make_evaluation())

    assert ForgetfulTracker.finished == ["plain"]


def test_a_tracker_that_is_not_installed_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers_module, "get_available_trackers", lambda: [LoggerType.TENSORBOARD])
    check_trackers(["tensorboard"])
    with pytest.raises(ConfigError, match="'wandb' is not installed.*pip install wandb"):
        check_trackers(["tensorboard", "wandb"])
