"""Xid events of NVML.

Runs in the NVML child: the sampling thread registers GPUs, the event thread waits for events. Waiting fails for an
event set that contains a lost GPU. A new set is therefore created whenever a GPU is lost or returns; the old set is
not freed, because the event thread may be waiting for it. Events before the registration are lost; the sidecar also
reads Xids from the kernel log.
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
"""Maximum number of different Xids per GPU, larger than the number of existing Xids, so that garbage cannot create labels."""


class NvmlEvents:
    """Counter of the Xids of all GPUs.

    Args:
        library: The library of the event thread.
        wall: The wall clock.
    """

    def __init__(self, library: NvmlLibrary, *, wall: Callable[[], float]) -> None:
        self.library = library
        self._wall = wall
        self._lock = threading.Lock()  # guards the next two attributes
        self._xids: dict[int, dict[str, tuple[int, float]]] = {}
        self._indices: dict[int, int] = {}
        self._set: Any = None
        self._registered_indices: set[int] = set()
        self._thread: threading.Thread | None = None  # None before `start`

    def register(self, library: NvmlLibrary, devices: Iterable[NvmlDevice]) -> None:
        """Register the GPUs for Xid events in a new event set, if the GPUs have changed. A GPU without events is skipped."""
        devices_by_index = {device.index: device for device in devices}
        if devices_by_index.keys() == self._registered_indices:
            return
        self._registered_indices = set(devices_by_index)
        try:
            event_set = library.call("nvmlEventSetCreate")
        except CallFailedError:  # the driver has no events
            return
        for device in devices_by_index.values():
            with suppress(DeviceDownError):  # the next pass over the GPU reports the loss
                self._register_device(device, event_set)
        self._set = event_set
        self._start_thread()

    def start(self) -> None:
        """Start the event thread now, or after the first registration if no GPU answers yet."""
        self._thread = threading.Thread(target=self._run, name="nvml-events", daemon=True)
        self._start_thread()

    def poll(self) -> None:
        """Count pending events without waiting."""
        while self._set is not None and self._wait_for_event(0) == "":
            pass

    def xids(self, index: int) -> dict[str, tuple[int, float]]:
        """Return the Xids of a GPU since the child started: number of errors, and Unix time of the last, by Xid."""
        with self._lock:
            return dict(self._xids.get(index, {}))

    def _register_device(self, device: NvmlDevice, event_set: Any) -> None:
        event_types = device.query("events", "nvmlDeviceGetSupportedEventTypes")
        if not (event_types or 0) & XID:  # with an unsupported bit, the whole registration fails
            return
        with self._lock:
            self._indices[_address(device.handle)] = device.index
        try:
            device.library.call("nvmlDeviceRegisterEvents", device.handle, XID, event_set)
        except CallFailedError as failure:
            device.fail("events.registration", failure.call, failure.error)

    def _start_thread(self) -> None:
        if self._thread is not None and self._thread.ident is None and self._set is not None:
            self._thread.start()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            error = self._wait_for_event(_WAIT_MILLISECONDS)
            if error in {"uninitialized", "driver_not_loaded"}:
                return
            if error not in {"", "timeout"}:
                pause.wait(_PAUSE_SECONDS)  # waiting for this set fails immediately and repeatedly

    def _wait_for_event(self, milliseconds: int) -> str:
        """Wait for an event and count it. Return the error of the call, or "" after an event."""
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
