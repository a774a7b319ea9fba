"""How tests wait for what another process or thread is about to do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 4.0 if os.environ.get("CI") else 1.0
"""A limit is for what is broken only, and the machines of CI are busy."""


def wait_until(holds: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Wait for something that happens within a fraction of the time allowed, and give what is then true."""
    until = time.monotonic() + PATIENCE * seconds
    while not (found := holds()):
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)
    return found
