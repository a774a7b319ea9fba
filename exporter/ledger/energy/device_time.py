"""Time for which the runs pay for GPUs.

The runs also pay during outages of the sidecar of at most `MAX_INTERVAL_SECONDS`. A GPU without readings is lost, and its driver
lists no processes. The GPU is still rented: the last runs on the GPU pay until they end on this machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from exporter.collectors.energy.counter import MAX_INTERVAL_SECONDS
from exporter.ledger.energy.records import GpuTimeRecord

LOST_SECONDS = 30.0
"""Time without a reading after which a GPU is lost. This time is longer than `MAX_PHASE_WAIT_SECONDS`, because the energy of a GPU may
wait that long for the phases of the run."""


@dataclass(frozen=True, slots=True)
class GpuTime:
    """Time of a run on a GPU."""

    run: str
    device: str  # UUID
    ratio: float  # of the GPU
    start: float  # monotonic time
    end: float


@dataclass(slots=True)
class _Charge:
    """Last charged time of a run on a GPU."""

    ratio: float
    charged_until: float  # monotonic time
    is_resumed: bool = False  # charged by the previous sidecar
    is_lost: bool = False  # charged while the GPU was lost


@dataclass(frozen=True, slots=True)
class _ChargeKey:
    """Run and the GPU that it pays for."""

    run: str
    device: str  # UUID


class GpuCharges:
    """Charged time of all runs on the GPUs of the machine."""

    def __init__(self) -> None:
        self._charges: dict[_ChargeKey, _Charge] = {}

    def resume(self, records: Sequence[GpuTimeRecord]) -> None:
        """Continue from the records of the previous sidecar of the same boot."""
        for record in records:
            key = _ChargeKey(record.run, record.device)
            self._charges[key] = _Charge(record.ratio, record.charged_until, is_resumed=True)

    def records(self) -> tuple[GpuTimeRecord, ...]:
        """Return the state to be saved."""
        return tuple(
            GpuTimeRecord(key.run, key.device, charge.ratio, charge.charged_until)
            for key, charge in self._charges.items()
        )

    def charge(self, gpu_time: GpuTime, *, spans_restart: bool) -> float:
        """Record a time of a run on a GPU as charged, and return the seconds to charge.

        Time that the previous sidecar charged, or that was charged while the GPU was lost, is not charged again. After a restart of the
        sidecar, the first call also charges the outage, if *spans_restart* is True and the outage was at most `MAX_INTERVAL_SECONDS`
        long.

        Args:
            gpu_time: Time of the run on the GPU.
            spans_restart: Whether the run was alive before the restart of the sidecar.
        """
        key = _ChargeKey(gpu_time.run, gpu_time.device)
        charge = self._charges.setdefault(key, _Charge(gpu_time.ratio, gpu_time.start))
        start = gpu_time.start
        outage_seconds = gpu_time.start - charge.charged_until
        if charge.is_resumed and spans_restart and 0 < outage_seconds <= MAX_INTERVAL_SECONDS:
            start = charge.charged_until
        elif charge.is_resumed or charge.is_lost:  # a part of the time may be charged already
            start = max(start, min(charge.charged_until, gpu_time.end))
        if gpu_time.end >= charge.charged_until:
            self._charges[key] = _Charge(gpu_time.ratio, gpu_time.end)
        return gpu_time.end - start

    def lost_gpu_times(
        self, now: float, readable_uuids: Collection[str], alive_runs: Collection[str]
    ) -> Iterator[GpuTime]:
        """Yield the time to charge for lost GPUs since the last call. Remove the runs that have ended or left their GPU.

        Args:
            now: Monotonic time.
            readable_uuids: UUIDs of the GPUs with a reading in the last `LOST_SECONDS`.
            alive_runs: Runs with a running process on this machine.
        """
        for key, charge in list(self._charges.items()):
            seconds = now - charge.charged_until
            if key.run not in alive_runs or (key.device in readable_uuids and seconds > LOST_SECONDS):
                del self._charges[key]  # the run has ended, or has left the GPU
            elif key.device not in readable_uuids and (charge.is_lost or seconds > LOST_SECONDS):
                start = charge.charged_until
                self._charges[key] = _Charge(charge.ratio, now, is_lost=True)
                if seconds <= MAX_INTERVAL_SECONDS:
                    yield GpuTime(run=key.run, device=key.device, ratio=charge.ratio, start=start, end=now)
