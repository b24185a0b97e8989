"""Signals that ask a run to stop."""

from __future__ import annotations

import signal

import pytest

from glm_grpo.training import interrupt


def test_signals_within_seconds_are_one_request_and_a_later_one_ends_the_run(monkeypatch) -> None:
    # Workers of pytest-xdist ignore Ctrl-C.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    with interrupt.stop_on_signal() as stop:
        assert not stop.is_set
        # Slurm's, and the same one handed on by a launcher.
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set
        monkeypatch.setattr(interrupt, "_SAME_REQUEST_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, previous)
