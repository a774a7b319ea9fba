"""Periodic polls of the bridges."""

from __future__ import annotations

import threading

import pytest

from exporter.bridges.periodic import Periodic
from exporter.recording.recorder import RECORDER


def test_the_last_poll_runs_even_if_an_earlier_poll_is_still_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RECORDER, "attach", lambda *_args, **_kwargs: None)
    is_polling, may_continue = threading.Event(), threading.Event()
    calls: list[str] = []

    def poll() -> None:
        is_polling.set()
        may_continue.wait(60)
        calls.append("poll")

    periodic = Periodic(
        "test", poll, seconds=0.0, after_fork=lambda: None, at_exit=lambda: calls.append("at_exit")
    )
    periodic.tick()
    assert is_polling.wait(60)
    periodic._worker.put(None)  # a later tick, whose poll the thread has not started
    wait_for_end = periodic.finish()
    may_continue.set()
    wait_for_end(60, "exit")

    assert calls == ["at_exit", "poll", "poll", "poll"]
