"""Starting programs: the job with everything that `run` was given, our own with nothing of it.

Used by `run` and `demo`. The job keeps the terminal, the process group, the standard streams and every inherited
descriptor; its signal mask and dispositions are those that `run` was started with, and it goes on when `run` dies. Our
own programs get a session of their own and no descriptor but standard error: a pipe that one of them kept open would
hide the job's end from whoever reads the job's output.
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
from dataclasses import dataclass
from pathlib import Path

NOT_FOUND = 127
NOT_EXECUTABLE = 126
KILLED_BY_SIGNAL = 128

# CPython ignores these two for itself at startup, and an ignored signal survives exec.
IGNORED_BY_PYTHON = frozenset({signal.SIGPIPE, signal.SIGXFSZ})

LAUNCHER = Path(__file__).parents[2] / "training_exporter.py"
"""Starts a program of this package, whatever else is called `exporter` in the working directory or on the path."""

Action = tuple[int, ...] | tuple[int, int, str, int, int]
"""One file action of `os.posix_spawn`."""


@dataclass(frozen=True, slots=True)
class NotStarted:
    """A command that could not be started.

    Attributes:
        status: What a shell would report: 126 or 127.
        message: One line, in a shell's words.
    """

    status: int
    message: str


def own_command(*arguments: str) -> tuple[str, ...]:
    """The command line of a program of this package: `-m MODULE ARG...`, or the arguments of `training-exporter`."""
    return (sys.executable, str(LAUNCHER), *arguments)


def say(line: str) -> None:
    """One line on standard error; a closed or full one is not the job's business."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(f"exporter: {line}", file=sys.stderr, flush=True)


def start_job(
    command: tuple[str, ...], *, environment: Mapping[str, str], mask: Collection[int]
) -> int | NotStarted:
    """Start the job in our process group.

    Args:
        command: Program and arguments; a program without a slash is looked up in PATH.
        environment: The job's whole environment.
        mask: Signals that are blocked in the job.

    Returns:
        The job's process id.
    """
    try:
        return os.posix_spawnp(command[0], command, environment, setsigmask=mask, setsigdef=IGNORED_BY_PYTHON)
    except OSError as error:
        failure = error
    program = shutil.which(command[0])
    if failure.errno == errno.ENOEXEC and program is not None and _is_text(program):
        # A script without a `#!` line: a shell runs it itself.
        script = ("/bin/sh", program, *command[1:])
        try:
            return os.posix_spawn(
                script[0], script, environment, setsigmask=mask, setsigdef=IGNORED_BY_PYTHON
            )
        except OSError as error:
            failure = error
    return _explain(command[0], failure, found=program is not None)


def start_own(arguments: Collection[str], *, mask: Collection[int]) -> int:
    """Start this package's program, or another, in a session of its own.

    Args:
        arguments: The absolute program and its arguments.
        mask: Signals that are blocked in it.

    Raises:
        OSError: It cannot be started.
        NotImplementedError: The C library has no POSIX_SPAWN_SETSID.
    """
    command = tuple(arguments)
    if sys.stderr is None:  # closed by the caller: whatever has its number now is not a stream
        actions = closing_all_but()
    else:
        actions = [*closing_all_but({2}), (os.POSIX_SPAWN_DUP2, 2, 1)]
    return os.posix_spawn(
        command[0],
        command,
        passable_environment(os.environ),
        file_actions=actions,
        setsid=True,
        setsigmask=mask,
        setsigdef=IGNORED_BY_PYTHON,
    )


def passable_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The entries that Python passes on; `=value`, without a name, can be inherited but is refused."""
    return {name: value for name, value in environment.items() if name}


def closing_all_but(kept: Collection[int] = ()) -> list[Action]:
    """File actions that give a child /dev/null as its three standard streams, and nothing else.

    Args:
        kept: Left open, for actions that follow; those that Python made close themselves.
    """
    opened = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    actions: list[Action] = [
        (os.POSIX_SPAWN_CLOSE, descriptor) for descriptor in opened if descriptor not in kept
    ]
    actions += [
        (os.POSIX_SPAWN_OPEN, standard, os.devnull, os.O_RDWR, 0)
        for standard in range(3)
        if standard not in kept
    ]
    return actions


def exit_status(wait_status: int) -> int:
    """The exit status that a shell reports for a process that has ended."""
    if os.WIFSIGNALED(wait_status):
        return KILLED_BY_SIGNAL + os.WTERMSIG(wait_status)
    return os.WEXITSTATUS(wait_status)


def end_as(wait_status: int) -> int:
    """Die by the signal that a process has died by, without a core file of our own.

    A shell's loop stops at Ctrl-C only if its child was killed by SIGINT; a status of 130 does not stop it.

    Returns:
        The exit status to end with: the process ended by itself, or we are process 1, which no signal ends.
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
    return exit_status(wait_status)


def _is_text(program: str) -> bool:
    """A shell's own test: no zero byte in the first line."""
    try:
        with open(program, "rb") as file:  # noqa: PTH123  # the user's own spelling
            return b"\0" not in file.readline(256)
    except OSError:
        return False


def _explain(program: str, error: OSError, *, found: bool) -> NotStarted:
    if error.errno != errno.ENOENT:
        reason = error.strerror or str(error)
        if error.errno == errno.EACCES and os.path.isdir(program):  # noqa: PTH112  # the user's own spelling
            reason = os.strerror(errno.EISDIR)
        return NotStarted(NOT_EXECUTABLE, f"{program}: {reason}")
    if found:
        return NotStarted(NOT_EXECUTABLE, f"{program}: bad interpreter: {error.strerror}")
    if "/" in program:
        return NotStarted(NOT_FOUND, f"{program}: {error.strerror}")
    return NotStarted(NOT_FOUND, f"{program}: command not found")
