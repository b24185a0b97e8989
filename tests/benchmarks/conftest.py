"""Benchmarks are run from the project's folder; they are not installed with the packages."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# `python -m pytest` has the folder on the path, `pytest` alone has not.
sys.path.insert(0, str(ROOT))


@pytest.fixture
def run_benchmark(tmp_path, monkeypatch):
    """Runs the `main` of a benchmark; what it wrote as JSON."""
    monkeypatch.chdir(ROOT)

    def run(main, *arguments):
        file = tmp_path / "results.json"
        main([*arguments, "--json", str(file)])
        return json.loads(file.read_text())

    return run
