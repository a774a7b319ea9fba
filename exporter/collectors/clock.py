"""Clock: how far the kernel believes its clock to be off, and whether somebody disciplines it.

Used in the sidecar. `adjtimex` comes in, asked without changing anything. No threads, no state. Ranks of
several nodes are compared by time: a clock that is off makes stragglers out of innocents.

Source: man 2 adjtimex.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.errors import CollectError

OFFSET = FamilySpec(
    "host_time_offset_seconds",
    "gauge",
    "What the kernel still has to correct the clock by, as its time daemon told it. Absent off Linux, and where a sandbox forbids the call.",
    unit="seconds",
    source="adjtimex offset",
)
SYNCED = FamilySpec(
    "host_time_synced",
    "gauge",
    "Whether a time daemon keeps the clock (1) or not (0). Absent off Linux, and where a sandbox forbids the call.",
    source="adjtimex state is not TIME_ERROR",
)
SPECS = (OFFSET, SYNCED)

TIME_ERROR = 5
STA_NANO = 0x2000


class _Timex(ctypes.Structure):
    """Struct timex of the C library; the fields after `status` are only room, for which there is enough."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 40),
    )


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The kernel's opinion of its clock.

    Attributes:
        offset_seconds: What is left to correct.
        synced: Whether a time daemon keeps it.
    """

    offset_seconds: float
    synced: bool


def ask_kernel() -> ClockReading | None:
    """Call adjtimex with nothing to set; None where the C library has no such function.

    Raises:
        OSError: The system refuses the call.
    """
    adjtimex = getattr(ctypes.CDLL(None, use_errno=True), "adjtimex", None)
    if adjtimex is None:
        return None
    timex = _Timex()
    state = adjtimex(ctypes.byref(timex))
    if state < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    unit = 1e-9 if timex.status & STA_NANO else 1e-6
    return ClockReading(timex.offset * unit, state != TIME_ERROR)


class ClockCollector:
    """Asks the kernel about its clock.

    Args:
        ask: Gives its answer.
    """

    name = "clock"
    specs = SPECS
    reasons = ("permission", "unreadable")

    def __init__(self, *, ask: Callable[[], ClockReading | None] = ask_kernel) -> None:
        self._ask = ask

    def collect(self) -> Collected:
        """Ask once.

        Raises:
            CollectError: The system refuses the call.
        """
        draft = Draft()
        try:
            reading = self._ask()
        except PermissionError as error:
            raise CollectError(
                f"adjtimex: {error.strerror}; a container may need CAP_SYS_TIME in its seccomp profile to ask for the time",
                reason="permission",
            ) from error
        except OSError as error:
            raise CollectError(f"adjtimex: {error.strerror}", reason="unreadable") from error
        if reading is None:
            draft.unsupported("no adjtimex in the C library")
            return draft.finish()
        draft.add(OFFSET, reading.offset_seconds)
        draft.add(SYNCED, float(reading.synced))
        return draft.finish()
