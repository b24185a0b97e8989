"""Quiet the libraries of the models: their bars would stand between our lines."""

from __future__ import annotations

import sys

import datasets
import diffusers
import transformers
from huggingface_hub.utils.tqdm import disable_progress_bars


def quiet_libraries(*, shows_downloads: bool = True) -> None:
    """Turn off the bars of loading for the rest of the process.

    Args:
        shows_downloads: Whether those of downloads are kept on a terminal: a model of 36 GB takes
            long to be fetched.
    """
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    if not (shows_downloads and sys.stderr.isatty()):
        disable_progress_bars()
