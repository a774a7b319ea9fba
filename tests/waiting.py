"""Waiting for a condition set by another process or thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 4.0
"""Factor on the limits of child processes: a limit is for a defect, never for a busy machine."""

LIMIT_SECONDS = 60.0
"""Shortest limit of a wait, on every machine."""


def wait_until(holds: Callable[[], Any], seconds: float = LIMIT_SECONDS) -> Any:
    """Return the first true result of a condition.

    Args:
        holds: The condition; called every 20 ms.
        seconds: The usual limit of slow conditions; at least `LIMIT_SECONDS` pass before the test fails.
    """
    deadline = time.monotonic() + max(PATIENCE * seconds, LIMIT_SECONDS)
    while not (found := holds()):
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.02)
    return found
