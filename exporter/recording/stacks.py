"""Stacks of this process's threads, for the explanation of a hang.

The recording thread captures the stacks. It reads the frames of other threads, and runs no code of the job.
"""

from __future__ import annotations

import os
import sys
import threading
from enum import Enum
from types import FrameType

from exporter.recording.value_class import Value, value_class

MAX_FRAMES = 30
"""Maximum number of frames of the main thread; the innermost frames are kept."""
MAX_THREAD_FRAMES = 3
"""Maximum number of frames of another thread; the innermost frames are kept."""
MAX_THREADS = 20
"""Maximum number of threads besides the main thread."""
MAX_STACK_NAME_CHARACTERS = 256
"""Maximum length of the name of a file, function or thread; the end of a longer name is kept."""

_OWN_PACKAGE_DIRECTORY = __file__.rpartition("/recording/")[0] + "/"
_STANDARD_LIBRARY_DIRECTORY = os.path.dirname(os.__file__) + "/"  # noqa: PTH120  # pathlib is not loaded in the job
_PACKAGE_MARKERS = ("/site-packages/", "/dist-packages/")
_OWN_THREAD_PREFIX = "exporter"
"""Prefix of the names of the exporter's threads."""
_IDLE_FUNCTIONS = frozenset(
    {
        "_recv",
        "_wait_for_tstate_lock",
        "_worker",
        "accept",
        "get",
        "join",
        "poll",
        "run_forever",
        "select",
        "wait",
    }
)
"""Functions of libraries in which an idle thread waits."""


class StackDetail(Enum):
    """Detail of a stack capture."""

    FULL = "full"  # the main thread, and other threads that are not idle
    LOCATION = "location"  # innermost frame of the job's own code, and the frame that it called


@value_class
class Frame(Value):
    """Frame of a Python stack, without arguments and local variables."""

    file: str  # path in the code object
    line: int
    function: str  # qualified name from Python 3.11, otherwise the plain name
    library: bool = False  # part of the standard library or of an installed package


@value_class
class ThreadStack(Value):
    """Innermost frames of a thread, the innermost first."""

    name: str
    frames: tuple[Frame, ...]


def is_library(file: str) -> bool:
    """Return True for a file of the standard library or of an installed package, and for generated code."""
    if any(marker in file for marker in _PACKAGE_MARKERS):
        return True
    is_generated = file.startswith("<") and file not in {"<stdin>", "<string>"}  # `python -` and `python -c`
    return is_generated or file.startswith(_STANDARD_LIBRARY_DIRECTORY)


def capture(detail: StackDetail) -> tuple[ThreadStack, tuple[ThreadStack, ...]]:
    """Return the stack of the main thread, and the stacks of the other threads that are not idle.

    With `StackDetail.LOCATION`, return `location_frames` of the main thread, and no other threads.
    """
    frame_by_ident = sys._current_frames()  # noqa: SLF001  # the documented way to read the stacks of other threads
    main_ident = threading.main_thread().ident
    main = ThreadStack("MainThread", _frames_of(frame_by_ident.get(main_ident or 0), MAX_FRAMES))
    if detail is StackDetail.LOCATION:
        return ThreadStack(main.name, location_frames(main.frames)), ()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    other_stacks = []
    for ident, frame in frame_by_ident.items():
        name = names.get(ident, f"thread {ident}")
        if ident == main_ident or name.startswith(_OWN_THREAD_PREFIX) or _is_idle(frame):
            continue
        other_stacks.append(ThreadStack(_printable(name), _frames_of(frame, MAX_THREAD_FRAMES)))
    return main, tuple(other_stacks[:MAX_THREADS])


def location_frames(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the frame that the job's own code called, then the innermost frame of that code.

    Returns the innermost frame if the stack has no frame of the job's own code.
    """
    for index, frame in enumerate(frames):
        if not frame.library:
            return frames[max(index - 1, 0) : index + 1]
    return frames[:1]


def _frames_of(frame: FrameType | None, max_frames: int) -> tuple[Frame, ...]:
    """Return the innermost frames of a stack, without frames of this package; no frames for None."""
    frames: list[Frame] = []
    while frame is not None and len(frames) < max_frames:
        code = frame.f_code
        function = getattr(code, "co_qualname", code.co_name)
        file = code.co_filename
        # The exporter's wrappers around functions of the job would hide the job's own frames.
        if not file.startswith(_OWN_PACKAGE_DIRECTORY):
            frames.append(
                Frame(_printable(file), frame.f_lineno or 0, _printable(function), is_library(file))
            )
        frame = frame.f_back
    return tuple(frames)


def _is_idle(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name in _IDLE_FUNCTIONS and is_library(code.co_filename)


def _printable(name: str) -> str:
    """Return the last `MAX_STACK_NAME_CHARACTERS` characters of a name, with `?` for characters that are not printable."""
    if not name.isprintable():
        name = "".join(character if character.isprintable() else "?" for character in name)
    return name[-MAX_STACK_NAME_CHARACTERS:]
