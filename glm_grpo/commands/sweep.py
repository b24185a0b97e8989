"""Compare the runs of a sweep at its end, as `glm-grpo compare` would print them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console

from glm_grpo.errors import GlmGrpoError
from glm_grpo.output import printable


class CompareRuns(Callback):
    """Prints the comparison of a sweep's runs after all of them have ended.

    Hydra creates one for every run of train.py, and calls it after the last run of a sweep.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the tables, or why there are none."""
        # Libraries take seconds to import, which a mistake on the command line should not wait for.
        from glm_grpo.studio.compare.comparison import compare  # noqa: PLC0415
        from glm_grpo.studio.compare.tables import comparison_tables  # noqa: PLC0415
        from rewards.types import RewardError  # noqa: PLC0415

        folder = Path(config.hydra.sweep.dir)
        again = f"glm-grpo compare {shlex.quote(str(folder))}"
        try:
            comparison = compare([folder], None)
        except (GlmGrpoError, RewardError) as error:
            sys.stdout.write(f"the runs are not compared: {printable(str(error))}\n")
            return
        for table in comparison_tables(comparison):
            Console().print(table)
        sys.stdout.write(f"to compare them again:  {again}\n")
