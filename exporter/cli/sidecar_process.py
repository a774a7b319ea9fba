"""The sidecar process of `run`: started, joined, and restarted after a crash."""

from __future__ import annotations

import argparse
import math
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from exporter.cli.child import own_command, start_own
from exporter.cli.flags import JOINED, REFUSED, flags_of, say, value_of
from exporter.config.options import format_duration
from exporter.feed import runs

WATCH_SECONDS = 2.0
VACANT_SECONDS = 10.0
"""A service that owns the directory may be restarting; an immediate start would occupy the service's port."""
STEADY_SECONDS = 60.0
ATTEMPTS = 5


def sidecar_command(given: argparse.Namespace, linger_seconds: float) -> tuple[str, ...]:
    """Return the command line of an attached sidecar; the default log level is warn, because the job shares standard error."""
    chosen = value_of(given, "--log.level") is not None or value_of(given, "--config.file") is not None
    level = () if chosen else ("--log.level=warn",)
    return own_command(
        *flags_of(given), *level, runs.ATTACHED_FLAG, f"--run.linger={format_duration(linger_seconds)}"
    )


class SidecarProcess:
    """Sidecar of a feed directory, in a separate session without signals of the terminal.

    The supervisor calls `keep` regularly, and `ended` with the wait status when the child was reaped.
    """

    def __init__(self, command: tuple[str, ...], feed_directory: Path, *, mask: Collection[int]) -> None:
        self._command = command
        self._feed_directory = feed_directory
        self._mask = mask
        self._due = time.monotonic()  # of the next check
        self._joined = False
        self._started = 0.0
        self._failures = 0
        self._wanted = True
        self.pid: int | None = None

    def keep(self) -> None:
        """Start, join or restart the sidecar if that is due."""
        now = time.monotonic()
        if self.pid is not None or now < self._due:
            return
        if runs.owner(self._feed_directory) is not None:
            self._joined, self._due = True, now + WATCH_SECONDS
        elif self._joined:
            self._joined, self._due = False, now + VACANT_SECONDS
        else:
            try:
                self.pid, self._started = start_own(self._command, mask=self._mask), now
            except (OSError, NotImplementedError) as error:
                self._failed(f"cannot be started: {error}", now)

    def wait_seconds(self) -> float:
        """Return the time until `keep` has work to do."""
        return math.inf if self.pid is not None else max(0.0, self._due - time.monotonic())

    def send(self, number: int) -> None:
        """Send a signal; the process id of an unreaped child is not reused."""
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def let_end(self) -> None:
        """Expect the end of the sidecar: do not report the end, and start no other."""
        self._wanted, self._due = False, math.inf

    def ended(self, wait_status: int) -> None:
        """Record the wait status of the reaped child."""
        self.pid, self._due = None, math.inf
        now, status = time.monotonic(), os.waitstatus_to_exitcode(wait_status)
        if not self._wanted or status == REFUSED:  # the sidecar has written the reason
            return
        if status == JOINED:
            self._joined, self._due = True, now + WATCH_SECONDS
        elif status == 0:
            say("the sidecar was ended; the job continues without it")
        elif status > 0:
            self._failed(f"ended with status {status}", now)
        else:
            self._failed(f"was killed by {_signal_name(-status)}", now)

    def _failed(self, how: str, now: float) -> None:
        self._failures = 1 if now - self._started >= STEADY_SECONDS else self._failures + 1
        if self._failures > ATTEMPTS:
            self._due = math.inf
            say(f"the sidecar {how}, {self._failures} times in a row; the job continues without it")
            return
        delay = 2.0 ** (self._failures - 1)
        self._due = now + delay
        say(f"the sidecar {how}; restarting in {delay:.0f} s, the job is not affected")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
