"""What the promises of docs/security.md are tried with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


class Payload:
    """Unpickled, it makes a file: what ran once could have done anything."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))

    @property
    def was_run(self) -> bool:
        return self.trace.exists()

    def as_code(self) -> str:
        """A module that does the same on import."""
        return f"from pathlib import Path\nPath({str(self.trace)!r}).touch()\n"


@pytest.fixture
def payload(tmp_path: Path) -> Payload:
    return Payload(tmp_path / "payload-was-run")
