"""How soon there is another NVML child after one that cannot be started."""

from __future__ import annotations

import itertools
import time
from typing import NoReturn

from waiting import wait_until

from exporter.collectors.gpu.supervisor import Supervisor, Timings


def test_a_child_that_fails_is_tried_ever_more_seldom() -> None:
    tried: list[float] = []

    def start(*_: object) -> NoReturn:
        tried.append(time.monotonic())
        raise OSError("no memory")

    supervisor = Supervisor(
        start=start,
        take=lambda *_: None,
        change=lambda *_: None,
        timings=Timings(first_backoff=0.3, most_backoff=1.2),
    )
    supervisor.start()
    wait_until(lambda: len(tried) == 5)
    supervisor.stop()

    waits = [later - earlier for earlier, later in itertools.pairwise(tried)]
    for waited, least in zip(waits, (0.3, 0.6, 1.2, 1.2), strict=True):
        assert waited >= least
    assert not supervisor.alive
    assert supervisor.pid is None
