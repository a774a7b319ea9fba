"""Tensor values, recorded without making the training loop wait for a device.

Runs on the caller's threads: no thread of the exporter calls CUDA. This module does not import torch.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from exporter.recording.conversion import is_asynchronous, to_number
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.recording.value_class import Value, value_class

MAX_COPIES = 16
"""Maximum number of copies in flight per Stat and thread. Further values are refused, because a wait would block the job."""


@value_class
class _PinnedCopy(Value):
    """Copy of a CUDA tensor to pinned host memory. The copy is complete once the CUDA event is."""

    slot: Any
    event: Any

    def is_ready(self) -> bool:
        return bool(self.event.query())

    def read(self) -> float:
        return float(self.slot[0])


@value_class
class _PendingArray(Value):
    """JAX array whose value may not have been computed yet."""

    array: Any

    def is_ready(self) -> bool:
        return bool(self.array.is_ready())

    def read(self) -> float | None:
        return to_number(self.array)


class _ThreadCopies:
    """Copies in flight of a thread, and the pinned memory that the thread reuses."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.pending: deque[_PinnedCopy | _PendingArray] = deque()  # oldest first
        self.free: list[_PinnedCopy] = []  # unused pinned memory and events
        self.is_allocated = False


class TensorReader:
    """Reader of the tensors of a Stat. *add* receives the values, and *refuse* the reasons for refused tensors."""

    def __init__(self, add: Callable[[float], object], refuse: Callable[[str], object]) -> None:
        self._add = add
        self._refuse = refuse
        self._local = threading.local()
        self._threads: list[_ThreadCopies] = []
        # Of ended threads. A thread of the job reuses the memory, because freeing pinned memory and events calls CUDA.
        self._retired_copies: deque[_ThreadCopies] = deque()
        self._copies_of_parent: list[
            _ThreadCopies
        ] = []  # kept until the end of a forked child, which must not call CUDA

    def add(self, tensor: object) -> None:
        """Record the value of a torch tensor or JAX array of one element. Never raises and never waits for a device."""
        try:
            reason = self._record(tensor)
        except Exception as error:  # an exception of torch must not reach the training loop
            if is_from_signal_handler(error):
                raise
            reason = "error"
        if reason is not None:
            self._refuse(reason)

    def collect(self) -> None:
        """Record the values of the calling thread that have arrived. Never raises."""
        copies: _ThreadCopies | None = getattr(self._local, "copies", None)
        if copies is None:
            return
        pending = copies.pending
        try:
            while pending and pending[0].is_ready():
                first = pending[0]
                value = first.read()
                pending.popleft()
                if isinstance(first, _PinnedCopy):
                    copies.free.append(first)
                if value is None:
                    self._refuse("not_a_number")
                else:
                    self._add(value)
        except Exception as error:  # after an error of CUDA, further calls of CUDA raise too
            if is_from_signal_handler(error):
                raise
            for _ in range(len(pending)):
                pending.popleft()
                self._refuse("error")

    def refuse_unread(self, *, is_process_ending: bool = False) -> None:
        """Refuse the values in flight of ended threads, or of all threads at the end of the process. Does not call CUDA."""
        for copies in list(self._threads):
            if is_process_ending or not copies.thread.is_alive():
                self._threads.remove(copies)
                self._retired_copies.append(copies)
                for _ in range(len(copies.pending)):
                    self._refuse("thread_ended")

    def after_fork(self) -> None:
        """Drop the parent's values in flight, which the parent counts. Called in a forked child."""
        self._copies_of_parent += [*self._threads, *self._retired_copies]
        self._threads, self._retired_copies = [], deque()
        self._local = threading.local()

    def _record(self, tensor: Any) -> str | None:
        """Record a tensor or array now or start its copy, and return None. If it is refused, return the reason."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(tensor, torch.Tensor):
            return self._record_tensor(torch, tensor)
        if callable(getattr(tensor, "is_ready", None)):
            return self._record_array(tensor)
        if not is_asynchronous(tensor):
            return "not_a_number"
        return "device"

    def _record_array(self, array: Any) -> str | None:
        """Record a JAX array: now if it is computed and no earlier value is pending, and otherwise later. Returns like `_record`."""
        if getattr(array, "size", 1) != 1:
            return "shape"
        copies = self._copies()
        self.collect()
        if not copies.pending and array.is_ready():
            value = to_number(array)
            if value is None:
                return "not_a_number"
            self._add(value)
            return None
        if not copies.pending:
            self._drop_arrays_of_ended_threads()
        if len(copies.pending) >= MAX_COPIES:
            return "backlog"
        if callable(start := getattr(array, "copy_to_host_async", None)):
            start()
        copies.pending.append(_PendingArray(array))
        return None

    def _record_tensor(self, torch: Any, tensor: Any) -> str | None:
        """Record a tensor of the CPU now, or copy a CUDA tensor to pinned memory on the current stream. Returns like `_record`."""
        placements = getattr(tensor, "placements", None)
        # The local part of a DTensor is its value if each rank holds the whole tensor.
        if placements is not None:
            if not all(placement.is_replicate() for placement in placements):
                return "placement"
            tensor = tensor.to_local()
        if tensor.numel() != 1:
            return "shape"
        device_type = tensor.device.type
        if device_type == "cpu":
            self._add(float(tensor.detach().item()))
            return None
        if device_type != "cuda":
            return "device"
        if torch.cuda.is_current_stream_capturing():
            return "capture"
        copies = self._copies()
        if not copies.is_allocated:
            slots = self._slots_of_ended_thread()
            if slots is None:
                buffer = torch.empty((MAX_COPIES, 1), dtype=torch.float64, pin_memory=True)
                slots = [buffer[index] for index in range(MAX_COPIES)]
            # New events, because an event belongs to the device on which it was recorded first.
            copies.free += [_PinnedCopy(slot, torch.cuda.Event()) for slot in slots]
            copies.is_allocated = True
        self.collect()
        if not copies.free:
            return "backlog"
        value = tensor.detach().reshape(1).to(torch.float64)  # may raise, before a slot is taken
        copy = copies.free.pop()
        copy.slot.copy_(value, non_blocking=True)
        copy.event.record(torch.cuda.current_stream(tensor.device))
        copies.pending.append(copy)
        return None

    def _slots_of_ended_thread(self) -> list[Any] | None:
        """Return the pinned memory of an ended thread whose copies are complete, or None. Other copies of ended threads are dropped."""
        retired_copies = self._retired_copies
        for _ in range(len(retired_copies)):
            try:
                copies = retired_copies.popleft()
            except IndexError:  # another thread has taken the last one
                return None
            if not copies.is_allocated:
                continue  # only JAX arrays
            pinned_copies = [copy for copy in copies.pending if isinstance(copy, _PinnedCopy)]
            if not all(copy.is_ready() for copy in pinned_copies):
                retired_copies.append(copies)
            else:
                return [copy.slot for copy in (*copies.free, *pinned_copies)]
        return None

    def _drop_arrays_of_ended_threads(self) -> None:
        """Drop the JAX arrays of ended threads. On a thread of the job, because the release of an array calls its device."""
        for copies in list(self._retired_copies):
            if not copies.is_allocated:
                copies.pending.clear()
                with suppress(ValueError):  # another thread has removed it
                    self._retired_copies.remove(copies)

    def _copies(self) -> _ThreadCopies:
        """Return the copies of the calling thread, created on first use."""
        copies: _ThreadCopies | None = getattr(self._local, "copies", None)
        if copies is None:
            copies = self._local.copies = _ThreadCopies()
            self._threads.append(copies)
        return copies
