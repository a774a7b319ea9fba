"""Xid events of NVML.

Runs in the NVML child: the sampling thread registers GPUs, and the event thread waits for events. Waiting fails for an event set that
contains a lost GPU. A new set is therefore created whenever a GPU is lost or returns. The old set is not freed, because the event
thread may be waiting for it. If both sets contain a GPU, both deliver its events, and only those of the latest set are counted. NVML
reports no events from before the registration; for these, the sidecar also reads the kernel log.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from exporter.collectors.gpu.nvml.device import DeviceDownError, NvmlDevice
from exporter.collectors.gpu.nvml.library import CallFailedError, NvmlLibrary

XID = 0x8
"""Type of an Xid event (nvmlEventTypeXidCriticalError)."""
_WAIT_MILLISECONDS = 5000
"""Timeout of a wait for an event."""
_PAUSE_SECONDS = 1.0
"""Time between two waits for a set whose last wait has failed."""
_MAX_XIDS = 200
"""Maximum number of different Xids per GPU, larger than the number of existing Xids, so that garbage cannot create labels."""


@dataclass(slots=True)
class _EventSet:
    """NVML's event set, with its GPUs."""

    handle: Any
    addresses: set[int] = field(default_factory=set)  # of the handles of the registered GPUs


class NvmlEvents:
    """Counter of the Xids of all GPUs.

    Args:
        library: The library of the event thread.
        wall: The wall clock.
    """

    def __init__(self, library: NvmlLibrary, *, wall: Callable[[], float]) -> None:
        self.library = library
        self._wall = wall
        self._lock = threading.Lock()  # guards `_xids` and `_indices`
        self._xids: dict[int, dict[str, tuple[int, float]]] = {}  # see `xids`, by NVML index
        self._indices: dict[int, int] = {}  # NVML index by address of the handle
        self._event_set: _EventSet | None = None  # the latest set
        self._registered_indices: set[int] = set()  # GPUs of the last call of `register`
        self._is_started = False
        self._thread: threading.Thread | None = None

    def register(self, library: NvmlLibrary, devices: Iterable[NvmlDevice]) -> None:
        """Register the GPUs for Xid events in a new event set, if the GPUs have changed. A GPU without events is skipped.

        Called in each pass. If the event thread cannot be started, the call counts the pending events itself.
        """
        devices_by_index = {device.index: device for device in devices}
        if devices_by_index.keys() != self._registered_indices:
            self._registered_indices = set(devices_by_index)
            self._replace_set(library, devices_by_index.values())
        self._start_thread()

    def start(self) -> None:
        """Start the event thread now, or after the first registration if no GPU answers yet."""
        self._is_started = True
        self._start_thread()

    def poll(self) -> None:
        """Count pending events without waiting."""
        while self._event_set is not None and self._wait_for_event(0) == "":
            pass

    def xids(self, index: int) -> dict[str, tuple[int, float]]:
        """Return the Xids of a GPU since the child started: number of errors, and Unix time of the last, by Xid."""
        with self._lock:
            return dict(self._xids.get(index, {}))

    def _replace_set(self, library: NvmlLibrary, devices: Iterable[NvmlDevice]) -> None:
        """Register the GPUs in a new event set. The event thread uses the set after its current wait."""
        try:
            event_set = _EventSet(library.call("nvmlEventSetCreate"))
        except CallFailedError:  # the driver has no events
            return
        for device in devices:
            with suppress(DeviceDownError):  # the next pass over the GPU reports the loss
                self._register_device(device, event_set)
        self._event_set = event_set

    def _register_device(self, device: NvmlDevice, event_set: _EventSet) -> None:
        """Register a GPU in an event set, unless the GPU has no Xid events. Raises DownError."""
        event_types = device.query("events", "nvmlDeviceGetSupportedEventTypes")
        if not (event_types or 0) & XID:  # with an unsupported bit, the whole registration fails
            return
        with self._lock:
            self._indices[_address(device.handle)] = device.index
        try:
            device.library.call("nvmlDeviceRegisterEvents", device.handle, XID, event_set.handle)
        except CallFailedError as failure:
            device.record_failure("events.registration", failure.call, failure.error)
        else:
            event_set.addresses.add(_address(device.handle))

    def _start_thread(self) -> None:
        """Start the event thread after `start` and the first registration. If no thread can be started, count the pending events here."""
        if not self._is_started or self._thread is not None or self._event_set is None:
            return
        thread = threading.Thread(target=self._run, name="nvml-events", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the limit of threads is reached; the next pass tries again
            self.poll()
        else:
            self._thread = thread

    def _run(self) -> None:
        """Wait for events until NVML is shut down or the driver is unloaded."""
        pause = threading.Event()
        while True:
            error = self._wait_for_event(_WAIT_MILLISECONDS)
            if error in {"uninitialized", "driver_not_loaded"}:
                return
            if error not in {"", "timeout"}:
                pause.wait(_PAUSE_SECONDS)  # waiting for this set fails immediately and repeatedly

    def _wait_for_event(self, milliseconds: int) -> str:
        """Wait for an event, and count the event if it is an Xid. Return the error of the call, or "" after an event."""
        event_set = self._event_set
        assert event_set is not None  # noqa: S101  # the callers check it
        try:
            event = self.library.call("nvmlEventSetWait_v2", event_set.handle, milliseconds)
        except CallFailedError as failure:
            if failure.error != "timeout":
                self.library.count_error(failure.call, failure.error)
            return failure.error
        address, latest_set = _address(event.device), self._event_set
        if event_set is not latest_set and latest_set is not None and address in latest_set.addresses:
            return ""  # the latest set delivers the event, too
        with self._lock:
            index = self._indices.get(address)
            if index is not None and event.eventType == XID:
                xids, xid = self._xids.setdefault(index, {}), str(event.eventData)
                if xid in xids or len(xids) < _MAX_XIDS:
                    count, _ = xids.get(xid, (0, 0.0))
                    xids[xid] = (count + 1, self._wall())
        return ""


def _address(handle: Any) -> int:
    """Return the address in an opaque handle. It identifies the GPU, and is equal in all handles of the GPU."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
