"""What is wrong with a run's files, for the pages to say in place."""

from __future__ import annotations

from glm_grpo.errors import GlmGrpoError
from glm_grpo.run.folder import RunFolder

Problem = dict[str, str]
"""`where`: the file; `message`: what, and the remedy."""


def describe(error: GlmGrpoError, folder: RunFolder) -> str:
    """The text of an error, paths relative to the run: a gallery that is sent names no machine."""
    return str(error).replace(f"{folder.path}/", "")
