"""Forwards metrics and evaluations to TensorBoard and other trackers; none of them stops a run.

What is not covered: a tracker that neither answers nor fails makes the run wait, as long as its
own time limits allow.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import LoggerType

from glm_grpo.config import flatten
from glm_grpo.errors import ConfigError
from glm_grpo.storage import RunFolder, write_atomically
from glm_grpo.tables import read_run_ids
from glm_grpo.training.evaluation_table import tabulate
from glm_grpo.training.tracker_starters import Start, Started, start_tracker
from glm_grpo.types import Evaluation
from rewards.keys import hide_secrets

_logger = logging.getLogger(__name__)


def check_trackers(names: Iterable[str]) -> None:
    """Refuse a tracker that cannot work on this machine, before a run costs anything.

    Raises:
        ConfigError: accelerate knows no tracker of that name, or its package is not installed.
    """
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise ConfigError(f"trackers: {name!r} is unknown. Choose from {known}.")
        # A class that a program has registered with accelerate is no member of the enumeration.
        if name in LoggerType.list() and LoggerType(name) not in get_available_trackers():
            raise ConfigError(
                f"trackers: {name!r} is not installed. Install it: pip install {name}. Or take it "
                "out of trackers."
            )


class Trackers:
    """Trackers by name, started at the first step that is logged."""

    def __init__(
        self, names: tuple[str, ...], folder: RunFolder, config: Mapping[str, Any]
    ) -> None:
        """Check the names; nothing is started yet.

        Args:
            names: As accelerate calls them.
            folder: Of the run. A run that resumes goes on in the trackers' own runs, whose names
                are kept there.
            config: The resolved configuration.

        Raises:
            ConfigError: As `check_trackers`.
        """
        check_trackers(names)
        self._waiting = tuple(dict.fromkeys(names))
        self._folder = folder
        self._config = config
        self._started: dict[str, Started] = {}
        self._failed: set[str] = set()
        self._goes_on_after: int | None = None

    def go_on_after(self, step: int) -> None:
        """Say that the run resumes: what was logged after `step` comes again.

        Without it, that is taken to be all from the first step that is logged.
        """
        self._goes_on_after = step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Forward the finite values of a step."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._for_each(step, lambda started: started.tracker.log(finite, step=step))

    def log_evaluation(self, evaluation: Evaluation) -> None:
        """Show the evaluation prompts with their pictures, scores and notes.

        TensorBoard, wandb, MLflow and trackio do; other trackers are given the metrics only.
        """
        if not (self._waiting or self._started):
            return
        table = tabulate(evaluation)
        self._for_each(evaluation.step, lambda started: started.show(table, evaluation.step))

    def close(self) -> None:
        """Let every tracker finish its uploads and files."""
        for name, started in self._started.items():
            with self._only_warning(name):
                started.close()
        self._started = {}

    def _for_each(self, step: int, act: Callable[[Started], object]) -> None:
        # Started here and not before, because TensorBoard needs the step from which to overwrite.
        for name in self._waiting:
            with self._only_warning(name):
                self._started[name] = self._start(name, step)
        self._waiting = ()
        for name, started in self._started.items():
            with self._only_warning(name):
                act(started)

    def _start(self, name: str, step: int) -> Started:
        run_ids = read_run_ids(self._folder)
        run_id = run_ids.get(name)
        with ExitStack() as stack:
            first = step if self._goes_on_after is None else self._goes_on_after + 1
            started = start_tracker(name, Start(self._folder, first, run_id))
            stack.callback(started.close)
            # A run that goes on has its configuration, and MLflow allows no value to change.
            if run_id is None:
                started.tracker.store_init_configuration(_plain(self._config))
            if started.run_id not in (None, run_id):
                content = json.dumps({**run_ids, name: started.run_id}, indent=1)
                write_atomically(self._folder.tracker_ids_path, content.encode())
            stack.pop_all()
        return started

    @contextmanager
    def _only_warning(self, name: str) -> Iterator[None]:
        try:
            yield
        # A tracker may raise anything, from a wrong key to a lost connection, and the metrics are
        # safe in `metrics.jsonl`: no training run is worth losing over it.
        except Exception as error:
            if name not in self._failed:
                _logger.warning(
                    "Tracker %s failed (%s: %s); training goes on, metrics.jsonl is complete.",
                    name,
                    type(error).__name__,
                    # It may quote the address or the key that the environment gave it.
                    hide_secrets(str(error)),
                )
            self._failed.add(name)


def _plain(values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Nested settings as `section.key`, in the plain types that all trackers take."""
    return {
        key: value if isinstance(value, bool | int | float) else str(value)
        for key, value in flatten(values).items()
    }
