"""Other runs that can be shown beside a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from glm_grpo.run.folder import RunFolder


@dataclass(frozen=True)
class ShownRun:
    """What is said about another run.

    Attributes:
        name: Name to show.
        step: Step of its newest evaluation.
        alike: Terms whose scores are comparable with those of the main run.
        is_weighed_alike: Whether its totals use the weights of the main run; if not, they are as
            stored and not comparable.
        problem: What cannot be shown, and the remedy.
    """

    name: str
    step: int
    alike: tuple[str, ...]
    is_weighed_alike: bool
    problem: str | None


@dataclass(frozen=True)
class OtherRun:
    """Another run to show.

    Attributes:
        folder: Folder of its pictures.
        groups: Prompts that the main run has too, in the form of its data files; `images` are
            relative to `images/` of `folder`, targets and sources are those of the main run.
        shown: What is said about it.
    """

    folder: RunFolder
    groups: tuple[dict[str, Any], ...]
    shown: ShownRun
