"""`glm-grpo train` and train.py: compose the config with Hydra, and train."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from functools import wraps
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig

from glm_grpo.commands.arguments import describe_unknown, find_config_option
from glm_grpo.errors import ConfigError
from glm_grpo.search_path import (
    choose_config,
    find_packaged_configs,
    hydra_settings_of_run,
    may_hold_weights,
    primary_folder,
)
from glm_grpo.terminal import (
    announce_checks,
    ended_in_any_case,
    job_errors_explained,
    run_hydra_application,
)
from glm_grpo.training.interrupt import interrupt


def train(composed: DictConfig) -> None:
    """Validate what Hydra composed, and train."""
    with job_errors_explained():
        # Libraries take seconds to import: config errors come before the first line, and that
        # before the models' libraries.
        from glm_grpo.config import resolve_config  # noqa: PLC0415

        config = resolve_config(composed)
        from glm_grpo.data.places import check_prompt_places  # noqa: PLC0415

        check_prompt_places(config, Path(primary_folder()))
        announce_checks(config)
        from glm_grpo.commands.train import run_training  # noqa: PLC0415

        # Until now Ctrl-C ended the program at once: an exception in the middle of torch's import
        # can abort it.
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, interrupt)
        run_training(config)


def train_by_words(words: Sequence[str]) -> None:
    """Train according to a command line with Hydra's options.

    Args:
        words: Words after `glm-grpo train`.

    Raises:
        SystemExit: As for `glm_grpo.terminal.errors_explained`.
    """

    @wraps(train)
    def application() -> None:
        refused = find_config_option(words)
        if refused:
            raise ConfigError(refused)
        parsed, unknown = get_args_parser().parse_known_intermixed_args(words)
        if unknown:
            raise ConfigError(describe_unknown(words, unknown))
        given = parsed.config_name
        named = parsed.config_dir and Path(parsed.config_dir)
        folder, name = choose_config(named, None, () if given else words)
        find_packaged_configs()
        settings = hydra_settings_of_run(folder, given or name)
        # Beside the other overrides, because Hydra's parser takes only those of one place.
        at = words.index(parsed.overrides[0]) if parsed.overrides else len(words)
        whole = _with_whole_weights(words, folder, given or name)
        # Hydra reads the command line from here.
        sys.argv[1:] = [*whole[:at], *settings, *whole[at:]]
        hydra.main(version_base=None, config_path=str(folder), config_name=name)(train)()

    with ended_in_any_case():
        run_hydra_application(application)


def _with_whole_weights(words: Sequence[str], folder: Path, name: str) -> list[str]:
    if not may_hold_weights(words):
        return [*words]
    # Takes seconds to import, which other command lines should not wait for.
    from glm_grpo.config import with_whole_weights  # noqa: PLC0415

    return with_whole_weights(words, folder, name)
