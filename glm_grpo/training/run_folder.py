"""One folder for all processes of a run."""

from __future__ import annotations

from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from glm_grpo.errors import StorageError


def shared_run_dir(run_dir: str) -> Path:
    """Create the run folder and agree on it.

    Every process composes its own config, and names that hold the time of day can differ by a
    second between them; the main process's name is the one that counts.

    Args:
        run_dir: As this process's config has it.

    Returns:
        The main process's folder, absolute, the same in every process.

    Raises:
        StorageError: The folder cannot be created; raised in every process, so that none waits for
            the others.
    """
    state = PartialState()
    agreed = [str(Path(run_dir).absolute()), ""]
    if state.is_main_process:
        try:
            Path(agreed[0]).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            agreed[1] = error.strerror or str(error)
    broadcast_object_list(agreed, from_process=0)
    folder, failure = agreed
    if failure:
        raise StorageError(
            f"run_dir = {folder!r} cannot be created ({failure}): it must be a folder that can be "
            "written to; set run_dir to another one"
        )
    return Path(folder)
