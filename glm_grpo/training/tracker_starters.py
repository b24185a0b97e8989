"""Starts each tracker: where it writes, how a run goes on in it, how it shows pictures.

What a tracker keeps on this machine lies in the run folder, unless the user's environment names
another place. Packages are imported when their tracker starts, for none of them has to be
installed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pandas
from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    MLflowTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)
from PIL import Image
from rich.text import Text

from glm_grpo.storage import RunFolder, safe_name
from glm_grpo.training.evaluation_table import EvaluationTable, to_markdown

PROJECT_NAME = "glm-grpo"
"""Project, or experiment, under which a tracker files the run; the environment may name another."""

_logger = logging.getLogger(__name__)

_KEY = "evaluation"
"""Name of the table and of the pictures of the evaluation prompts."""
_BLANK = Image.new("RGB", (1, 1), (255, 255, 255))


@dataclass(frozen=True)
class Start:
    """What a tracker has to know.

    Attributes:
        folder: Of the run.
        step: The first that may have been logged before, by a run that was killed.
        run_id: What the tracker calls the run it is to go on with; None for a run that is new to
            it.
    """

    folder: RunFolder
    step: int
    run_id: str | None

    @property
    def label(self) -> str:
        """A name for people: the last two parts of the run folder, its date and time as a rule."""
        return "-".join(self.folder.path.absolute().parts[-2:])


@dataclass(frozen=True)
class Started:
    """A tracker that takes metrics.

    Attributes:
        tracker: Of accelerate.
        run_id: What it calls the run, by which it can go on; None where it cannot.
        show: Is given the evaluation prompts and the step.
        close: Finishes uploads and files, and undoes what was set for the tracker.
    """

    tracker: GeneralTracker
    run_id: str | None
    show: Callable[[EvaluationTable, int], None]
    close: Callable[[], None]


def start_tracker(name: str, start: Start) -> Started:
    """Starts a tracker by accelerate's name for it; raises whatever the tracker raises."""
    if name in _STARTERS:
        return _STARTERS[name](start)
    tracker_class = LOGGER_TYPE_TO_CLASS[name]
    if tracker_class.requires_logging_directory:
        tracker = tracker_class(PROJECT_NAME, logging_dir=start.folder.path)
    else:
        tracker = tracker_class(PROJECT_NAME)
    tracker.start()
    return Started(tracker, None, _show_nothing, tracker.finish)


def _start_tensorboard(start: Start) -> Started:
    directory = start.folder.tensorboard_dir
    # A resumed run repeats steps: TensorBoard then hides what it had from `step` on.
    tracker = TensorBoardTracker(directory.name, directory.parent, purge_step=start.step)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_writing_threads_quiet())
        tracker.start()
        stack.callback(tracker.finish)
        close = stack.pop_all().close
    writer = tracker.tracker

    def show(table: EvaluationTable, step: int) -> None:
        for prompt_id, strip in table.strips.items():
            pixels = numpy.asarray(strip)
            writer.add_image(f"{_KEY}/{prompt_id}", pixels, step, dataformats="HWC")
        writer.add_text(f"{_KEY}/table", to_markdown(table), step)
        writer.flush()

    return Started(tracker, None, show, close)


def _start_wandb(start: Start) -> Started:
    wandb = importlib.import_module("wandb")
    # Arguments would win over the variables by which users say otherwise.
    options = {
        "id": ("WANDB_RUN_ID", start.run_id),
        "resume": ("WANDB_RESUME", "allow"),
        "name": ("WANDB_NAME", start.label),
        "dir": ("WANDB_DIR", str(start.folder.path)),
    }
    arguments = {
        name: value for name, (variable, value) in options.items() if variable not in os.environ
    }
    start.folder.path.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # Pictures of tables wait there until they are uploaded, which may be another day.
        stack.enter_context(_defaults(WANDB_DATA_DIR=start.folder.inside("wandb/data")))
        tracker = WandBTracker(os.environ.get("WANDB_PROJECT", PROJECT_NAME), **arguments)
        tracker.start()
        stack.callback(tracker.finish)
        close = stack.pop_all().close

    def show(table: EvaluationTable, step: int) -> None:
        rows = _with_pictures(table, wandb.Image)
        tracker.log({_KEY: wandb.Table(columns=list(table.columns), data=rows)}, step=step)

    return Started(tracker, tracker.tracker.id, show, close)


def _start_mlflow(start: Start) -> Started:
    variables, artifacts = _mlflow_store(start.folder.inside("mlflow").absolute())
    with contextlib.ExitStack() as stack:
        stack.enter_context(_defaults(**variables))
        mlflow = importlib.import_module("mlflow")
        tracker = MLflowTracker(
            PROJECT_NAME, logging_dir=artifacts, run_id=start.run_id, run_name=start.label
        )
        tracker.start()
        stack.callback(tracker.finish)
        close = stack.pop_all().close
    run_id = tracker.tracker.info.run_id

    def show(table: EvaluationTable, step: int) -> None:
        path = f"{_KEY}/step-{step:06d}.json"
        # A resumed run repeats steps, and MLflow would append the rows to those it has.
        if path in {file.path for file in mlflow.MlflowClient().list_artifacts(run_id, _KEY)}:
            return
        mlflow.log_table(_without_gaps(table), path)
        for prompt_id, strip in table.strips.items():
            key = f"{_KEY}/{safe_name(prompt_id)}"
            mlflow.log_image(strip, key=key, step=step, synchronous=True)

    return Started(tracker, run_id, show, close)


def _mlflow_store(directory: Path) -> tuple[dict[str, object], str | None]:
    """The variables that make MLflow write to a folder, and where it is to put pictures there."""
    if "MLFLOW_TRACKING_URI" in os.environ:
        return {}, None
    # Which comes with SQLAlchemy; MLflow needs both for a database.
    if importlib.util.find_spec("alembic") is None:
        # The slim package writes plain files only, pictures beside them, and wants to be told to.
        return {"MLFLOW_TRACKING_URI": directory.as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}, None
    directory.mkdir(parents=True, exist_ok=True)
    uri = f"sqlite:///{directory / 'mlflow.db'}"
    return {"MLFLOW_TRACKING_URI": uri}, (directory / "artifacts").as_uri()


def _start_trackio(start: Start) -> Started:
    # Trackio reads the variable once, on import: runs of one process share a folder.
    with _defaults(TRACKIO_DIR=start.folder.inside("trackio")):
        trackio = importlib.import_module("trackio")
    name = start.run_id or start.label
    resume = "never" if start.run_id is None else "allow"
    tracker = TrackioTracker(PROJECT_NAME, name=name, resume=resume)
    with _trackio_said_to_log():
        tracker.start()

    def show(table: EvaluationTable, step: int) -> None:
        rows = _with_pictures(table, trackio.Image)
        tracker.log({_KEY: trackio.Table(columns=list(table.columns), data=rows)}, step=step)

    def close() -> None:
        with _trackio_said_to_log():
            trackio.finish()

    return Started(tracker, name, show, close)


_STARTERS: dict[str, Callable[[Start], Started]] = {
    "tensorboard": _start_tensorboard,
    "wandb": _start_wandb,
    "mlflow": _start_mlflow,
    "trackio": _start_trackio,
}


def _show_nothing(_table: EvaluationTable, _step: int) -> None:
    """Of trackers whose way with pictures is not known here."""


@contextlib.contextmanager
def _defaults(**variables: object) -> Iterator[None]:
    """Sets the environment variables that are not set, and takes them back: runs may follow."""
    ours = {name: str(value) for name, value in variables.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _writing_threads_quiet() -> Iterator[None]:
    """Prints no traceback of TensorBoard's threads: the next call raises what ended them.

    A disk that is full is one such thing.
    """
    usual = threading.excepthook

    def hook(ended: threading.ExceptHookArgs) -> None:
        if not type(ended.thread).__module__.startswith("tensorboard."):
            usual(ended)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = usual


@contextlib.contextmanager
def _trackio_said_to_log() -> Iterator[None]:
    """Passes what Trackio prints inside to the log, a line each, without colours."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield
    for line in Text.from_ansi(printed.getvalue()).plain.splitlines():
        _logger.info("trackio: %s", line.removeprefix("* "))


def _with_pictures(table: EvaluationTable, wrap: Callable[[Image.Image], Any]) -> list[list[Any]]:
    """The rows with every picture as the tracker wants it."""
    return [
        [wrap(cell) if isinstance(cell, Image.Image) else cell for cell in row]
        for row in table.rows
    ]


def _without_gaps(table: EvaluationTable) -> pandas.DataFrame:
    """MLflow wants a picture in every row of a column of pictures, if only a blank one."""
    columns = {name: [row[index] for row in table.rows] for index, name in enumerate(table.columns)}
    if "target" in columns:
        columns["target"] = [_BLANK if cell is None else cell for cell in columns["target"]]
    return pandas.DataFrame(columns, dtype=object)
