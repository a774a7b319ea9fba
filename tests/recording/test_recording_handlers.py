"""Handlers of windows: every window that closes, in order, whatever becomes of the handler."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from test_recording_process import only, run, snapshots
from waiting import wait_until

import exporter
from exporter import Aggregation, Stat, WindowReading, registry


def counting(name: str, **options: Any) -> Stat:
    return Stat(name, ["sum"], window_seconds=None, window_samples=20, **options)


def test_every_window_that_its_samples_close_reaches_the_handlers_of_the_stat_and_of_the_registry() -> None:
    stat, other = counting("handlers.first"), counting("handlers.second")
    own: list[WindowReading] = []
    all_of_them: list[tuple[str, int]] = []
    handles = [
        stat.on_window(lambda told, window: own.append(window) if told is stat else None),
        registry.on_window(
            lambda told, window: all_of_them.append((told.name, window.samples)), "handlers.*"
        ),
    ]
    for number in range(100):
        stat.add(float(number))
    for _ in range(25):
        other.add(1.0)
    assert exporter.flush()

    sums = [window.values[Aggregation.SUM] for window in own]
    assert sums == [float(sum(range(start, start + 20))) for start in range(0, 100, 20)]
    assert [window.samples for window in own] == [20] * 5
    assert all(window.started <= window.ended for window in own)
    assert sorted(all_of_them) == [*[("handlers.first", 20)] * 5, ("handlers.second", 20)]
    for handle in handles:
        handle.unregister()
    with pytest.raises(TypeError, match="a handler of windows must be"):
        registry.on_window(threading)  # type: ignore[arg-type]  # what is tested
    for _ in range(20):
        stat.add(1.0)
    assert exporter.flush()
    assert len(own) == 5


def test_windows_that_the_clock_closes_reach_them_too_but_for_empty_ones() -> None:
    stat = Stat("handlers.timed", ["sum"], window_seconds=0.1)
    told: list[float] = []
    handle = stat.on_window(lambda _, window: told.append(window.values[Aggregation.SUM]))
    stat.add(2.0)
    wait_until(lambda: told == [2.0])
    started = stat.window.started
    wait_until(lambda: stat.window.started > started)
    handle.unregister()

    assert told == [2.0]


def test_a_handler_that_hangs_or_raises_costs_its_own_windows_which_are_counted(tmp_path: Path) -> None:
    program = """
        from exporter import registry
        release = threading.Event()
        stat = Stat("train.loss", ["mean"], window_seconds=None, window_samples=1)
        def hanging(stat, window):
            release.wait(60)
        def broken(stat, window):
            raise RuntimeError("mine")
        stat.on_window(hanging, queue=10)
        registry.on_window(broken, queue=1000)
        for number in range(100):
            stat.add(float(number))
    """
    run(tmp_path / "feed", program)
    (snapshot,) = snapshots(tmp_path / "feed")
    dropped = snapshot.recording.events.dropped

    assert only(tmp_path / "feed").count == 100
    assert dropped["broken", "error"] == 100
    assert dropped["hanging", "queue_full"] + dropped["hanging", "exit"] == 100
    assert dropped["hanging", "queue_full"] >= 89


def test_windows_of_the_last_samples_before_the_end_are_told(tmp_path: Path) -> None:
    program = """
        stat = Stat("train.loss", ["mean"], window_seconds=None, window_samples=20)
        stat.on_window(lambda stat, window: print(window.samples, flush=True))
        for _ in range(60):
            stat.add(1.0)
    """

    assert run(tmp_path / "feed", program).stdout == "20\n20\n20\n"
