"""Counts of the items of a worker thread whose function outlives the timeout of `finish`."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from waiting import WAIT_LIMIT_SECONDS, wait_until

from exporter.recording.worker import Worker


def fail() -> None:
    raise ValueError


@pytest.mark.parametrize("end_of_the_call", [fail, lambda: None], ids=["fails", "returns"])
def test_an_item_of_an_abandoned_call_is_counted_once(end_of_the_call: Callable[[], None]) -> None:
    may_end = threading.Event()

    def handle(_item: object) -> None:
        may_end.wait(WAIT_LIMIT_SECONDS)
        end_of_the_call()

    worker = Worker(handle, name="test", bound=10)
    worker.put("item")
    wait_until(lambda: worker.busy_since is not None)

    worker.finish()(0.01, "exit")
    may_end.set()
    wait_until(lambda: worker.busy_since is None)

    assert worker.has_final_counts
    assert worker.lost_items() == {"exit": 1}
    assert worker.processed_items == 0
