"""Silence the progress bars of the model libraries, which would interrupt our own lines."""

from __future__ import annotations

import sys

import datasets
import diffusers
import transformers
from huggingface_hub.utils.logging import disable_propagation
from huggingface_hub.utils.tqdm import disable_progress_bars


def quiet_libraries(*, shows_downloads: bool = True) -> None:
    """Turn off loading bars for the rest of the process.

    Args:
        shows_downloads: Whether to keep download bars on a terminal: a model of 36 GB takes long to
            download.
    """
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    # It prints its warnings itself.
    disable_propagation()
    if not (shows_downloads and sys.stderr.isatty()):
        disable_progress_bars()
