"""Wait for a condition that another process or thread fulfills."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 4.0
"""Factor by which limits on the duration are extended, so that a busy machine does not fail a test."""

WAIT_LIMIT_SECONDS = 60.0
"""Minimum limit of a wait."""


def wait_until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Call a condition until its result is true, and return the result. Fail the test at the limit.

    Args:
        condition: Called at once, and then at intervals that grow from 20 to 250 ms, so that a long wait leaves the cores to
            the other tests.
        seconds: Limit, multiplied by `PATIENCE`; at least `WAIT_LIMIT_SECONDS`. The default limit of 120 s is half of the shortest timeout of
            a test, so that a failed wait is reported as such, and not as a timeout.
    """
    start_time = time.monotonic()
    limit_seconds = max(PATIENCE * seconds, WAIT_LIMIT_SECONDS)
    while not (result := condition()):
        waited_seconds = time.monotonic() - start_time
        assert waited_seconds < limit_seconds, (
            f"the condition did not become true within {limit_seconds:.0f} s"
        )
        time.sleep(min(max(0.02, waited_seconds / 8), 0.25))
    return result
