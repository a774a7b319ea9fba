"""Starting programs: the job with everything that `run` was given, our own with nothing of it but standard error.

A pipe that one of ours kept open would hide the job's end from whoever reads the job's output.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from exporter.cli.flags import JOINED, REFUSED, flags_of, say, value_of
from exporter.config.options import format_duration
from exporter.feed import runs

NOT_FOUND = 127
NOT_EXECUTABLE = 126

# CPython ignores these two for itself at startup, and an ignored signal survives exec.
IGNORED_BY_PYTHON = frozenset({signal.SIGPIPE, signal.SIGXFSZ})

LAUNCHER = Path(__file__).parents[2] / "training_exporter.py"
"""Starts a program of this package, whatever else is called `exporter` in the working directory or on the path."""

WATCH_SECONDS = 2.0
# A service that owns the directory may be restarting; taking over at once would take its port as well.
VACANT_SECONDS = 10.0
STEADY_SECONDS = 60.0
ATTEMPTS = 5

Action = tuple[int, ...] | tuple[int, int, str, int, int]
"""One file action of `os.posix_spawn`."""


class NotStartedError(Exception):
    """A command that could not be started: what a shell would report, as status and message."""


def own_command(*arguments: str) -> tuple[str, ...]:
    """The command line of a program of this package: `-m MODULE ARG...`, or the arguments of `training-exporter`."""
    return (sys.executable, str(LAUNCHER), *arguments)


def start_job(command: tuple[str, ...], *, environment: Mapping[str, str], mask: Collection[int]) -> int:
    """Start the job in our process group, with some signals blocked; its process id. Raises NotStartedError."""
    program = command[0]
    try:
        return os.posix_spawnp(program, command, environment, setsigmask=mask, setsigdef=IGNORED_BY_PYTHON)
    except OSError as error:
        missing = error.errno == errno.ENOENT and shutil.which(program) is None
        reason = "command not found" if missing and "/" not in program else error.strerror
        raise NotStartedError(NOT_FOUND if missing else NOT_EXECUTABLE, f"{program}: {reason}") from error


def start_own(command: tuple[str, ...], *, mask: Collection[int]) -> int:
    """Start a program of ours in a session of its own; its process id. Raises OSError or NotImplementedError."""
    return os.posix_spawn(
        command[0],
        command,
        passable_environment(os.environ),
        file_actions=[*closing_all_but({2}), (os.POSIX_SPAWN_DUP2, 2, 1)],
        setsid=True,
        setsigmask=mask,
        setsigdef=IGNORED_BY_PYTHON,
    )


def passable_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The entries that Python passes on; `=value`, without a name, can be inherited but is refused."""
    return {name: value for name, value in environment.items() if name}


def closing_all_but(kept: Collection[int]) -> list[Action]:
    """File actions that give a child /dev/null as its standard streams and nothing else but `kept`."""
    opened = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    closing: list[Action] = [(os.POSIX_SPAWN_CLOSE, each) for each in opened if each not in kept]
    streams = [each for each in range(3) if each not in kept]
    return closing + [(os.POSIX_SPAWN_OPEN, each, os.devnull, os.O_RDWR, 0) for each in streams]


def end_as(wait_status: int) -> int:
    """Die by the signal that a process has died by, without a core file of our own.

    A shell's loop stops at Ctrl-C only if its child was killed by SIGINT; a status of 130 does not stop it. Gives the
    exit status where the process ended by itself, and where we are process 1, which no signal ends.
    """
    if os.WIFSIGNALED(wait_status):
        number = os.WTERMSIG(wait_status)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        with suppress(OSError, ValueError):  # SIGKILL has no handler to reset
            signal.signal(number, signal.SIG_DFL)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def sidecar_command(given: argparse.Namespace, linger_seconds: float) -> tuple[str, ...]:
    """The command line of a sidecar that ends with the last run; quiet, since it writes where the job writes."""
    chosen = value_of(given, "--log.level") is not None or value_of(given, "--config.file") is not None
    level = () if chosen else ("--log.level=warn",)
    return own_command(
        *flags_of(given), *level, runs.ATTACHED_FLAG, f"--run.linger={format_duration(linger_seconds)}"
    )


class SidecarProcess:
    """Sees to it that a feed directory has a sidecar, in a session that the terminal's signals never reach.

    The owner calls `keep` now and then, and hands over the wait status when the child has ended.
    """

    def __init__(self, command: tuple[str, ...], feed_directory: Path, *, mask: Collection[int]) -> None:
        self._command = command
        self._feed_directory = feed_directory
        self._mask = mask
        self._due = time.monotonic()  # when to look again
        self._joined = False
        self._started = 0.0
        self._failures = 0
        self._wanted = True
        self.pid: int | None = None

    def keep(self) -> None:
        """Start, join or start again if it is time to."""
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
        """How long `keep` has nothing to do."""
        return math.inf if self.pid is not None else max(0.0, self._due - time.monotonic())

    def send(self, number: int) -> None:
        """Send it a signal; as a child that is not yet reaped, its process id is nobody else's."""
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def let_end(self) -> None:
        """From now on its end is expected: nothing is said about it, and none is started."""
        self._wanted, self._due = False, math.inf

    def ended(self, wait_status: int) -> None:
        """Take note that the child was reaped."""
        self.pid, self._due = None, math.inf
        now, status = time.monotonic(), os.waitstatus_to_exitcode(wait_status)
        if not self._wanted or status == REFUSED:  # it has said why
            return
        if status == JOINED:
            self._joined, self._due = True, now + WATCH_SECONDS
        elif status == 0:
            say("the sidecar was ended; the job goes on without it")
        elif status > 0:
            self._failed(f"ended with status {status}", now)
        else:
            self._failed(f"was killed by {_signal_name(-status)}", now)

    def _failed(self, how: str, now: float) -> None:
        self._failures = 1 if now - self._started >= STEADY_SECONDS else self._failures + 1
        if self._failures > ATTEMPTS:
            self._due = math.inf
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


# A sender that signals many processes one after another (`timeout`, slurmstepd) may reach the probe a
# little later than `run`.
SETTLE_SECONDS = 0.02
ANSWER_SECONDS = 5.0

# A byte that comes in is the number of a signal to forget. The blocked signals are inherited. It has a name of its own,
# so that `pkill -f "exporter run"` does not mean it too.
_PROGRAM = """
import os, signal
with open("/proc/self/comm", "w") as name:
    name.write("signal-probe")
while number := os.read(0, 1):
    signal.sigtimedwait(number, 0)
"""


class SignalProbe:
    """Tells whether a signal reached the whole process group or `run` alone.

    A tiny process in the job's group, with every signal blocked: one sent to the group becomes pending in it, where /proc
    shows it. The kernel offers no other way to tell, and a second SIGTERM, passed on to a job that has it, commonly means
    "stop saving, end now". It ends with `run`, whose end of a pipe closes. Raises OSError where none can be started.
    """

    def __init__(self) -> None:
        numbers, self._numbers = os.pipe()
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                (sys.executable, "-I", "-S", "-c", _PROGRAM),
                passable_environment(os.environ),
                file_actions=[*closing_all_but({numbers}), (os.POSIX_SPAWN_DUP2, numbers, 0)],
                setsigdef=IGNORED_BY_PYTHON,
            )
        except OSError:
            self.close()
            raise
        finally:
            os.close(numbers)

    def has_seen(self, number: int) -> bool | None:
        """Whether the process group got a signal that this process has just taken; None without an answer.

        More of the same number that came meanwhile are taken too and make one with it, as the kernel would have made
        of them: `timeout` signals its child, then the group.
        """
        time.sleep(SETTLE_SECONDS)
        while signal.sigtimedwait({number}, 0) is not None:
            pass
        seen = self._is_pending(number)
        if seen:
            # Forgotten before the next one is asked about, which may have been sent to `run` alone.
            until = time.monotonic() + ANSWER_SECONDS
            with suppress(OSError):  # it was killed: EPIPE
                os.write(self._numbers, bytes([number]))
            while self._is_pending(number) and time.monotonic() < until:
                time.sleep(0.001)
        return seen

    def end(self) -> None:
        """End it and wait until it has ended; not for one that was reaped."""
        self.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def close(self) -> None:
        """Let go of one that was reaped."""
        os.close(self._numbers)

    def _is_pending(self, number: int) -> bool | None:
        with suppress(OSError):
            status = Path(f"/proc/{self.pid}/status").read_text()
            if "\nState:\tZ" not in status:
                return bool(int(status.partition("\nShdPnd:")[2].split()[0], 16) & 1 << number - 1)
        return None
