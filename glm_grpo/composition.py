"""What Hydra composes a config with, and what it raises.

Imports nothing heavy: a run says what it loads before it loads it.
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
"""What Hydra raises over a file or an override that it cannot make a config of."""

_HYDRAS_OWN_FOLDER = "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}"
"""`hydra.run.dir` where no file and no override sets it."""

_TIME_OF_DAY = re.compile(r"\d\d-\d\d-\d\d")
_dated: set[str] = set()
"""Run folders that a config named by the time, see `is_dated`."""


def is_sweep() -> bool:
    """Whether Hydra trains several runs one after another in this process."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def folder_named_to_hydra() -> Path | None:
    """What `hydra.run.dir` names; None where nobody set it."""
    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    if OmegaConf.to_container(hydra.run, resolve=False) == {"dir": _HYDRAS_OWN_FOLDER}:
        return None
    # `run/dated.yaml` sets it to the current folder, so that Hydra makes none.
    if Path(hydra.run.dir) == Path():
        return None
    # Not made from the name while Hydra runs the job: that may be in another folder by now.
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
    """Whether a config named the run folder by the time; a name that someone gave is none."""
    return run_dir in _dated


# `${sweep_folder_or:FOLDER}` in a YAML file: FOLDER, but in a sweep the folder that Hydra made for
# this run of it, and otherwise that of `hydra.run.dir` where someone sets it. Hydra has no key that
# means all of them.
OmegaConf.register_new_resolver("sweep_folder_or", _sweep_folder_or, replace=True)
