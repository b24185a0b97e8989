"""Two real processes, which write down what they find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.programs import ROOT, Programs


@pytest.fixture(scope="package")
def found(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found; see two_processes.py."""
    folder = tmp_path_factory.mktemp("found")
    script = str(Path(__file__).with_name("two_processes.py"))
    started = programs.start_team(2, ROOT, script, str(folder))
    for program in started:
        assert program.wait() == 0, program.said()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
