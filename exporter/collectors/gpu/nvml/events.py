"""Events that the driver pushes: Xids.

Used in the NVML child. One thread waits for them, the only one besides the sampler's that calls NVML; it asks for
nothing else. On a virtual clock there is no thread: the sampler polls. A GPU that is lost makes every wait for the set
that it is in fail: so there is a new set whenever one goes or returns; the old one is not freed, since a thread may be
waiting for it. Events before the registration are lost; the sidecar reads the kernel's log beside this where it may.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from exporter.collectors.gpu.nvml.device import Device, DeviceDownError
from exporter.collectors.gpu.nvml.library import CallFailedError, Library

XID = 0x8
_WAIT_MILLISECONDS = 1000
_PAUSE_SECONDS = 1.0
_MOST_XIDS = 200
"""Different Xids of one GPU that are told apart; there are fewer than that. Garbage must not make labels."""


class Events:
    """Counts the Xids of all GPUs; `library` is for the waiting thread alone."""

    def __init__(self, library: Library, *, wall: Callable[[], float]) -> None:
        self.library = library
        self._wall = wall
        self._lock = threading.Lock()  # guards the next two
        self._xids: dict[int, dict[str, tuple[int, float]]] = {}
        self._indices: dict[int, int] = {}
        self._set: Any = None
        self._watched: set[int] = set()  # those that are in it

    def watch(self, library: Library, devices: Iterable[Device]) -> None:
        """Listen to these GPUs from now on; one that offers no events is a normal state."""
        present = {device.index: device for device in devices}
        if present.keys() == self._watched:
            return
        self._watched = set(present)
        try:
            made = library.call("nvmlEventSetCreate")
        except CallFailedError:  # there are no events on this machine
            return
        for device in present.values():
            with suppress(DeviceDownError):  # its own calls will tell
                self._register(device, made)
        self._set = made

    def start(self) -> None:
        """Begin to wait, if there is anything to wait for."""
        if self._set is not None:
            threading.Thread(target=self._run, name="nvml-events", daemon=True).start()

    def poll(self) -> None:
        """Take what is there, without waiting."""
        while self._set is not None and self._take(0) == "":
            pass

    def xids(self, index: int) -> dict[str, tuple[int, float]]:
        """By number, how often there was an Xid of a GPU since this process began to count, and when last."""
        with self._lock:
            return dict(self._xids.get(index, {}))

    def _register(self, device: Device, event_set: Any) -> None:
        supported = device.ask("events", "nvmlDeviceGetSupportedEventTypes")
        if not (supported or 0) & XID:  # an unsupported bit makes the whole registration fail
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
        """Wait for an event; gives the error, "" for none."""
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
                if xid in xids or len(xids) < _MOST_XIDS:
                    xids[xid] = (xids.get(xid, (0, 0.0))[0] + 1, self._wall())
        return ""


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
