"""Division of GPU energy among the runs.

Only the energy of GPUs with known processes is divided. The driver's process lists or the feed name the processes of a GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from exporter.collectors.job import GpuListing, JobProcess, MachineUse, ProcessLife
from exporter.ledger.energy.devices import DeviceEnergy
from exporter.ledger.energy.gpu_attribution import GpuAttribution, GpuSlice, joules_between
from exporter.ledger.energy.gpu_holders import GpuHolders
from exporter.ledger.energy.work import PhaseInterval, WorkSnapshot


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """Processes that may use GPUs. The driver, the feed and the process collector were read in the same collection."""

    job_processes: Sequence[JobProcess] = ()
    machine_use: MachineUse | None = None
    work: WorkSnapshot = field(default_factory=WorkSnapshot)
    listings: Sequence[GpuListing] = ()  # of the last minute, oldest first
    lives: Mapping[int, ProcessLife] = field(default_factory=dict)  # by pid
    uuids: Mapping[int, str] = field(default_factory=dict)  # by NVML index


@dataclass(frozen=True, slots=True)
class GpuSliceWithPhases:
    """Part of a GPU's energy that a run used, with the phases of the run's processes."""

    device: DeviceEnergy
    gpu_slice: GpuSlice
    intervals: Sequence[tuple[PhaseInterval, ...]]  # a tuple for each process of the slice


class GpuDivision:
    """Divider of the energy of GPUs with known processes, with the state between collections."""

    def __init__(self) -> None:
        self._holders = GpuHolders()
        self._attribution_by_uuid: dict[str, GpuAttribution] = {}

    @property
    def uuids(self) -> Collection[str]:
        """UUIDs of the GPUs whose processes were known in any call of `divide`."""
        return self._attribution_by_uuid.keys()

    def has_undivided_energy(self, uuid: str) -> bool:
        """Return True if a process used the GPU, and part of the GPU's energy is not divided yet."""
        attribution = self._attribution_by_uuid.get(uuid)
        return attribution is not None and bool(attribution.pids)

    def reports_training(self, run: str) -> bool:
        """Return True if a process of the run reports training."""
        return self._holders.reports_training(run)

    def divide(
        self, devices: Iterable[DeviceEnergy], snapshot: GpuSnapshot, *, wall: float, now: float
    ) -> Iterator[GpuSliceWithPhases]:
        """Yield the runs' slices of the energy since the last call.

        Energy that cannot be divided is added to the gaps of the device, by reason. Consuming the iterator updates the devices.

        Args:
            devices: Devices with the readings since the last call. Devices that are no GPUs are skipped.
            snapshot: Processes that may use the GPUs.
            wall: Unix time of the collection.
            now: Monotonic time of the collection.
        """
        holders = self._holders
        holders.update(
            snapshot.job_processes, snapshot.machine_use, snapshot.work, snapshot.lives, wall=wall, now=now
        )
        reported_by_uuid = holders.reported_processes(snapshot.job_processes, snapshot.uuids, now=now)
        listings: dict[str, list[GpuListing]] = {}
        for listing in snapshot.listings:
            listings.setdefault(listing.uuid, []).append(listing)
        # The driver's list is more reliable than the GPUs that the environment of a process names.
        listed_pids = {use.pid for listing in snapshot.listings for use in listing.processes}
        for device in devices:
            uuid, history = device.reading.device, device.reading.history
            if device.reading.component != "gpu" or not history:
                continue
            attribution = self._attribution_by_uuid.get(uuid)
            if attribution is None:
                if uuid not in listings and uuid not in reported_by_uuid:
                    continue
                attribution = self._attribution_by_uuid[uuid] = GpuAttribution(history[0])
            division = attribution.divide(
                history,
                listings.get(uuid, ()),
                holders.lives,
                holders.find_run,
                reported_processes=[
                    process
                    for process in reported_by_uuid.get(uuid, ())
                    if process.has_used_cuda or process.life.pid not in listed_pids
                ],
                phases_until=holders.phases_until(attribution.pids, now=now),
            )
            for reason, joules in division.gap_joules.items():
                device.add_gap(reason, joules)
            # Saved with the device's record, so that the next sidecar divides this energy.
            device.pending_joules = (
                joules_between(history, attribution.divided_at, history[-1].time) if attribution.pids else 0.0
            )
            for gpu_slice in division.slices:
                yield GpuSliceWithPhases(device, gpu_slice, holders.intervals(gpu_slice))
