"""Read the config stored in a run folder."""

from __future__ import annotations

from glm_grpo.config import Config, from_yaml
from glm_grpo.errors import CheckpointError, ConfigError
from glm_grpo.run.folder import RunFolder, storage_errors


def read_config(folder: RunFolder) -> Config:
    """Read the resolved config that a run was started with.

    Raises:
        CheckpointError: The folder contains no run.
        ConfigError: Its config.yaml is invalid, or no longer valid.
        StorageError: The file cannot be read.
    """
    path = folder.config_path
    if not path.is_file():
        raise CheckpointError(
            f"{folder.path} contains no run (no config.yaml); give the folder of a run, such as "
            "outputs/<date>/<time>"
        )
    with storage_errors("read", path):
        content = path.read_bytes()
    try:
        return from_yaml(content.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}); restore it") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_config_text(folder: RunFolder) -> str:
    """Read the config's text unchanged, for people; bytes that are not UTF-8 become U+FFFD.

    Raises:
        StorageError: The file is missing or cannot be read.
    """
    with storage_errors("read", folder.config_path):
        return folder.config_path.read_text(encoding="utf-8", errors="replace")
