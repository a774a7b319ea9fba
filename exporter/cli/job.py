"""Starting the user's command and naming its end as a shell would.

Used by `run` only. The job keeps the terminal, the process group, the standard streams and every inherited
descriptor of `run`; its signal mask and dispositions are those that `run` was started with. After it is
started it owes nothing to `run`: it goes on when `run` dies.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass

NOT_FOUND = 127
NOT_EXECUTABLE = 126
KILLED_BY_SIGNAL = 128

# CPython ignores these two for itself at startup, and an ignored signal survives exec.
IGNORED_BY_PYTHON = frozenset({signal.SIGPIPE, signal.SIGXFSZ})


@dataclass(frozen=True, slots=True)
class NotStarted:
    """A command that could not be started.

    Attributes:
        status: What a shell would report: 126 or 127.
        message: One line, in a shell's words.
    """

    status: int
    message: str


def start(
    command: tuple[str, ...],
    *,
    environment: Mapping[str, str],
    mask: Collection[int],
    defaults: Collection[int],
) -> int | NotStarted:
    """Start the job in our process group.

    Args:
        command: Program and arguments; a program without a slash is looked up in PATH.
        environment: The job's whole environment.
        mask: Signals that are blocked in the job.
        defaults: Signals set to their default action in the job.

    Returns:
        The job's process id.
    """
    try:
        return os.posix_spawnp(command[0], command, environment, setsigmask=mask, setsigdef=defaults)
    except OSError as error:
        failure = error
    program = shutil.which(command[0])
    if failure.errno == errno.ENOEXEC and program is not None and _is_text(program):
        # A script without a `#!` line: a shell runs it itself.
        script = ("/bin/sh", program, *command[1:])
        try:
            return os.posix_spawn(script[0], script, environment, setsigmask=mask, setsigdef=defaults)
        except OSError as error:
            failure = error
    return _explain(command[0], failure, found=program is not None)


def exit_status(wait_status: int) -> int:
    """The exit status that a shell reports for a process that has ended."""
    if os.WIFSIGNALED(wait_status):
        return KILLED_BY_SIGNAL + os.WTERMSIG(wait_status)
    return os.WEXITSTATUS(wait_status)


def _is_text(program: str) -> bool:
    """A shell's own test: no zero byte in the first line."""
    try:
        with open(program, "rb") as file:  # noqa: PTH123  # the user's own spelling, as above
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
