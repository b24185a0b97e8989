"""Forward metrics to trackers, and images to TensorBoard and W&B."""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
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
from rewards.images import open_rgb
from rewards.types import Prompt, RewardTable

MAX_PROMPTS = 16
"""Number of prompts shown: the first ones, the same in every evaluation of a run."""
MAX_SAMPLES = 4
"""Number of images shown per prompt, in addition to its target."""
MAX_GROUPS = 4
"""Number of groups shown of each step: the first ones."""
MAX_SIDE = 256
"""Pixels; larger images are scaled down to this longer side."""

PROJECT_NAME = "glm-grpo"
"""Project (or experiment) for the run; environment variables may name another."""

_GAP = 4
"""Pixels of white space between the images of a strip."""
_IMAGE_COLUMNS = ("source", "target", "image")
"""Columns of an `ImageTable` that hold images."""

Cell = Image.Image | str | float | int | None
Distributions = Mapping[str, Float32[numpy.ndarray, " PG"]]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImageTable:
    """What a tracker shows of one evaluation, or of the groups of one step.

    Attributes:
        name: `evaluation` or `rollout`.
        rows: A row per image, prompt by prompt, with cells by column: `prompt_id`, `prompt`,
            `sample`, `source` (all sources side by side), `target`, `image`, `total`, for a step
            `advantage`, the terms, and `<term> note`. Missing values are None; a column without any
            value is left out.
        strips: For each prompt id, or place in the step, its sources, target and samples side by
            side.
    """

    name: str
    rows: Sequence[Mapping[str, Cell]]
    strips: Mapping[str, Image.Image]


def tabulate(evaluation: Evaluation) -> ImageTable:
    """Tabulate the first `MAX_PROMPTS` prompts with their first `MAX_SAMPLES` images."""
    prompts = evaluation.prompts[:MAX_PROMPTS]
    pixels = evaluation.images.pixels[:MAX_PROMPTS, :MAX_SAMPLES]
    return _tabulate(
        "evaluation",
        {prompt.prompt_id: prompt for prompt in prompts},
        [[(sample, _to_image(each)) for sample, each in enumerate(group)] for group in pixels],
        evaluation.scores,
        {"total": evaluation.totals},
    )


def tabulate_step(experience: Experience, png_files: Sequence[bytes]) -> ImageTable:
    """Tabulate the first `MAX_GROUPS` groups, each with its best and worst images, best first.

    Args:
        experience: Experience of the step; its pixels are not read.
        png_files: Its images as PNG files, group by group.
    """
    shown = []
    size = experience.prompts.group_size
    for group, totals in enumerate(experience.totals[:MAX_GROUPS]):
        # Images without a total are last.
        order = totals.nan_to_num(nan=-math.inf).argsort(descending=True, stable=True).tolist()
        if size > MAX_SAMPLES:
            order = order[: MAX_SAMPLES // 2] + order[-MAX_SAMPLES // 2 :]
        files = ((sample, png_files[group * size + sample]) for sample in order)
        shown.append([(sample, _shrink(open_rgb(file))) for sample, file in files])
    prompts = experience.prompts.prompts[:MAX_GROUPS]
    return _tabulate(
        "rollout",
        {f"group {place}": prompt for place, prompt in enumerate(prompts, start=1)},
        shown,
        experience.scores,
        {"total": experience.totals, "advantage": experience.advantages.squeeze(-1)},
    )


def _tabulate(
    name: str,
    prompts: Mapping[str, Prompt],
    shown: Sequence[Sequence[tuple[int, Image.Image]]],
    scores: RewardTable,
    figures: Mapping[str, Float32[Tensor, "P G"]],
) -> ImageTable:
    """Tabulate `shown`, samples with their images, of prompts by the name of their strip."""
    rows: list[dict[str, Cell]] = []
    strips = {}
    for index, (strip, prompt) in enumerate(prompts.items()):
        sources = [_to_image(source) for source in prompt.sources]
        target = None if prompt.target is None else _to_image(prompt.target)
        images = [image for _, image in shown[index]]
        strips[strip] = _join([*sources, *filter(None, [target]), *images])
        source = _join(sources) if sources else None
        applies = scores.is_applicable[index].tolist()
        for sample, image in shown[index]:
            raw = zip(scores.names, scores.raw[index, sample].tolist(), applies, strict=True)
            rows.append(
                {
                    "prompt_id": prompt.prompt_id,
                    "prompt": prompt.prompt,
                    "sample": sample,
                    "source": source,
                    "target": target,
                    "image": image,
                    **{key: _rounded(each[index, sample].item()) for key, each in figures.items()},
                    **{term: _rounded(score) if on else None for term, score, on in raw},
                    # A term that does not apply to the prompt has no notes on its images.
                    **{
                        f"{term} note": groups[index][sample] if groups[index] else None
                        for term, groups in scores.notes.items()
                    },
                }
            )
    used = [column for column in rows[0] if any(row[column] is not None for row in rows)]
    return ImageTable(name, [{column: row[column] for column in used} for row in rows], strips)


def _rounded(value: float) -> float | None:
    """Without digits of a float32 that only widen a column; None for an image without a score."""
    return None if math.isnan(value) else round(value, 6)


def to_markdown(table: ImageTable) -> str:
    """Format the table without its images."""
    rows = [{key: row[key] for key in row if key not in _IMAGE_COLUMNS} for row in table.rows]
    lines = [[*rows[0]], ["---"] * len(rows[0])]
    lines += [[_to_text(cell) for cell in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _to_text(cell: Cell) -> str:
    """Put a cell on one line, without the bar that would end it."""
    if isinstance(cell, float):
        return f"{cell:z.3f}"
    return "" if cell is None else " ".join(str(cell).split()).replace("|", "\\|")


def _to_image(pixels: UInt8[Tensor, "3 H W"]) -> Image.Image:
    return _shrink(Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy()))


def _shrink(image: Image.Image) -> Image.Image:
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    return image


def _join(images: Sequence[Image.Image]) -> Image.Image:
    width = sum(image.width for image in images) + _GAP * (len(images) - 1)
    strip = Image.new("RGB", (width, max(image.height for image in images)), "white")
    left = 0
    for image in images:
        strip.paste(image, (left, 0))
        left += image.width + _GAP
    return strip


def check_trackers(names: Iterable[str]) -> None:
    """Refuse trackers that cannot work on this machine, before the run costs anything."""
    for name in names:
        # A class that a program registered with accelerate is not in the enumeration.
        if name in LoggerType.list() and LoggerType(name) not in get_available_trackers():
            raise ConfigError(
                f"trackers: {name!r} is not installed. Install it: pip install {name}. Or take it "
                "out of trackers."
            )


def hint_at_trackers(names: Iterable[str]) -> list[str]:
    """Hint at W&B without a key: it would ask for one, or fail where it cannot.

    Args:
        names: Installed trackers.
    """
    keys = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    is_online = os.environ.get("WANDB_MODE", "online") == "online"
    if "wandb" not in names or not is_online or any(map(os.environ.get, keys)):
        return []
    # W&B depends on it. Its own settings are read once a process, and must not be before the run.
    requests = importlib.import_module("requests")
    place = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if requests.utils.get_netrc_auth(place) is not None:
        return []
    return [
        "wandb: there is no API key in WANDB_API_KEY or .netrc, and in a job the run would go on "
        "without this tracker; log in with `wandb login`, or set WANDB_MODE=offline"
    ]


class Trackers:
    """Trackers by name, started at the first step that is logged.

    Args:
        folder: Folder of the run. It also stores the id of the run in W&B, so that a resumed run
            continues it.
        about: Name, notes and tags, for TensorBoard and W&B.
        first_step: First step that is logged; for a run that resumes, those after it are logged
            again.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        folder: RunFolder,
        config: Mapping[str, Any],
        about: RunSection,
        *,
        first_step: int = 0,
    ) -> None:
        self._names = tuple(dict.fromkeys(names))
        self._folder = folder
        self._config = config
        self._about = about
        self._started: dict[str, GeneralTracker] | None = None
        self._failed: dict[str, str] = {}
        self._first_step = first_step
        self._ending = ExitStack()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Forward the finite values of a step."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._for_each(lambda tracker: tracker.log(finite, step=step))

    def log_evaluation(self, evaluation: Evaluation) -> None:
        """Show evaluation prompts with images, scores and notes in TensorBoard and W&B."""
        if self._names:
            self._show(tabulate(evaluation), {}, evaluation.step)

    def log_groups(self, experience: Experience, png_files: Sequence[bytes], step: int) -> None:
        """Show groups of a step, and the distribution of its rewards and advantages.

        Args:
            experience: Experience of the step; its pixels are not read.
            png_files: Its images as PNG files, group by group.
        """
        values = {
            "rollout/reward": experience.totals[~experience.totals.isnan()].cpu().numpy(),
            "rollout/advantage": experience.advantages.flatten().cpu().numpy(),
        }
        if self._names:
            self._show(tabulate_step(experience, png_files), values, step)

    def close(self) -> None:
        """Finish the uploads and files of every tracker, and repeat which ones failed."""
        # A run may be long, and they failed at its start.
        for name, reason in self._failed.items():
            _logger.warning(
                "Tracker %s failed during the run (%s); metrics.jsonl is complete.", name, reason
            )
        with self._ending:
            # One that never started is not started now.
            self._started = self._started or {}
            self._for_each(lambda tracker: tracker.finish())
            self._started = {}

    def _show(self, table: ImageTable, values: Distributions, step: int) -> None:
        def show(tracker: GeneralTracker) -> None:
            if isinstance(tracker, _TensorBoard | _WandB):
                tracker.show(table, values, step)

        self._for_each(show)

    def _for_each(self, act: Callable[[GeneralTracker], object]) -> None:
        # Started only now, because TensorBoard needs to know the step from which to overwrite.
        if self._started is None:
            self._started = {}
            for name in self._names:
                with self._only_warning(name):
                    self._started[name] = self._start(name)
        for name, tracker in self._started.items():
            with self._only_warning(name):
                act(tracker)

    def _start(self, name: str) -> GeneralTracker:
        if name == "tensorboard":
            place = self._folder.tensorboard_dir
            tracker = _TensorBoard(place.name, place.parent, purge_step=self._first_step)
            tracker.start()
            said = filter(None, [self._about.name, self._about.notes, ", ".join(self._about.tags)])
            if text := "\n\n".join(said):
                tracker.writer.add_text("run", text, self._first_step)
        elif name == "wandb":
            tracker = self._start_wandb()
        else:
            chosen = LOGGER_TYPE_TO_CLASS[name]
            folder = [self._folder.path] if chosen.requires_logging_directory else []
            tracker = chosen(PROJECT_NAME, *folder)
            tracker.start()
        # In the plain types that all trackers accept.
        plain = {
            key: value if isinstance(value, bool | int | float) else str(value)
            for key, value in flatten(self._config).items()
        }
        tracker.store_init_configuration(plain)
        return tracker

    def _start_wandb(self) -> _WandB:
        folder, about = self._folder, self._about
        folder.path.mkdir(parents=True, exist_ok=True)
        options = {
            "id": ("WANDB_RUN_ID", read_run_ids(folder).get("wandb")),
            "resume": ("WANDB_RESUME", "allow"),
            "name": ("WANDB_NAME", about.name or "-".join(folder.path.absolute().parts[-2:])),
            "notes": ("WANDB_NOTES", about.notes),
            "tags": ("WANDB_TAGS", about.tags or None),
            "dir": ("WANDB_DIR", str(folder.path)),
        }
        # Arguments would override the environment variables that users set.
        free = {key: value for key, (name, value) in options.items() if name not in os.environ}
        if "WANDB_DATA_DIR" not in os.environ:
            # Images of tables wait there until they are uploaded, which may be on another day.
            os.environ["WANDB_DATA_DIR"] = str(folder.path / "wandb/data")
            self._ending.callback(os.environ.pop, "WANDB_DATA_DIR")
        tracker = _WandB(os.environ.get("WANDB_PROJECT", PROJECT_NAME), **free)
        tracker.start()
        ids = json.dumps({"wandb": tracker.tracker.id}, indent=1)
        write_atomically(folder.tracker_ids_path, ids.encode())
        return tracker

    @contextmanager
    def _only_warning(self, name: str) -> Iterator[None]:
        try:
            yield
        # A tracker may raise anything, from a wrong key to a lost connection. The metrics are safe
        # in `metrics.jsonl`, so a training run should not fail because of it.
        except Exception as error:
            if name not in self._failed:
                self._failed[name] = f"{type(error).__name__}: {error}"
                _logger.warning(
                    "Tracker %s failed (%s); training goes on, metrics.jsonl is complete.",
                    name,
                    self._failed[name],
                )


class _TensorBoard(TensorBoardTracker):  # type: ignore[misc]
    _has_failed = False

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration in the run's own file.

        accelerate writes two folders for it, which TensorBoard would list as further runs.
        """
        summary_module = importlib.import_module("torch.utils.tensorboard.summary")
        for summary in summary_module.hparams(values, {}):
            self.writer.file_writer.add_summary(summary)

    def log(self, values: dict[str, float], step: int | None = None, **kwargs: Any) -> None:
        with self._writing():
            super().log(values, step=step, **kwargs)

    def show(self, table: ImageTable, values: Distributions, step: int) -> None:
        with self._writing():
            for name, strip in table.strips.items():
                pixels = numpy.asarray(strip)
                self.writer.add_image(f"{table.name}/{name}", pixels, step, dataformats="HWC")
            self.writer.add_text(f"{table.name}/table", to_markdown(table), step)
            for name, each in values.items():
                self.writer.add_histogram(name, each, step)
            self.writer.flush()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Begin a new file after an error: a writer repeats its first one at every later call."""
        if self._has_failed:
            # Nothing is overwritten, as by a resumed run.
            self.init_kwargs: dict[str, object] = {}
            self.start()
        self._has_failed = True
        yield
        self._has_failed = False


class _WandB(WandBTracker):  # type: ignore[misc]
    def show(self, table: ImageTable, values: Distributions, step: int) -> None:
        wandb = importlib.import_module("wandb")
        rows = [
            [wandb.Image(cell) if isinstance(cell, Image.Image) else cell for cell in row.values()]
            for row in table.rows
        ]
        self.log_table(table.name, columns=[*table.rows[0]], data=rows, step=step)
        self.log({name: wandb.Histogram(each) for name, each in values.items()}, step=step)
