"""Events of the driver: Xids.

Runs in the NVML child. NVML calls are made by the sampling thread and the event thread, which waits for events. With a lost GPU
every wait for the event set fails, so a new set is created whenever a GPU is lost or returns; the old set is not freed, since
the thread may be waiting for it. Events before the registration are lost; the sidecar also reads the kernel log.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from exporter.collectors.gpu.nvml.device import DeviceDownError, NvmlDevice
from exporter.collectors.gpu.nvml.library import CallFailedError, NvmlLibrary

XID = 0x8
_WAIT_MILLISECONDS = 5000
_PAUSE_SECONDS = 1.0
_MAX_XIDS = 200
"""Limit of different Xids of a GPU, above all existing Xids: garbage must not create labels."""


class NvmlEvents:
    """Counter of the Xids of all GPUs; `library` belongs to the event thread."""

    def __init__(self, library: NvmlLibrary, *, wall: Callable[[], float]) -> None:
        self.library = library
        self._wall = wall
        self._lock = threading.Lock()  # guards the next two
        self._xids: dict[int, dict[str, tuple[int, float]]] = {}
        self._indices: dict[int, int] = {}
        self._set: Any = None
        self._watched: set[int] = set()  # indices of the registered GPUs

    def watch(self, library: NvmlLibrary, devices: Iterable[NvmlDevice]) -> None:
        """Register these GPUs for events from now on; a GPU without events is a normal state."""
        present = {device.index: device for device in devices}
        if present.keys() == self._watched:
            return
        self._watched = set(present)
        try:
            event_set = library.call("nvmlEventSetCreate")
        except CallFailedError:  # this machine has no events
            return
        for device in present.values():
            with suppress(DeviceDownError):  # the next pass over the GPU finds out
                self._register(device, event_set)
        self._set = event_set

    def start(self) -> None:
        """Start the event thread, if there is an event set."""
        if self._set is not None:
            threading.Thread(target=self._run, name="nvml-events", daemon=True).start()

    def poll(self) -> None:
        """Count pending events without waiting."""
        while self._set is not None and self._take(0) == "":
            pass

    def xids(self, index: int) -> dict[str, tuple[int, float]]:
        """Return the number of each Xid of a GPU since the process started, and the Unix time of the last one."""
        with self._lock:
            return dict(self._xids.get(index, {}))

    def _register(self, device: NvmlDevice, event_set: Any) -> None:
        supported = device.query("events", "nvmlDeviceGetSupportedEventTypes")
        if not (supported or 0) & XID:  # an unsupported bit fails the whole registration
            return
        with self._lock:
            self._indices[_address(device.handle)] = device.index
        try:
            device.library.call("nvmlDeviceRegisterEvents", device.handle, XID, event_set)
        except CallFailedError as failure:
            device.fail("events.registration", failure.call, failure.error)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            error = self._take(_WAIT_MILLISECONDS)
            if error in {"uninitialized", "driver_not_loaded"}:
                return
            if error not in {"", "timeout"}:
                pause.wait(_PAUSE_SECONDS)  # such a wait fails at once, every time

    def _take(self, milliseconds: int) -> str:
        """Wait for an event; return the error, "" for none."""
        try:
            event = self.library.call("nvmlEventSetWait_v2", self._set, milliseconds)
        except CallFailedError as failure:
            if failure.error != "timeout":
                self.library.count_error(failure.call, failure.error)
            return failure.error
        with self._lock:
            index = self._indices.get(_address(event.device))
            if index is not None and event.eventType == XID:
                xids, xid = self._xids.setdefault(index, {}), str(event.eventData)
                if xid in xids or len(xids) < _MAX_XIDS:
                    xids[xid] = (xids.get(xid, (0, 0.0))[0] + 1, self._wall())
        return ""


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
