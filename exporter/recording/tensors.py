"""Recording a tensor's value without making the training loop wait for the GPU.

Used in the training process, on the caller's thread only: no thread of ours ever calls CUDA. torch is never
imported here; whoever hands over a tensor has imported it.

A CPU tensor is read at once. Of a CUDA tensor a non-blocking copy goes into a slot of pinned memory, with an
event behind it; a later call on the same thread finds the event done and takes the value. The last few values
of a thread are therefore recorded one call late, or by `flush()` from that thread.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SLOTS = 16
"""Copies that may be under way per Stat and thread; with all of them busy a value is refused, not waited for."""


class TensorReader(threading.local):
    """One Stat's copies under way, a set of its own for each thread.

    Args:
        add: Takes a value.
        refuse: Takes the reason for which a value was kept out: `not_a_number`, `shape`, `device`,
            `placement`, `capture`, `backlog`, `error`.
    """

    def __init__(self, add: Callable[[float], object], refuse: Callable[[str], object]) -> None:
        self._add = add
        self._refuse = refuse
        self._pending: deque[tuple[Any, Any]] = deque()
        self._free: list[tuple[Any, Any]] | None = None

    def add(self, tensor: object) -> None:
        """Record the value of a tensor of one element; never raises, never waits for a device."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(tensor, torch.Tensor):
            self._refuse("not_a_number")
            return
        try:
            reason = self._take(torch, tensor)
        except Exception:  # noqa: BLE001  # foreign code: whatever torch raises must not reach the training loop
            reason = "error"
        if reason is not None:
            self._refuse(reason)

    def collect(self) -> None:
        """Take the values whose copies have arrived; called on the thread that added them."""
        while self._pending and self._pending[0][1].query():
            slot, event = self._pending.popleft()
            self._add(float(slot[0]))
            if self._free is not None:
                self._free.append((slot, event))

    def _take(self, torch: Any, tensor: Any) -> str | None:
        placements = getattr(tensor, "placements", None)
        if (
            placements is not None
        ):  # a DTensor: its local part is the value only where every rank holds all of it
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
        self.collect()
        if self._free is None:
            pinned = torch.empty((SLOTS, 1), dtype=torch.float64, pin_memory=True)
            self._free = [(pinned[index], torch.cuda.Event()) for index in range(SLOTS)]
        if not self._free:
            return "backlog"
        slot, event = self._free.pop()
        slot.copy_(tensor.detach().reshape(1).to(torch.float64), non_blocking=True)
        event.record(torch.cuda.current_stream(tensor.device))
        self._pending.append((slot, event))
        return None
