"""Passive Stats: callbacks that are measured off the training thread, once per flush.

Used in the training process. All callbacks share one daemon thread, which is not the recording thread: a
callback that hangs costs the passive Stats, visibly, and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import time

from exporter.recording.notices import tell_once
from exporter.recording.registry import Registry

EXIT_SECONDS = 0.2
STUCK_SECONDS = 5.0
"""A callback that runs for longer is shown as stuck."""


class PassiveMeasurer:
    """Calls the callbacks of all passive Stats, once each time it is asked to.

    Args:
        registry: Whose Stats.
        clock: Unix time, seconds.
    """

    def __init__(self, registry: Registry, *, clock: Callable[[], float] = time) -> None:
        self._registry = registry
        self._clock = clock
        self._asked = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._busy_since: float | None = None
        self._in_round = False
        self._ending = False

    @property
    def stuck_since(self) -> float | None:
        """Unix time since which one callback has been running, None while none takes long."""
        since = self._busy_since
        return since if since is not None and self._clock() - since > STUCK_SECONDS else None

    def measure_soon(self) -> None:
        """Have every callback called once; returns at once, and does nothing while the last round goes on."""
        if self._in_round or not any(tally.measure for tally in self._registry.tallies()):
            return
        if self._thread is None or not self._thread.is_alive():
            try:
                thread = threading.Thread(target=self._run, name="exporter-passive", daemon=True)
                thread.start()
            except RuntimeError as error:  # no more threads, or none that are daemons
                tell_once("passive thread", f"passive Stats are not measured: {error}")
                return
            self._thread = thread
        self._in_round = True
        self._asked.release()

    def end(self) -> None:
        """At exit: let the thread end, unless a callback keeps it."""
        self._ending = True
        self._asked.release()
        if self._thread is not None:
            self._thread.join(EXIT_SECONDS)

    def after_fork(self) -> None:
        """In a forked child: the thread is gone."""
        self._in_round = self._ending = False
        self._asked = threading.Semaphore(0)
        self._thread = None
        self._busy_since = None

    def _run(self) -> None:
        asked = self._asked
        while asked.acquire() and not self._ending:
            for tally in self._registry.tallies():
                if tally.measure is not None and tally.enabled:
                    self._busy_since = self._clock()
                    try:
                        tally.buffer.append(tally.measure())
                    except BaseException as error:  # noqa: BLE001  # the user's code, SystemExit too: counted, told once
                        tally.refusals.append("error")
                        name = tally.definition.name
                        tell_once(
                            f"passive {name}", f"the passive Stat {name!r} could not be measured: {error!r}"
                        )
                    finally:
                        self._busy_since = None
            self._in_round = False
