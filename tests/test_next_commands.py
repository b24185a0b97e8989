"""What a run that has ended offers to do next."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from glm_grpo.commands.evaluate import summary_table
from glm_grpo.commands.train import _SUMMARY, _next_commands
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import SummaryRow


def made(run: Path) -> Path:
    (run / "gallery").mkdir(parents=True)
    (run / "gallery" / "index.html").touch()
    return run


@pytest.mark.parametrize(
    ("others", "compared"),
    [
        ((), "OTHER_RUN"),
        (("outputs/day-2/b",), "outputs/day-2/b"),
        (("outputs/day-1/a", "outputs/day-1/c"), "outputs/day-1/c"),
        # Not one of another depth.
        (("other",), "OTHER_RUN"),
    ],
)
def test_the_last_other_run_by_name_is_compared_with(
    tmp_path: Path, others: tuple[str, ...], compared: str
) -> None:
    run = made(tmp_path / "outputs" / "day-2" / "run")
    for other in others:
        made(tmp_path / other)
    expected = compared if compared == "OTHER_RUN" else str(tmp_path / compared)

    assert f"glm-grpo compare {expected} {run}" in _next_commands(RunFolder(run))[1]


def test_a_summary_shows_no_negative_zero() -> None:
    row = SummaryRow("total", before=0.5, after=0.4998, difference=-0.0002, low=-0.0004, high=0.1)
    console = Console(width=120, file=io.StringIO())
    console.print(summary_table([row], title=_SUMMARY))
    text = " ".join(console.file.getvalue().split())
    assert "total: by this run's own weights" in text
    assert "[+0.000, +0.100]" in text
    assert "-0.000" not in text
