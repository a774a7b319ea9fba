"""The sidecar as its parent sees it: started apart from the job, joined where one is there, started again.

Used in `run` and `demo`. The sidecar lives in a session of its own, so that the terminal's signals never reach it.
No threads: the owner calls `keep` now and then and hands over the wait status when the child has ended. Whatever
happens to the sidecar costs the job nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Collection

from exporter.cli.flags import JOINED, REFUSED, flags_of, say, value_of
from exporter.cli.processes import own_command, start_own
from exporter.config.options import format_duration
from exporter.feed.runs import ATTACHED_FLAG

WATCH_SECONDS = 2.0
# A service that owns the directory may be restarting; taking over at once would take its port as well.
VACANT_SECONDS = 10.0
STEADY_SECONDS = 60.0
ATTEMPTS = 5


def sidecar_command(given: argparse.Namespace, linger_seconds: float) -> tuple[str, ...]:
    """The command line of a sidecar with some flags, that ends with the last run.

    It writes where the job writes, so what this machine lacks is kept to itself unless somebody chose a level.
    """
    chosen = value_of(given, "--log.level") is not None or value_of(given, "--config.file") is not None
    level = () if chosen else ("--log.level=warn",)
    return own_command(
        *flags_of(given), *level, ATTACHED_FLAG, f"--run.linger={format_duration(linger_seconds)}"
    )


class SidecarProcess:
    """Sees to it that a feed directory has a sidecar.

    Args:
        command: Starts one.
        mask: Signals that are blocked in it.
        owned: Whether some sidecar owns the directory.
    """

    def __init__(
        self, command: tuple[str, ...], *, mask: Collection[int], owned: Callable[[], bool] = lambda: False
    ) -> None:
        self._command = command
        self._mask = mask
        self._owned = owned
        self._due: float | None = time.monotonic()  # when to look again; None: never
        self._joined = False
        self._started = 0.0
        self._failures = 0
        self._wanted = True
        self.pid: int | None = None

    def keep(self) -> None:
        """Start, join or start again if it is time to."""
        now = time.monotonic()
        if self.pid is not None or self._due is None or now < self._due:
            return
        if self._owned():
            self._joined, self._due = True, now + WATCH_SECONDS
        elif self._joined:
            self._joined, self._due = False, now + VACANT_SECONDS
        else:
            try:
                self.pid = start_own(self._command, mask=self._mask)
            except (OSError, NotImplementedError) as error:
                self._failed(f"cannot be started: {error}", now)
            else:
                self._started, self._due = now, None

    def wait_seconds(self) -> float | None:
        """How long `keep` has nothing to do; None for ever."""
        idle = self.pid is not None or self._due is None
        return None if idle else max(0.0, (self._due or 0.0) - time.monotonic())

    @property
    def given_up(self) -> bool:
        """Whether there is none of ours, and there will be none."""
        return self.pid is None and self._due is None

    def let_end(self) -> None:
        """From now on its end is expected: nothing is said about it, and none is started."""
        self._wanted, self._due = False, None

    def ended(self, wait_status: int) -> None:
        """Take note that the child was reaped."""
        self.pid = None
        now, status = time.monotonic(), os.waitstatus_to_exitcode(wait_status)
        if not self._wanted:
            return
        if status == JOINED:
            self._joined, self._due = True, now + WATCH_SECONDS
        elif status == REFUSED:  # it has said why
            self._due = None
        elif status == 0:
            self._due = None
            say("the sidecar was ended; the job goes on without it")
        elif status > 0:
            self._failed(f"ended with status {status}", now)
        else:
            self._failed(f"was killed by {_signal_name(-status)}", now)

    def _failed(self, how: str, now: float) -> None:
        if now - self._started >= STEADY_SECONDS:
            self._failures = 0
        self._failures += 1
        if self._failures > ATTEMPTS:
            self._due = None
            say(f"the sidecar {how}, {self._failures} times in a row; the job goes on without it")
            return
        delay = 2.0 ** (self._failures - 1)
        self._due = now + delay
        say(f"the sidecar {how}; starting it again in {delay:.0f} s, the job is not affected")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
