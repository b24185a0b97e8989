"""Forward metrics to trackers, and images to TensorBoard and W&B."""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    TensorBoardTracker,
    WandBTracker,
    get_available_trackers,
)
from accelerate.utils import LoggerType
from jaxtyping import Float32, UInt8
from PIL import Image
from torch import Tensor

from glm_grpo.config import RunSection, flatten
from glm_grpo.errors import ConfigError
from glm_grpo.run.folder import RunFolder, write_atomically
from glm_grpo.run.tables import read_run_ids
from glm_grpo.types import Evaluation, Experience
from rewards.pictures import open_rgb
from rewards.types import Prompt, RewardTable

MAX_PROMPTS = 16
"""Number of prompts shown: the first ones, the same in every evaluation of a run."""
MAX_SAMPLES = 4
"""Number of pictures shown per prompt, in addition to its target."""
MAX_GROUPS = 4
"""Number of groups shown of each step: the first ones."""
MAX_SIDE = 256
"""Pixels; larger pictures are scaled down to this longer side."""

_DECIMALS = 6
"""Decimals of scores; further digits of a float32 are noise that only widens a column."""
_GAP = 4
"""Pixels of white space between the pictures of a strip."""
_WHITE = (255, 255, 255)

_PICTURES = {"source", "target", "image"}
"""Columns of a `PictureTable` that hold pictures."""

Cell = Image.Image | str | float | int | None
Distributions = Mapping[str, Float32[numpy.ndarray, " PG"]]

PROJECT_NAME = "glm-grpo"
"""Project (or experiment) for the run; environment variables may name another."""

_logger = logging.getLogger(__name__)

EMPTY_RUN_INFO = RunSection()
"""Description of a run without name, notes and tags."""


@dataclass(frozen=True)
class PictureTable:
    """What a tracker shows of one evaluation, or of the groups of one step.

    Attributes:
        name: `evaluation` or `rollout`.
        columns: `prompt_id`, `prompt`, `sample`, `source` and `target` (absent if no prompt has
            one; a prompt's sources are joined side by side), `image`, `total`, for a step
            `advantage`, the terms, and `<term> note` for terms with notes.
        rows: One row per picture, prompt by prompt, with a cell for each column. Missing values are
            None.
        strips: For each prompt id, or place in the step, its sources, target and samples side by
            side.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    strips: Mapping[str, Image.Image]


def tabulate(evaluation: Evaluation) -> PictureTable:
    """Tabulate the first `MAX_PROMPTS` prompts with their first `MAX_SAMPLES` pictures."""
    pixels = evaluation.images.pixels[:MAX_PROMPTS, :MAX_SAMPLES]
    return _tabulate(
        "evaluation",
        {prompt.prompt_id: prompt for prompt in evaluation.prompts[:MAX_PROMPTS]},
        [[(sample, _picture(each)) for sample, each in enumerate(group)] for group in pixels],
        evaluation.rewards,
        {"total": evaluation.totals},
    )


def tabulate_step(experience: Experience, pictures: Sequence[bytes]) -> PictureTable:
    """Tabulate the first `MAX_GROUPS` groups, each with its best and worst pictures, best first.

    Args:
        experience: Experience of the step; its pixels are not read.
        pictures: Its images as PNG files, group by group.
    """
    shown = []
    size = experience.prompts.group_size
    for group, totals in enumerate(experience.totals[:MAX_GROUPS]):
        order = totals.argsort(descending=True, stable=True).tolist()
        if size > MAX_SAMPLES:
            order = order[: MAX_SAMPLES // 2] + order[-MAX_SAMPLES // 2 :]
        shown.append([(sample, _read(pictures[group * size + sample])) for sample in order])
    return _tabulate(
        "rollout",
        {f"group {place}": each for place, each in enumerate(experience.prompts.prompts, start=1)},
        shown,
        experience.rewards,
        {"total": experience.totals, "advantage": experience.advantages.values},
    )


def _tabulate(
    name: str,
    prompts: Mapping[str, Prompt],
    shown: Sequence[Sequence[tuple[int, Image.Image]]],
    table: RewardTable,
    figures: Mapping[str, Float32[Tensor, "P G"]],
) -> PictureTable:
    """Tabulate pictures.

    Args:
        prompts: Prompts by the name of their strip.
        shown: The samples to show of each of the first prompts, with their pictures.
        table: Scores of all samples.
        figures: Further columns, before the scores.
    """
    chosen = [(strip, prompts[strip], each) for strip, each in zip(prompts, shown, strict=False)]
    has_sources = any(prompt.sources for _, prompt, _ in chosen)
    has_targets = any(prompt.target is not None for _, prompt, _ in chosen)
    columns = (
        "prompt_id",
        "prompt",
        "sample",
        *(("source",) if has_sources else ()),
        *(("target",) if has_targets else ()),
        "image",
        *figures,
        *table.names,
        *(f"{term} note" for term in table.notes),
    )
    rows: list[tuple[Cell, ...]] = []
    strips = {}
    for index, (strip, prompt, samples) in enumerate(chosen):
        sources = [_picture(source) for source in prompt.sources]
        source = _strip(sources) if sources else None
        target = None if prompt.target is None else _picture(prompt.target)
        images = [image for _, image in samples]
        strips[strip] = _strip([*sources, *([] if target is None else [target]), *images])
        for sample, image in samples:
            pictures = (
                *((source,) if has_sources else ()),
                *((target,) if has_targets else ()),
                image,
            )
            given = (round(each[index, sample].item(), _DECIMALS) for each in figures.values())
            measures = _measures(table, index, sample)
            rows.append((prompt.prompt_id, prompt.prompt, sample, *pictures, *given, *measures))
    return PictureTable(name, columns, tuple(rows), strips)


def to_markdown(table: PictureTable) -> str:
    """Format the table without its pictures."""
    shown = [index for index, name in enumerate(table.columns) if name not in _PICTURES]
    lines = [[table.columns[index] for index in shown], ["---"] * len(shown)]
    lines += [[_to_text(row[index]) for index in shown] for row in table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _to_text(cell: Cell) -> str:
    """Put a cell on one line, without the bar that would end it."""
    if isinstance(cell, float):
        return f"{cell:z.3f}"
    return "" if cell is None else " ".join(str(cell).split()).replace("|", "\\|")


def _measures(table: RewardTable, index: int, sample: int) -> list[Cell]:
    """Score of every term, and notes, for one picture."""
    scores = table.raw[index, sample].tolist()
    applies = table.is_applicable[index].tolist()
    notes = [groups[index] for groups in table.notes.values()]
    return [
        *(
            round(score, _DECIMALS) if is_on else None
            for score, is_on in zip(scores, applies, strict=True)
        ),
        # A term that does not apply to the prompt has no notes on its pictures.
        *(group[sample] if group else None for group in notes),
    ]


def _picture(pixels: UInt8[Tensor, "3 H W"]) -> Image.Image:
    return _small(Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy()))


def _read(content: bytes) -> Image.Image:
    return _small(open_rgb(content))


def _small(image: Image.Image) -> Image.Image:
    # Keeps the proportions; smaller pictures stay unchanged.
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    return image


def _strip(pictures: list[Image.Image]) -> Image.Image:
    width = sum(picture.width for picture in pictures) + _GAP * (len(pictures) - 1)
    strip = Image.new("RGB", (width, max(picture.height for picture in pictures)), _WHITE)
    left = 0
    for picture in pictures:
        strip.paste(picture, (left, 0))
        left += picture.width + _GAP
    return strip


def check_trackers(names: Iterable[str]) -> None:
    """Refuse trackers that cannot work on this machine, before the run costs anything.

    Raises:
        ConfigError: Its package is not installed.
    """
    for name in names:
        # A class that a program registered with accelerate is not in the enumeration.
        if name in LoggerType.list() and LoggerType(name) not in get_available_trackers():
            raise ConfigError(
                f"trackers: {name!r} is not installed. Install it: pip install {name}. Or take it "
                "out of trackers."
            )


class Trackers:
    """Trackers by name, started at the first step that is logged.

    Args:
        folder: Folder of the run. It also stores the ids of the trackers' runs, so that a resumed
            run continues them.
        config: The resolved configuration.
        about: Name, notes and tags, for TensorBoard and W&B.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        folder: RunFolder,
        config: Mapping[str, Any],
        about: RunSection = EMPTY_RUN_INFO,
    ) -> None:
        self._about = about
        self._waiting = tuple(dict.fromkeys(names))
        self._folder = folder
        self._config = config
        self._started: dict[str, tuple[_Started, ExitStack]] = {}
        self._failed: set[str] = set()
        self._goes_on_after = -1

    def go_on_after(self, step: int) -> None:
        """Announce that the run resumes: everything logged after `step` is logged again."""
        self._goes_on_after = step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Forward the finite values of a step."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._for_each(lambda started: started.tracker.log(finite, step=step))

    def log_evaluation(self, evaluation: Evaluation) -> None:
        """Show evaluation prompts with pictures, scores and notes in TensorBoard and W&B."""
        if not (self._waiting or self._started):
            return
        table = tabulate(evaluation)
        self._for_each(lambda started: started.show(table, evaluation.step))

    def log_groups(self, experience: Experience, pictures: Sequence[bytes], step: int) -> None:
        """Show groups of a step, and the distribution of its rewards and advantages.

        Args:
            experience: Experience of the step; its pixels are not read.
            pictures: Its images as PNG files, group by group.
        """
        if not (self._waiting or self._started):
            return
        table = tabulate_step(experience, pictures)
        values = {
            "rollout/reward": experience.totals.flatten().cpu().numpy(),
            "rollout/advantage": experience.advantages.values.flatten().cpu().numpy(),
        }

        def show(started: _Started) -> None:
            started.show(table, step)
            started.show_distributions(values, step)

        self._for_each(show)

    def close(self) -> None:
        """Finish the uploads and files of every tracker."""
        for name, (_, ending) in self._started.items():
            with self._only_warning(name):
                ending.close()
        self._started = {}

    def _for_each(self, act: Callable[[_Started], object]) -> None:
        # Started only now, because TensorBoard needs to know the step from which to overwrite.
        for name in self._waiting:
            with self._only_warning(name):
                self._started[name] = self._start(name)
        self._waiting = ()
        for name, (started, _) in self._started.items():
            with self._only_warning(name):
                act(started)

    def _start(self, name: str) -> tuple[_Started, ExitStack]:
        run_ids = read_run_ids(self._folder)
        run_id = run_ids.get(name)
        with ExitStack() as stack:
            run = _Run(name, self._folder, self._goes_on_after + 1, run_id, self._about)
            started = _STARTERS.get(name, _other)(run, stack)
            # A resumed run already has its configuration.
            if run_id is None:
                started.tracker.store_init_configuration(_plain(self._config))
            if started.run_id not in (None, run_id):
                content = json.dumps({**run_ids, name: started.run_id}, indent=1)
                write_atomically(self._folder.tracker_ids_path, content.encode())
            return started, stack.pop_all()

    @contextmanager
    def _only_warning(self, name: str) -> Iterator[None]:
        try:
            yield
        # A tracker may raise anything, from a wrong key to a lost connection. The metrics are safe
        # in `metrics.jsonl`, so a training run should not fail because of it.
        except Exception as error:
            if name not in self._failed:
                _logger.warning(
                    "Tracker %s failed (%s: %s); training goes on, metrics.jsonl is complete.",
                    name,
                    type(error).__name__,
                    error,
                )
            self._failed.add(name)


def _plain(values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Flatten nested settings to `section.key`, in the plain types that all trackers accept."""
    return {
        key: value if isinstance(value, bool | int | float) else str(value)
        for key, value in flatten(values).items()
    }


@dataclass(frozen=True)
class _Run:
    """What a tracker needs to know to start.

    Attributes:
        tracker: Accelerate's name for it.
        step: First step that a killed run may already have logged.
        id: Tracker's id of the run to continue; None for a new run.
        about: Name, notes and tags.
    """

    tracker: str
    folder: RunFolder
    step: int
    id: str | None
    about: RunSection

    @property
    def place(self) -> str:
        """Last two parts of the run folder's path, usually date and time."""
        return "-".join(self.folder.path.absolute().parts[-2:])

    @property
    def label(self) -> str:
        """Name of the run for people."""
        return self.about.name or self.place


def _show_nothing(_shown: object, _step: int) -> None:
    """Show function of trackers that only take metrics."""


@dataclass(frozen=True)
class _Started:
    """A tracker that is ready to take metrics.

    Attributes:
        run_id: Tracker's id of the run, with which it can be continued; None if it cannot.
        show: Shows pictures at a step.
        show_distributions: Shows histograms of values at a step.
    """

    tracker: GeneralTracker
    run_id: str | None = None
    show: Callable[[PictureTable, int], None] = _show_nothing
    show_distributions: Callable[[Distributions, int], None] = _show_nothing


def _begin(tracker: GeneralTracker, ending: ExitStack) -> None:
    tracker.start()
    ending.callback(tracker.finish)


def _other(run: _Run, ending: ExitStack) -> _Started:
    tracker_class = LOGGER_TYPE_TO_CLASS[run.tracker]
    has_folder = tracker_class.requires_logging_directory
    folder = {"logging_dir": run.folder.path} if has_folder else {}
    tracker = tracker_class(PROJECT_NAME, **folder)
    _begin(tracker, ending)
    return _Started(tracker)


class _TensorBoard(TensorBoardTracker):  # type: ignore[misc]
    """Keeps the configuration in the run's own file; accelerate writes two folders for it.

    TensorBoard would list them as further runs.
    """

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """See `TensorBoardTracker`."""
        summary_module = importlib.import_module("torch.utils.tensorboard.summary")
        for summary in summary_module.hparams(values, {}):
            self.writer.file_writer.add_summary(summary)


def _tensorboard(run: _Run, ending: ExitStack) -> _Started:
    directory = run.folder.tensorboard_dir
    # A resumed run repeats steps: this makes TensorBoard hide what it had from `step` on.
    tracker = _TensorBoard(directory.name, directory.parent, purge_step=run.step)

    def show(table: PictureTable, step: int) -> None:
        writer = tracker.tracker
        for name, strip in table.strips.items():
            pixels = numpy.asarray(strip)
            writer.add_image(f"{table.name}/{name}", pixels, step, dataformats="HWC")
        writer.add_text(f"{table.name}/table", to_markdown(table), step)
        writer.flush()

    def show_distributions(values: Distributions, step: int) -> None:
        for name, each in values.items():
            tracker.tracker.add_histogram(name, each, step)

    ending.enter_context(_writing_threads_quiet())
    _begin(tracker, ending)
    said = [run.about.name, run.about.notes, ", ".join(run.about.tags)]
    if any(said):
        tracker.tracker.add_text("run", "\n\n".join(filter(None, said)), run.step)
    return _Started(tracker, show=show, show_distributions=show_distributions)


def _wandb(run: _Run, ending: ExitStack) -> _Started:
    wandb = importlib.import_module("wandb")
    # Arguments would override the environment variables that users set.
    options = {
        "id": ("WANDB_RUN_ID", run.id),
        "resume": ("WANDB_RESUME", "allow"),
        "name": ("WANDB_NAME", run.label),
        "notes": ("WANDB_NOTES", run.about.notes),
        "tags": ("WANDB_TAGS", run.about.tags or None),
        "dir": ("WANDB_DIR", str(run.folder.path)),
    }
    arguments = {
        name: value for name, (variable, value) in options.items() if variable not in os.environ
    }
    run.folder.path.mkdir(parents=True, exist_ok=True)
    tracker = WandBTracker(os.environ.get("WANDB_PROJECT", PROJECT_NAME), **arguments)

    def show(table: PictureTable, step: int) -> None:
        rows = _with_pictures(table, wandb.Image)
        tracker.log({table.name: wandb.Table(columns=list(table.columns), data=rows)}, step=step)

    def show_distributions(values: Distributions, step: int) -> None:
        tracker.log({name: wandb.Histogram(each) for name, each in values.items()}, step=step)

    # Pictures of tables wait there until they are uploaded, which may be on another day.
    ending.enter_context(_defaults(WANDB_DATA_DIR=run.folder.path / "wandb/data"))
    _begin(tracker, ending)
    return _Started(tracker, tracker.tracker.id, show, show_distributions)


_STARTERS: Mapping[str, Callable[[_Run, ExitStack], _Started]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}


@contextmanager
def _defaults(**variables: object) -> Iterator[None]:
    """Set unset environment variables, and unset them again afterwards, for further runs."""
    ours = {name: str(value) for name, value in variables.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextmanager
def _writing_threads_quiet() -> Iterator[None]:
    """Suppress tracebacks of TensorBoard's threads: the next call raises the error that ended them.

    A full disk is one such error.
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


def _with_pictures(table: PictureTable, wrap: Callable[[Image.Image], Any]) -> list[list[Any]]:
    """Rows with every picture in the form that the tracker needs."""
    return [
        [wrap(cell) if isinstance(cell, Image.Image) else cell for cell in row]
        for row in table.rows
    ]
