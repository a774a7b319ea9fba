"""KeptGpus: the GPU collector, with counters that outlive the sidecar.

Used in the sidecar by `wiring`. Its counters are learnt from a page of the ledger's state before the first GPU is looked
at, and saved before they are published, so that none of them ever steps back. While they cannot be saved or learnt they
are withheld; gauges are not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from exporter.collectors.gpu.collector import GpuCollector
from exporter.collectors.gpu.publishing import ENERGY, STATUS_SPECS
from exporter.collectors.job import Keeper, Rows
from exporter.errors import CollectError
from exporter.families import Collected

FORGET_SECONDS = 30 * 86_400.0
"""A GPU that was not seen for so long does not come back."""

# Those about NVML and its process begin anew with the sidecar, as the sidecar's own do.
_KEPT = frozenset(
    spec.name.removesuffix("_total")
    for spec in GpuCollector.specs
    if spec.type == "counter" and spec not in STATUS_SPECS
)
_ENERGY = ENERGY.name.removesuffix("_total")


class KeptGpus:
    """Watches the GPUs, by a collector that is not started, and keeps what it counts; `registry` is what is known of them.

    `counts` says whether this exporter counts the energy of this machine's GPUs; it is not asked where nobody else sees
    them. `released`: NVML was let go of, on request.
    """

    name = GpuCollector.name
    specs = GpuCollector.specs

    def __init__(
        self, gpus: GpuCollector, keeper: Keeper, *, counts: Callable[[], bool], released: bool = False
    ) -> None:
        self._gpus, self.not_ready = gpus, gpus.not_ready
        self.registry = gpus.registry
        self._page = keeper.page(self.name)
        self._counts = counts
        self.released = released
        self._rows: Rows | None = None  # as last saved; None while it is not known what was kept
        self._begun = False
        self._rests = False  # while another exporter counts the energy
        self._closed = False
        self._passing = threading.Lock()  # held in a pass, so that none goes on after `close`

    def collect(self) -> Collected:
        """Make families of what is known, after its counters are saved; raises CollectError."""
        with self._passing:
            if self._closed:
                return Collected()
            told = Collected()
            self._rests = not (self._gpus.apart or self._counts())
            self.registry.rests = self._rests
            self._open(told)
            collected = self._gpus.collect()
            # Asked for after the families were made: what is saved is never less than what is shown.
            withheld = frozenset() if self._save(self.registry.rows(time.time()), told) else _KEPT
            if self._rests and any(family.name == _ENERGY for family in collected):
                withheld |= {_ENERGY}
                told.unsupported.append("another exporter on this machine counts its energy: absent here")
            told.extend(family for family in collected if family.name not in withheld)
            told.problems += collected.problems
            told.unsupported += collected.unsupported
            return told

    def close(self, timeout_seconds: float = 2.0) -> None:
        """End the NVML child, and let another sidecar keep the counters."""
        self._closed = True
        entered = self._passing.acquire(timeout=timeout_seconds)  # a pass may hang in a file system
        try:
            self._gpus.stop()
            self._page.close()
        finally:
            if entered:
                self._passing.release()

    def toggle(self) -> bool:
        """Let go of NVML, or take it again; tells whether it is let go of now."""
        self.released = not self.released
        self._gpus.release(released=self.released)
        return self.released

    def _open(self, told: Collected) -> None:
        """Learn what was kept, and begin; without that knowledge begin all the same, for the gauges' sake."""
        if self._rows is None:
            try:
                self._rows = self._page.load()
                if self._rows is None:
                    told.unsupported.append("another sidecar keeps the counters of these GPUs: absent here")
            except CollectError as error:
                told.fail(error)
            if self._rows is not None:
                self.registry.restore(self._rows, time.time())
        if not self._begun:
            self._begun = True
            if self.released:
                self._gpus.release()
            self._gpus.start()

    def _save(self, rows: Rows, told: Collected) -> bool:
        if self._rows is None:
            return False
        seen, now = {name[0] for name in rows}, time.time()
        for name, kept in self._rows.items():  # of GPUs that were not seen in this life
            if name[0] not in seen and now - (kept[2] or 0.0) < FORGET_SECONDS:
                rows[name] = kept
        try:
            if rows != self._rows:
                self._page.save(rows)
        except CollectError as error:
            told.fail(error)
            return False
        self._rows = rows
        return True
