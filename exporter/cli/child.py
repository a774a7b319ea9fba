"""Child processes of `run`: the job, and programs of this package, which inherit standard error only.

If a program of this package held other descriptors of the job open, a reader of the job's output would not see the end of the
job.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

EXIT_NOT_FOUND = 127
"""Exit status of a shell for a command that does not exist."""
EXIT_NOT_EXECUTABLE = 126
"""Exit status of a shell for a command that cannot be executed."""

# CPython ignores these two signals at startup, and an ignored signal survives exec.
IGNORED_BY_PYTHON = frozenset({signal.SIGPIPE, signal.SIGXFSZ})

LAUNCHER = Path(__file__).parents[2] / "training_exporter.py"
"""Program that starts modules of this package even if an unrelated `exporter` is on the module search path."""

FileAction = tuple[int, ...] | tuple[int, int, str, int, int]
"""Close, duplicate or open action on a descriptor, in the form that `os.posix_spawn` requires."""


class NotStartedError(Exception):
    """Failure to start a command. `status` is the exit status that a shell would return."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def own_command(*arguments: str) -> tuple[str, ...]:
    """Return a command line of this package for `-m MODULE ARG...`, or for the arguments of `training-exporter`."""
    return (sys.executable, str(LAUNCHER), *arguments)


def start_job(command: tuple[str, ...], *, environment: Mapping[str, str], mask: Collection[int]) -> int:
    """Start the job in the current process group and return its process id. Raises NotStartedError."""
    program = command[0]
    try:
        return os.posix_spawnp(program, command, environment, setsigmask=mask, setsigdef=IGNORED_BY_PYTHON)
    except OSError as error:
        is_missing = error.errno == errno.ENOENT and shutil.which(program) is None
        reason = "command not found" if is_missing and "/" not in program else error.strerror
        raise NotStartedError(
            EXIT_NOT_FOUND if is_missing else EXIT_NOT_EXECUTABLE, f"{program}: {reason}"
        ) from error


def start_own(command: tuple[str, ...], *, mask: Collection[int]) -> int:
    """Start a program of this package in a new session. Raises OSError or NotImplementedError."""
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
    """Return the variables that have a name. Python can inherit an entry `=value`, but cannot pass it to a child process."""
    return {name: value for name, value in environment.items() if name}


def closing_all_but(kept_descriptors: Collection[int]) -> list[FileAction]:
    """Return file actions that close all other descriptors, and open /dev/null for the closed standard streams."""
    open_descriptors = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    close_actions: list[FileAction] = [
        (os.POSIX_SPAWN_CLOSE, descriptor)
        for descriptor in open_descriptors
        if descriptor not in kept_descriptors
    ]
    missing_streams = [descriptor for descriptor in range(3) if descriptor not in kept_descriptors]
    return close_actions + [
        (os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in missing_streams
    ]


def end_as(wait_status: int) -> int:
    """Terminate by the signal that has terminated a process, without a core file. After a normal exit, return the exit status.

    A loop of a shell stops at Ctrl-C if its command was killed by SIGINT, but not if the command exits with status 130. Process 1,
    which these signals do not terminate, returns 128 plus the number of the signal.
    """
    if os.WIFSIGNALED(wait_status):
        signal_number = os.WTERMSIG(wait_status)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        with suppress(OSError, ValueError):  # SIGKILL has no handler to reset
            signal.signal(signal_number, signal.SIG_DFL)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os.kill(os.getpid(), signal_number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal_number})
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code
