"""Sidecar process of `run`: start, join, restart after a crash, and exit after the job."""

from __future__ import annotations

import argparse
import math
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path

from exporter.cli.child import own_command, start_own
from exporter.cli.flags import EXIT_JOINED, EXIT_REFUSED, command_line_of, print_notice, value_of
from exporter.config.options import format_duration
from exporter.feed import runs

OWNER_CHECK_SECONDS = 2.0
"""Interval at which `run` checks that the joined sidecar still owns the feed directory."""
VACANT_SECONDS = 10.0
"""Wait after the end of a joined sidecar. A service may be restarting, and a new sidecar would occupy its port."""
STABLE_SECONDS = 60.0
"""Uptime after which a crash counts as the first failure again."""
MAX_RESTARTS = 5
"""Maximum number of restarts after failures in a row. A further failure is final."""
KILL_SECONDS = 1.5
"""Time between SIGTERM and SIGKILL of a sidecar that still runs after the wait for the final scrape."""
REAP_SECONDS = 0.5
"""Maximum wait for the exit of the sidecar after SIGKILL."""
EXIT_POLL_SECONDS = 0.1
"""Interval of the checks whether an ending sidecar has exited."""
LOG_DELAY_SECONDS = 2.0
"""Time after which `run` logs that it waits for a final scrape."""


def sidecar_command(flags: argparse.Namespace, linger_seconds: float) -> tuple[str, ...]:
    """Return the command line of an attached sidecar.

    The default log level is warn, because the sidecar shares standard error with the job.
    """
    has_level = value_of(flags, "--log.level") is not None or value_of(flags, "--config.file") is not None
    level = () if has_level else ("--log.level=warn",)
    return own_command(
        *command_line_of(flags), *level, runs.ATTACHED_FLAG, f"--run.linger={format_duration(linger_seconds)}"
    )


class SidecarProcess:
    """Sidecar of a feed directory, in a separate session, which the signals of the terminal do not reach.

    The supervisor calls `check` after `wait_seconds`, and `record_exit` after it has reaped the process.

    Attributes:
        pid: Process id of the running sidecar; None if this `run` has no sidecar of its own.
    """

    def __init__(self, command: tuple[str, ...], feed_directory: Path, *, mask: Collection[int]) -> None:
        self._command = command
        self._feed_directory = feed_directory
        self._mask = mask
        self._next_check_at = time.monotonic()
        self._is_joined = False
        self._started_at = 0.0
        self._failures = 0
        self._is_required = True
        self._is_signaled = False  # True once this `run` has sent a signal to the sidecar
        self.pid: int | None = None

    def check(self) -> None:
        """Start, join or restart the sidecar if a check is due. Does nothing while a sidecar of this `run` is running."""
        now = time.monotonic()
        if self.pid is not None or now < self._next_check_at:
            return
        if runs.owner(self._feed_directory) is not None:
            self._is_joined, self._next_check_at = True, now + OWNER_CHECK_SECONDS
        elif self._is_joined:
            self._is_joined, self._next_check_at = False, now + VACANT_SECONDS
        else:
            self._started_at = now  # also after a failure, which otherwise would count as a long uptime
            try:
                self.pid = start_own(self._command, mask=self._mask)
            except (OSError, NotImplementedError) as error:
                self._record_failure(f"cannot be started: {error}", now)

    def wait_seconds(self) -> float:
        """Return the time until `check` has work to do; infinite while a sidecar of this `run` is running."""
        return math.inf if self.pid is not None else max(0.0, self._next_check_at - time.monotonic())

    def send(self, signal_number: int) -> None:
        """Send a signal to the sidecar of this `run`, if any. Until the supervisor reaps it, no other process can have its id."""
        if self.pid is not None:
            self._is_signaled = True
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)

    def expect_exit(self) -> None:
        """Expect the exit of the sidecar, which is then not followed by a restart. Only a failure is reported."""
        self._is_required, self._next_check_at = False, math.inf

    def record_exit(self, wait_status: int) -> None:
        """Record the wait status of the reaped sidecar, and schedule a restart after a failure.

        A refused start and a normal exit are final. After `EXIT_JOINED`, the sidecar of a different `run` is used.
        """
        self.pid, self._next_check_at = None, math.inf
        now, status = time.monotonic(), os.waitstatus_to_exitcode(wait_status)
        if status == EXIT_REFUSED:  # the sidecar has logged the reason
            return
        failure = f"ended with status {status}" if status > 0 else f"was killed by {_signal_name(-status)}"
        if not self._is_required:
            if status not in {0, EXIT_JOINED} and not self._is_signaled:
                print_notice(
                    f"the sidecar {failure} after the job; the last values of the job may be missing"
                )
        elif status == EXIT_JOINED:
            self._is_joined, self._next_check_at = True, now + OWNER_CHECK_SECONDS
        elif status == 0:
            print_notice("the sidecar has exited; the job continues without metrics")
        else:
            self._record_failure(failure, now)

    def _record_failure(self, event: str, now: float) -> None:
        """Schedule a restart after 1, 2, 4, 8 and 16 s. After a further failure, the job continues without metrics."""
        self._failures = 1 if now - self._started_at >= STABLE_SECONDS else self._failures + 1
        if self._failures > MAX_RESTARTS:
            self._next_check_at = math.inf
            print_notice(
                f"the sidecar {event}, {self._failures} times in a row; the job continues without metrics"
            )
            return
        delay = 2.0 ** (self._failures - 1)
        self._next_check_at = now + delay
        print_notice(f"the sidecar {event}; it restarts in {delay:.0f} s; the job is not affected")


class ExitStage(Enum):
    """Stage of the sidecar's exit after the end of the job."""

    LINGERING = auto()  # the sidecar waits for a final scrape and then exits by itself
    TERMINATED = auto()  # SIGTERM is sent
    KILLED = auto()  # SIGKILL is sent


class SidecarExit:
    """Exit of the sidecar after the end of the job: the linger period, then SIGTERM, then SIGKILL.

    A sidecar that another `run` has started receives no signal.
    """

    def __init__(
        self,
        sidecar: SidecarProcess,
        *,
        linger_seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sidecar = sidecar
        self._linger_seconds = linger_seconds
        self._monotonic = monotonic
        self._stage = ExitStage.LINGERING
        self._stage_ends_at = monotonic() + linger_seconds
        self._log_at = monotonic() + LOG_DELAY_SECONDS

    def wait_seconds(self) -> float:
        """Return the time until the next call of `advance`."""
        return min(EXIT_POLL_SECONDS, max(0.0, self._stage_ends_at - self._monotonic()))

    def end_linger_period(self) -> None:
        """Let the next call of `advance` end the linger period."""
        if self._stage is ExitStage.LINGERING:
            self._stage_ends_at = self._monotonic()

    def advance(self) -> bool:
        """Start the next stage if the current one is over. Return False if `run` must exit now, although the sidecar still runs."""
        now = self._monotonic()
        if now < self._stage_ends_at:
            if self._stage is ExitStage.LINGERING and now >= self._log_at:
                self._log_at = math.inf
                print_notice(
                    f"the job has ended; waiting up to {self._linger_seconds:.0f} s for a final scrape (Ctrl-C to stop)"
                )
            return True
        if self._sidecar.pid is None:
            return False
        if self._stage is ExitStage.LINGERING:
            self._sidecar.send(signal.SIGTERM)
            self._stage, self._stage_ends_at = ExitStage.TERMINATED, now + KILL_SECONDS
        elif self._stage is ExitStage.TERMINATED:
            self._sidecar.send(signal.SIGKILL)
            self._stage, self._stage_ends_at = ExitStage.KILLED, now + REAP_SECONDS
        else:
            # The sidecar is blocked in the kernel, for example by a file system. The job's exit status must not wait.
            print_notice(
                f"the sidecar (process {self._sidecar.pid}) does not exit after SIGKILL; `run` exits without it"
            )
            return False
        return True


def _signal_name(signal_number: int) -> str:
    try:
        return signal.Signals(signal_number).name
    except ValueError:
        return f"signal {signal_number}"
