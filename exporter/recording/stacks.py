"""Stacks of this process's threads, for the explanation of a hang.

Runs on the recording thread, reads the frames of other threads and calls none of the job's code. Standard library only.
"""

from __future__ import annotations

import os
import sys
import threading
from enum import Enum
from types import FrameType

from exporter.recording.value_class import Value, value_class

MAX_FRAMES = 30
"""Innermost frames of the main thread."""
MAX_THREAD_FRAMES = 3
"""Innermost frames of any other thread."""
MAX_THREADS = 20
MAX_TEXT = 256
"""Characters of a file name or function."""

_OWN_PACKAGE = __file__.rpartition("/recording/")[0] + "/"
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + "/"  # noqa: PTH120  # pathlib is not loaded in the job
_PACKAGE_MARKERS = ("/site-packages/", "/dist-packages/")
_OWN_THREADS = "exporter"
"""All threads of the exporter have names that begin with it."""
_IDLE_FUNCTIONS = frozenset(
    [
        "wait",
        "_wait_for_tstate_lock",
        "select",
        "poll",
        "accept",
        "_worker",
        "get",
        "join",
        "_recv",
        "run_forever",
    ]
)
"""Functions of the standard library in which a thread without work waits."""


class Detail(Enum):
    """Content of an answer."""

    FULL = "full"  # whole stacks
    LOCATION = "location"  # the innermost frame of the job's own code, and the function called there


@value_class
class Frame(Value):
    """One frame of a Python stack; never arguments, never local variables."""

    file: str  # path as Python has it
    line: int
    function: str  # qualified name where Python has it (3.11 and later)
    library: bool = False  # part of the standard library or of an installed package


@value_class
class ThreadStack(Value):
    """The innermost frames of a thread, the innermost first."""

    name: str
    frames: tuple[Frame, ...]


def is_library(file: str) -> bool:
    """Return True for a file of the standard library, of an installed package or of the exporter, and for no file."""
    if any(marker in file for marker in _PACKAGE_MARKERS):
        return True
    return file.startswith(_STANDARD_LIBRARY) or (
        file.startswith("<") and file not in {"<stdin>", "<string>"}
    )


def capture(detail: Detail) -> tuple[ThreadStack, tuple[ThreadStack, ...]]:
    """Return the stack of the main thread, and those of the other threads that are not idle.

    With `Detail.LOCATION` only the innermost frame of the job's own code and the frame it called are kept, and no other
    thread.
    """
    frames = sys._current_frames()  # noqa: SLF001  # the documented way to read the stacks of other threads
    main_ident = threading.main_thread().ident
    main = ThreadStack("MainThread", _frames_of(frames.get(main_ident or 0), MAX_FRAMES))
    if detail is Detail.LOCATION:
        return ThreadStack(main.name, location_frames(main.frames)), ()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    others = []
    for ident, frame in frames.items():
        name = names.get(ident, f"thread {ident}")
        if ident == main_ident or name.startswith(_OWN_THREADS) or _is_idle(frame):
            continue
        others.append(ThreadStack(_printable(name), _frames_of(frame, MAX_THREAD_FRAMES)))
    return main, tuple(others[:MAX_THREADS])


def location_frames(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the innermost frame of the job's own code, after the frame that it called; all frames if none is its own."""
    for index, frame in enumerate(frames):
        if not frame.library:
            return frames[max(index - 1, 0) : index + 1]
    return frames[:1]


def _frames_of(frame: FrameType | None, most: int) -> tuple[Frame, ...]:
    found: list[Frame] = []
    while frame is not None and len(found) < most:
        code = frame.f_code
        function = getattr(code, "co_qualname", code.co_name)
        file = code.co_filename
        if not file.startswith(
            _OWN_PACKAGE
        ):  # blocks of the exporter around the job's code say nothing of the job
            found.append(Frame(_printable(file), frame.f_lineno or 0, _printable(function), is_library(file)))
        frame = frame.f_back
    return tuple(found)


def _is_idle(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name in _IDLE_FUNCTIONS and is_library(code.co_filename)


def _printable(text: str) -> str:
    shown = text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)
    return shown[-MAX_TEXT:]
