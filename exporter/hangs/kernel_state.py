"""Kernel state of a process's main thread, for ranks that do not answer a stack request."""

from __future__ import annotations

from pathlib import Path

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "a zombie",
    "X": "dead",
    "I": "idle",
}
_MAX_LOCATION_CHARACTERS = 120
"""Maximum length of the name of a kernel function."""


def describe(pid: int | None, procfs: Path = Path("/proc")) -> str:
    """Return the state of a process's main thread as text.

    For a waiting thread, the text names the kernel function or the system call. If both are unknown, it names the files that this user may
    not read. For a process that has ended, is not visible or has an unreadable state, the text says so.

    Args:
        pid: Process id, or None for a process in another pid namespace.
        procfs: Root of procfs.
    """
    if pid is None:
        return "process not visible (in another pid namespace)"
    task = procfs / str(pid) / "task" / str(pid)
    try:
        stat = (task / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):  # the second if the process ends between open and read
        return "process has ended"
    except OSError as error:
        return f"state not readable: {error.strerror}"
    # The command before the last parenthesis may contain spaces.
    _, _, text_after_command = stat.rpartition(")")
    state, *_ = text_after_command.split() or [""]
    text = f"main thread {_STATES.get(state, state or 'in an unknown state')}"
    if state == "R":
        return f"{text}; a C call may hold the interpreter lock"
    if state in {"T", "t", "Z", "X"}:
        return text
    location, unreadable_files = _wait_location(task)
    if location:
        text += f" in {location}"
    if unreadable_files:
        text += f" ({' and '.join(unreadable_files)} not permitted)"
    return text


def _wait_location(task: Path) -> tuple[str, list[str]]:
    """Return the kernel function or system call in which a thread waits. If it is unknown, return "" and the unreadable files."""
    unreadable_files = []
    for name in ("wchan", "stack", "syscall"):
        try:
            text = (task / name).read_text(encoding="utf-8", errors="replace").strip()
        except PermissionError:
            unreadable_files.append(name)
            continue
        except OSError:
            continue
        if name == "wchan" and text not in {"", "0"}:
            return text[:_MAX_LOCATION_CHARACTERS], []
        if name == "stack" and text:
            innermost, *_ = text.splitlines()  # [<0>] futex_wait_queue+0x60/0x90
            _, _, position = innermost.partition(" ")
            function, _, _ = position.partition("+")
            return function[:_MAX_LOCATION_CHARACTERS], []
        if name == "syscall" and text:
            number, *_ = text.split()
            if number not in {"running", "-1"}:  # the thread runs, or waits outside of a system call
                return f"system call {number}", []
    return "", unreadable_files
