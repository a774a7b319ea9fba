"""The sidecar's memory: one arena for all of its threads.

Used in the sidecar, once, before it starts a thread. No state.
"""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8
"""Of glibc's malloc.h."""


def use_one_arena() -> None:
    """Let all threads share one arena of glibc's malloc; does nothing where there is another malloc.

    By default each of the first sixteen or so threads gets its own, and what one has freed is of no use to the others:
    4 of 48 MiB, for threads that take turns anyway. Source: mallopt(3), M_ARENA_MAX.
    """
    try:
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    except (AttributeError, OSError):  # musl, macOS
        return
