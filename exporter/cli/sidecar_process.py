"""The sidecar as its parent sees it: started apart from the job, joined where one is there, started again.

Used in `run` and `demo`. The sidecar lives in a session of its own, so that the terminal's signals never
reach it, and inherits nothing but standard error. No threads: the owner calls `keep` now and then and hands
over the wait status when the child has ended. Whatever happens to the sidecar costs the job nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from exporter.cli.processes import own_command
from exporter.config.options import format_duration
from exporter.feed.runs import ATTACHED_FLAG

NAME_FLAG = "--run.name"
LINGER_FLAG = "--run.linger"
DURATION_FLAG = "--demo.duration"
SEED_FLAG = "--demo.seed"
SPEED_FLAG = "--demo.speed"
OWN_FLAGS = frozenset({NAME_FLAG, LINGER_FLAG, DURATION_FLAG, SEED_FLAG, SPEED_FLAG})

# Exit statuses of the sidecar: refused at start (flag, configuration, port), and the feed directory
# belongs to another sidecar.
REFUSED = 2
JOINED = 3

WATCH_SECONDS = 2.0
# A service that owns the directory may be restarting; taking over at once would take its port as well.
VACANT_SECONDS = 10.0
STEADY_SECONDS = 60.0
ATTEMPTS = 5


def sidecar_command(
    flags: Sequence[str], given: Mapping[str, object], *, linger_seconds: float
) -> tuple[str, ...]:
    """The command line of a sidecar that ends with the last run.

    It writes where the job writes, so what this machine lacks is kept to itself unless somebody chose a level.

    Args:
        flags: As the user gave them; the flags of `run` and `demo` themselves are left out.
        given: The same, parsed.
        linger_seconds: How long it may wait for the last scrape.
    """
    chosen = given["log.level"] is not None or given["config.file"] is not None
    level = () if chosen else ("--log.level=warn",)
    linger = f"{LINGER_FLAG}={format_duration(linger_seconds)}"
    return own_command(*without(flags, OWN_FLAGS), *level, ATTACHED_FLAG, linger)


def without(flags: Sequence[str], names: Collection[str]) -> list[str]:
    """A command line without some flags and their values, as `--name value` or `--name=value`."""
    kept: list[str] = []
    rest = iter(flags)
    for flag in rest:
        if flag in names:
            next(rest, None)
        elif flag.partition("=")[0] not in names:
            kept.append(flag)
    return kept


class SidecarProcess:
    """Sees to it that a feed directory has a sidecar.

    Args:
        start: Starts one and returns its process id; raises OSError.
        owned: Whether some sidecar owns the directory.
        say: Takes one line for the user.
        monotonic: Seconds.
    """

    def __init__(
        self,
        *,
        start: Callable[[], int],
        owned: Callable[[], bool],
        say: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._owned = owned
        self._say = say
        self._monotonic = monotonic
        self._due: float | None = monotonic()  # when to look again; None: never
        self._joined = False
        self._started = 0.0
        self._failures = 0
        self._wanted = True
        self.pid: int | None = None

    def keep(self) -> None:
        """Start, join or start again if it is time to."""
        now = self._monotonic()
        if self.pid is not None or self._due is None or now < self._due:
            return
        if self._owned():
            self._joined, self._due = True, now + WATCH_SECONDS
        elif self._joined:
            self._joined, self._due = False, now + VACANT_SECONDS
        else:
            self._launch(now)

    def wait_seconds(self) -> float | None:
        """How long `keep` has nothing to do; None for ever."""
        if self.pid is not None or self._due is None:
            return None
        return max(0.0, self._due - self._monotonic())

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
        if not self._wanted:
            return
        now = self._monotonic()
        if os.WIFEXITED(wait_status):
            status = os.WEXITSTATUS(wait_status)
            if status == JOINED:
                self._joined, self._due = True, now + WATCH_SECONDS
                return
            if status == REFUSED:  # it has said why
                self._due = None
                return
            if status == 0:
                self._due = None
                self._say("the sidecar was ended; the job goes on without it")
                return
            how = f"ended with status {status}"
        else:
            how = f"was killed by {_signal_name(os.WTERMSIG(wait_status))}"
        self._failed(how, now)

    def _launch(self, now: float) -> None:
        try:
            self.pid = self._start()
        except (OSError, NotImplementedError) as error:  # the latter: a C library without POSIX_SPAWN_SETSID
            self._failed(f"cannot be started: {error}", now)
        else:
            self._started, self._due = now, None

    def _failed(self, how: str, now: float) -> None:
        if now - self._started >= STEADY_SECONDS:
            self._failures = 0
        self._failures += 1
        if self._failures > ATTEMPTS:
            self._due = None
            self._say(f"the sidecar {how}, {self._failures} times in a row; the job goes on without it")
            return
        delay = 2.0 ** (self._failures - 1)
        self._due = now + delay
        self._say(f"the sidecar {how}; starting it again in {delay:.0f} s, the job is not affected")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
