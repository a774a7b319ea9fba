"""How tests wait for what another process or thread is about to do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

PATIENCE = 4.0 if os.environ.get("CI") else 1.0
"""A limit is for what is broken only, and the machines of CI are busy."""


def wait_until(holds: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait for something that happens within a fraction of the time allowed."""
    until = time.monotonic() + PATIENCE * seconds
    while not holds():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)
