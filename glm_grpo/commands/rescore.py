"""`glm-grpo rescore`: show what other reward weights would have changed in a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from glm_grpo.errors import ConfigError
from glm_grpo.run.folder import RunFolder
from glm_grpo.studio.rescore.rescore import rescore
from glm_grpo.studio.rescore.tables import print_rescoring


def rescore_run(run: Path, overrides: Sequence[str]) -> None:
    """Print the changes."""
    folder = RunFolder(run)
    rescoring = rescore(folder, overrides)
    if not rescoring.changes:
        weights = " ".join(f"{term.name}={term.weight_before:g}" for term in rescoring.terms)
        raise ConfigError(
            f"{' '.join(overrides) or 'no key=value'}: these are the weights of the run, so "
            f"nothing would change; write other values ({weights} is what it had, "
            f"reward.combine and options of advantages can be changed too)"
        )
    print_rescoring(Console(), folder, rescoring)
