"""Registrations and errors of Hydra's config composition.

Imports nothing heavy, because mistakes on the command line are reported before heavy imports.
"""

from __future__ import annotations

import re
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)
"""Hydra's errors about files or overrides from which it cannot compose a config."""

_HYDRAS_OWN_FOLDER = "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}"
"""Value of `hydra.run.dir` if no file and no override sets it."""

_TIME_OF_DAY = re.compile(r"\d\d-\d\d-\d\d")
_dated: set[str] = set()
"""Run folders whose names a config made from the time, see `is_dated`."""


def is_sweep() -> bool:
    """Whether Hydra trains several runs one after the other in this process."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def folder_named_to_hydra() -> Path | None:
    """Folder that `hydra.run.dir` names; None if it was not set."""
    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    if OmegaConf.to_container(hydra.run, resolve=False) == {"dir": _HYDRAS_OWN_FOLDER}:
        return None
    # `run/dated.yaml` sets it to the current folder, so that Hydra creates none.
    if Path(hydra.run.dir) == Path():
        return None
    # Prefer the path that Hydra made: during a job, the working directory may have changed.
    is_made = not OmegaConf.is_missing(hydra.runtime, "output_dir")
    return Path(hydra.runtime.output_dir if is_made else hydra.run.dir).absolute()


def _sweep_folder_or(run_dir: str) -> str:
    if is_sweep():
        return str(HydraConfig.get().runtime.output_dir)
    named = folder_named_to_hydra()
    if named is not None:
        return str(named)
    if _TIME_OF_DAY.fullmatch(Path(run_dir).name):
        _dated.add(run_dir)
    return run_dir


def is_dated(run_dir: str) -> bool:
    """Whether a config made the run folder's name from the time, rather than a user naming it."""
    return run_dir in _dated


# `${sweep_folder_or:FOLDER}` in a YAML file: in a sweep, the folder that Hydra created for this
# run; otherwise `hydra.run.dir` if it was set; otherwise FOLDER. No key of Hydra covers all of
# these.
OmegaConf.register_new_resolver("sweep_folder_or", _sweep_folder_or, replace=True)
