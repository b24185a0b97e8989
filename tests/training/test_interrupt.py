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


def test_hangup_asks_the_run_to_stop_unless_nohup_has_it_ignored() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with interrupt.stop_on_signal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.is_set
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with interrupt.stop_on_signal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.is_set
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)
