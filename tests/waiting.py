"""Wait for a condition that another process or thread fulfils."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 4.0
"""Factor by which limits on the duration are extended, so that a busy machine does not fail a test."""

LIMIT_SECONDS = 60.0
"""Minimum limit of a wait."""


def wait_until(condition: Callable[[], Any], seconds: float = LIMIT_SECONDS) -> Any:
    """Call a condition until its result is true, and return the result.

    Args:
        condition: Called every 20 ms.
        seconds: Limit, multiplied by `PATIENCE`; at least `LIMIT_SECONDS`.
    """
    deadline = time.monotonic() + max(PATIENCE * seconds, LIMIT_SECONDS)
    while not (result := condition()):
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.02)
    return result
