"""How generated examples are tried in tests of bad input."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

GENERATED = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    # A fixture serves all examples of its test: it is read only, or a folder in which each writes
    # its file anew.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
