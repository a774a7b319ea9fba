"""Division of the energy of all GPUs of the machine among the runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from exporter.collectors.job import GpuListing, JobProcess, MachineUse, ProcessLife
from exporter.ledger.energy.devices import DeviceEnergy
from exporter.ledger.energy.gpu_attribution import GpuAttribution, GpuSlice, joules_between
from exporter.ledger.energy.gpu_holders import GpuHolders
from exporter.ledger.energy.work import PhaseInterval, WorkUse


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """Processes of a pass that may use GPUs, from the driver, the feed and the process collector."""

    job: Sequence[JobProcess] = ()
    use: MachineUse | None = None
    work: WorkUse = field(default_factory=WorkUse)
    listings: Sequence[GpuListing] = ()  # of the last minute, oldest first
    lives: Mapping[int, ProcessLife] = field(default_factory=dict)
    uuids: Mapping[int, str] = field(default_factory=dict)  # by NVML index


@dataclass(frozen=True, slots=True)
class GpuPart:
    """Part of a GPU's energy that a run used, with the phases of the run's processes."""

    device: DeviceEnergy
    slice: GpuSlice
    intervals: Sequence[tuple[PhaseInterval, ...]]


class GpuDivision:
    """Division of the energy of the GPUs whose processes are known, from the driver's lists or from the feed."""

    def __init__(self) -> None:
        self._holders = GpuHolders()
        self._gpus: dict[str, GpuAttribution] = {}  # by UUID

    @property
    def uuids(self) -> Collection[str]:
        """UUIDs of the GPUs whose processes are known."""
        return self._gpus.keys()

    def is_held(self, uuid: str) -> bool:
        """Return True if a process is known to use the GPU."""
        gpu = self._gpus.get(uuid)
        return gpu is not None and bool(gpu.pids)

    def reports_training(self, run: str) -> bool:
        """Return True if a process of the run reports training."""
        return self._holders.reports_training(run)

    def divide(
        self, devices: Iterable[DeviceEnergy], snapshot: GpuSnapshot, *, wall: float, now: float
    ) -> Iterator[GpuPart]:
        """Yield the runs' parts of the energy since the last call, and add energy that no run can receive to the device's gaps."""
        holders = self._holders
        holders.update(snapshot.job, snapshot.use, snapshot.work, snapshot.lives, wall=wall, now=now)
        reported_by_uuid = holders.reported_processes(snapshot.job, snapshot.uuids, now=now)
        listings: dict[str, list[GpuListing]] = {}
        for listing in snapshot.listings:
            listings.setdefault(listing.uuid, []).append(listing)
        # For a process in the driver's list, the list is more reliable than the GPUs that the environment names.
        listed_pids = {use.pid for listing in snapshot.listings for use in listing.processes}
        for device in devices:
            uuid, history = device.reading.device, device.reading.history
            if device.reading.component != "gpu" or not history:
                continue
            gpu = self._gpus.get(uuid)
            if gpu is None:
                if uuid not in listings and uuid not in reported_by_uuid:
                    continue
                gpu = self._gpus[uuid] = GpuAttribution(history[0])
            division = gpu.divide(
                history,
                listings.get(uuid, ()),
                holders.lives,
                holders.find_run,
                reported_processes=[
                    process
                    for process in reported_by_uuid.get(uuid, ())
                    if process.has_used_cuda or process.life.pid not in listed_pids
                ],
                phases_until=holders.phases_until(gpu.pids, now=now),
            )
            for reason, joules in division.gaps.items():
                device.add_gap(reason, joules)
            # Saved with the device's record, so that the next sidecar divides this energy.
            device.pending_joules = (
                joules_between(history, gpu.divided_at, history[-1].time) if gpu.pids else 0.0
            )
            for part in division.slices:
                yield GpuPart(device, part, holders.intervals(part))
