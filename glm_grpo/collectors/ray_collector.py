"""A collector: a Ray actor with its own policy, decoder and scorers."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import diffusers
import torch
import transformers
from torch import Tensor

from glm_grpo.collectors.collector_pool import Collected, Order, Outcome
from glm_grpo.config import Config
from glm_grpo.errors import ConfigError, GlmGrpoError
from glm_grpo.training.collect import collect
from glm_grpo.training.models import Models
from glm_grpo.training.phases import PhaseClock
from rewards.types import RewardError

_WHOLE_STEP = "step"
"""Name in a clock for the whole time since its creation."""


@dataclass(frozen=True)
class CollectorProcess:
    """Where a collector runs."""

    host: str
    process_id: int


@dataclass(frozen=True)
class CollectorSetup:
    """How to set up a collector.

    Attributes:
        make_models: Loads the models; called in the collector's process.
        folder: Working directory, for paths and modules in the config.
    """

    config: Config
    make_models: Callable[[Config], Models]
    folder: str


class Collector:
    """Makes experience to order. Returns expected errors, to preserve their types and images."""

    def __init__(self, setup: CollectorSetup) -> None:
        self._setup = setup

    def place(self) -> CollectorProcess:
        """Where the collector runs."""
        return CollectorProcess(socket.gethostname(), os.getpid())

    def prepare(self) -> RewardError | GlmGrpoError | None:
        """Load the models; returns the error if that fails."""
        setup = self._setup
        # These bars redraw lines with control characters, but a collector's output is a log.
        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(setup.config.asynchronous.cpus_per_collector)
        try:
            os.chdir(setup.folder)
            self._models = setup.make_models(setup.config)
        except OSError as error:
            return error if isinstance(error, GlmGrpoError) else _no_folder(setup.folder, error)
        except (RewardError, GlmGrpoError) as error:
            return error
        return None

    def collect(self, order: Order, weights: Mapping[str, Tensor]) -> Outcome:
        """Make the experience of one batch.

        Args:
            weights: Trained tensors after `order.policy_updates`.
        """
        clock = PhaseClock()
        try:
            self._models.policy.load_state_tensors(weights)
            experience = collect(self._models, order.batch, self._setup.config, clock=clock)
        except (RewardError, GlmGrpoError) as error:
            return error
        images = replace(experience.images, pixels=experience.images.pixels.cpu())
        seconds = clock.seconds()
        del seconds[_WHOLE_STEP]
        return Collected(replace(experience, images=images), seconds)


def _no_folder(folder: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{folder} cannot be entered on {socket.gethostname()} ({error.strerror}): collectors work "
        "in the folder the run was started in; start it in one that all machines share"
    )
