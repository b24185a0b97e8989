"""Forwards metrics to TensorBoard and other trackers; none of them can stop a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, TensorBoardTracker

from glm_grpo.errors import ConfigError
from glm_grpo.storage import RunFolder

PROJECT_NAME = "glm-grpo"

_logger = logging.getLogger(__name__)


class Trackers:
    """Trackers by name, started at the first step that is logged."""

    def __init__(
        self, names: tuple[str, ...], folder: RunFolder, config: Mapping[str, Any]
    ) -> None:
        """Check the names; nothing is started yet.

        Raises:
            ConfigError: accelerate knows no tracker of that name.
        """
        for name in names:
            if name not in LOGGER_TYPE_TO_CLASS:
                known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
                raise ConfigError(f"trackers: {name!r} is unknown. Choose from {known}.")
        self._waiting = names
        self._folder = folder
        self._config = config
        self._started: dict[str, GeneralTracker] = {}
        self._failed: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Forward the finite values of a step."""
        # Started here and not before, because TensorBoard needs the step from which to overwrite.
        for name in self._waiting:
            with self._only_warning(name):
                self._started[name] = self._start(name, step)
        self._waiting = ()
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for name, tracker in self._started.items():
            with self._only_warning(name):
                tracker.log(finite, step=step)

    def close(self) -> None:
        """Let every tracker finish its uploads and files."""
        for name, tracker in self._started.items():
            with self._only_warning(name):
                tracker.finish()
        self._started = {}

    def _start(self, name: str, step: int) -> GeneralTracker:
        tracker_class = LOGGER_TYPE_TO_CLASS[name]
        if tracker_class is TensorBoardTracker:
            directory = self._folder.tensorboard_dir
            # A resumed run repeats steps: TensorBoard then hides what it had from `step` on.
            tracker = TensorBoardTracker(directory.name, directory.parent, purge_step=step)
        elif tracker_class.requires_logging_directory:
            tracker = tracker_class(PROJECT_NAME, logging_dir=self._folder.path)
        else:
            tracker = tracker_class(PROJECT_NAME)
        tracker.start()
        tracker.store_init_configuration(_flatten(self._config))
        return tracker

    @contextmanager
    def _only_warning(self, name: str) -> Iterator[None]:
        try:
            yield
        # A tracker may raise anything, from a missing package to a lost connection, and the
        # metrics are safe in `metrics.jsonl`: no training run is worth losing over it.
        except Exception as error:
            if name not in self._failed:
                _logger.warning(
                    "Tracker %s failed (%s: %s); training goes on, metrics.jsonl is complete.",
                    name,
                    type(error).__name__,
                    error,
                )
            self._failed.add(name)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Nested settings as `section.key`, in the plain types that all trackers take."""
    flat: dict[str, bool | int | float | str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, bool | int | float) else str(value)
    return flat
