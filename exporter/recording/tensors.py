"""Recording a tensor's value without making the training loop wait for the GPU.

On the caller's thread only: no thread of ours ever calls CUDA, and torch is never imported here.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

SLOTS = 16
"""Copies that may be under way per Stat and thread; with all of them busy a value is refused, not waited for."""


class _Copies:
    """The copies of one thread."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.pending: deque[tuple[Any, Any]] = deque()
        self.free: list[tuple[Any, Any]] = []


class TensorReader:
    """One Stat's copies under way, a set of its own for each thread; `refuse` takes reasons for which a value was kept out."""

    def __init__(self, add: Callable[[float], object], refuse: Callable[[str], object]) -> None:
        self._add = add
        self._refuse = refuse
        self._local = threading.local()
        self._threads: list[_Copies] = []
        self._left: list[_Copies] = []  # of ended threads: kept, since letting go of them would call CUDA

    def add(self, tensor: object) -> None:
        """Record the value of a tensor of one element; never raises, never waits for a device."""
        torch = sys.modules.get("torch")
        try:
            if torch is None or not isinstance(tensor, torch.Tensor):
                reason: str | None = "not_a_number"
            else:
                reason = self._take(torch, tensor)
        except Exception:  # noqa: BLE001  # foreign code: whatever torch raises must not reach the training loop
            reason = "error"
        if reason is not None:
            self._refuse(reason)

    def collect(self) -> None:
        """Take the values whose copies have arrived; called on the thread that added them. Never raises."""
        copies: _Copies | None = getattr(self._local, "copies", None)
        if copies is None:
            return
        pending = copies.pending
        try:
            while pending and pending[0][1].query():
                slot, event = pending[0]
                self._add(float(slot[0]))
                pending.popleft()
                copies.free.append((slot, event))
        except Exception:  # noqa: BLE001  # after an error of CUDA every call of it raises
            for _ in range(len(pending)):
                pending.popleft()
                self._refuse("error")

    def count_lost(self, *, everything: bool = False) -> None:
        """Refuse what threads that have ended did not collect, or all where the process ends; calls no CUDA."""
        for copies in list(self._threads):
            if everything or not copies.thread.is_alive():
                self._threads.remove(copies)
                self._left.append(copies)
                for _ in range(len(copies.pending)):
                    self._refuse("thread_ended")

    def _take(self, torch: Any, tensor: Any) -> str | None:
        placements = getattr(tensor, "placements", None)
        # A DTensor: its local part is the value only where every rank holds all of it.
        if placements is not None:
            if not all(placement.is_replicate() for placement in placements):
                return "placement"
            tensor = tensor.to_local()
        if tensor.numel() != 1:
            return "shape"
        kind = tensor.device.type
        if kind == "cpu":
            self._add(float(tensor.detach().item()))
            return None
        if kind != "cuda":
            return "device"
        if torch.cuda.is_current_stream_capturing():
            return "capture"
        copies = getattr(self._local, "copies", None)
        if copies is None:
            copies = self._local.copies = _Copies()
            pinned = torch.empty((SLOTS, 1), dtype=torch.float64, pin_memory=True)
            copies.free += [(pinned[index], torch.cuda.Event()) for index in range(SLOTS)]
            self._threads.append(copies)
        self.collect()
        if not copies.free:
            return "backlog"
        slot, event = copies.free.pop()
        slot.copy_(tensor.detach().reshape(1).to(torch.float64), non_blocking=True)
        event.record(torch.cuda.current_stream(tensor.device))
        copies.pending.append((slot, event))
        return None
