"""The table of held-out scores before and after training."""

from __future__ import annotations

import io

from rich.console import Console

from glm_grpo.commands.eval import summary_table
from glm_grpo.run.tables import SummaryRow


def test_a_summary_shows_no_negative_zero() -> None:
    row = SummaryRow("total", before=0.5, after=0.4998, difference=-0.0002, low=-0.0004, high=0.1)
    console = Console(width=120, file=io.StringIO())
    console.print(summary_table([row], title="held-out prompts"))
    text = " ".join(console.file.getvalue().split())
    assert "[+0.000, +0.100]" in text
    assert "-0.000" not in text
