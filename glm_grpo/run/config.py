"""Read the config stored in a run folder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import yaml
from yaml import YAMLError

from glm_grpo.config import Config, from_yaml
from glm_grpo.errors import CheckpointError, ConfigError
from glm_grpo.run.folder import RunFolder, storage_errors

_DATED = "outputs/DATE/TIME"
"""Where runs are unless `run_dir` says otherwise."""


def refuse_no_run(folder: RunFolder) -> None:
    """Refuse a folder without a run, such as one that `glm-grpo init` wrote.

    A run that lost its config.yaml is accepted, because the gallery can show the rest.
    """
    if any(
        path.exists() for path in (folder.metrics_path, folder.rollouts_dir, folder.evaluations_dir)
    ):
        return
    values = None
    if folder.config_path.is_file():
        with storage_errors("read", folder.config_path), suppress(YAMLError):
            values = yaml.load(folder.config_path.read_bytes(), Loader=yaml.CSafeLoader)
        # A run's own config is resolved, and builds on no other one.
        if not isinstance(values, dict) or "defaults" not in values:
            return
    run_dir = (values or {}).get("run_dir")
    if not isinstance(run_dir, str) or "$" in run_dir:
        run_dir = _DATED
    if RunFolder(folder.path.parent.parent).metrics_path.is_file():
        raise CheckpointError(
            f"{folder.path} is in a run, not one itself; give {folder.path.parent.parent}"
        )
    newest = _newest_run(folder.path, Path("outputs" if run_dir == _DATED else run_dir))
    what = "no run" if values is None else "no run, only a config to start from"
    found = f"contains {what}" if folder.path.exists() else "does not exist"
    meant = f", such as {run_dir}" if newest is None else f"; the newest is {newest}"
    raise CheckpointError(f"{folder.path} {found}; give the folder of a run{meant}")


def _newest_run(*places: Path) -> Path | None:
    """Find the last written run in some folders, or up to two levels below them."""
    found = [
        path
        for place in places
        for depth in ("", "*/", "*/*/")
        for path in place.glob(f"{depth}{RunFolder(place).metrics_path.name}")
    ]
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else newest.parent


def read_config(folder: RunFolder) -> Config:
    """Read the resolved config that a run was started with."""
    refuse_no_run(folder)
    path = folder.config_path
    with storage_errors("read", path):
        content = path.read_bytes()
    try:
        return from_yaml(content.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}); restore it") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_config_text(folder: RunFolder) -> str:
    """Read the config's text unchanged, for people; bytes that are not UTF-8 become U+FFFD."""
    with storage_errors("read", folder.config_path):
        return folder.config_path.read_text(encoding="utf-8", errors="replace")
