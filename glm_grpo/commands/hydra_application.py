"""`glm-grpo train` and train.py: compose the config with Hydra, and train."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import hydra
from hydra.core.utils import env_override
from omegaconf import DictConfig

from glm_grpo.commands.arguments import path
from glm_grpo.config import Config, resolve_config, write_out_weights
from glm_grpo.config.composition import (
    checked_files,
    choose_config,
    composition_errors,
    find_packaged_configs,
    hydra_settings_of_run,
    is_sweep,
    primary_folder,
)
from glm_grpo.config.other_trainers import counterpart_of
from glm_grpo.errors import ConfigError
from glm_grpo.output import printable
from glm_grpo.terminal import FULL_ERROR, errors_explained
from glm_grpo.training.interrupt import interrupt

logger = logging.getLogger(__name__)


def train_composed(composed: DictConfig) -> None:
    """Validate what Hydra composed, and train."""
    # Here, because Hydra adds its own line above anything that leaves its function. In a sweep,
    # Hydra names the failed run.
    with nullcontext() if is_sweep() else errors_explained("the run"):
        config = resolve_config(composed)
        # The models' libraries take seconds to import: config errors come before the first line,
        # and that before the libraries.
        from glm_grpo.data.places import check_prompt_places  # noqa: PLC0415

        check_prompt_places(config, Path(primary_folder()))
        announce_checks(config)
        from glm_grpo.commands.train import run_training  # noqa: PLC0415

        # Until now Ctrl-C ended the program at once: an exception in the middle of torch's import
        # can abort it.
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, interrupt)
        run_training(config)


def announce_checks(config: Config) -> None:
    """Announce what a run is about to check, because the models' libraries alone take seconds."""
    # Set by torchrun, as WORLD_SIZE is.
    if os.environ.get("RANK", "0") != "0":
        return
    processes = os.environ.get("WORLD_SIZE", "1")
    named = {
        "run": config.run.name,
        "model": config.model.path,
        "prompts": config.data.path,
        "terms": " ".join(config.reward.terms),
        "processes": None if processes == "1" else processes,
    }
    said = ", ".join(f"{what} {value}" for what, value in named.items() if value is not None)
    logger.info("checking: %s", printable(said))


def train_by_words(words: Sequence[str]) -> None:
    """Train according to a command line with Hydra's options.

    Args:
        words: Words after `glm-grpo train`.

    Raises:
        SystemExit: As for `glm_grpo.terminal.errors_explained`.
    """
    # By default Hydra ends every error with exit code 1 and a shortened traceback; the switch
    # makes it pass the exception on.
    switch = env_override({FULL_ERROR: "1"})
    with errors_explained("glm-grpo train"), switch:
        run_hydra(words)


def run_hydra(words: Sequence[str]) -> None:
    """Let Hydra compose the config of a command line, and train."""
    parser = argparse.ArgumentParser("glm-grpo train", add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", type=path)
    parser.add_argument("--config-name")
    named, others = parser.parse_known_args(words)
    for word in others:
        option = word.partition("=")[0]
        # Hydra would answer with its usage alone.
        if option.startswith("--") and (answer := counterpart_of(option[2:].replace("-", "_"))):
            raise ConfigError(f"{option}: {answer}")
    overrides = [word for word in others if word[:1] != "-" and ("=" in word or word[:1] == "~")]
    folder, name = choose_config(named.config_dir, named.config_name, overrides)
    find_packaged_configs()
    # Hydra reads the command line from here; its parser takes overrides from one place.
    options = [word for word in others if word not in overrides]
    settings = hydra_settings_of_run(folder, name)
    sys.argv[1:] = [*options, *settings, *write_out_weights(overrides, folder)]
    with composition_errors(overrides), checked_files():
        hydra.main(version_base=None, config_path=str(folder), config_name=name)(train_composed)()
