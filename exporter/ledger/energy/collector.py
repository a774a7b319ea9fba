"""Collector of the energy, carbon and cost of the runs, from the energy of the devices.

Each pass divides the energy, and then saves the devices before the counters of the runs. If the sidecar is killed in between, the
energy of the pass is lost and does not count twice. Energy without a known run is not part of a `training_` family. Energy of
the time without a sidecar is attributed to the runs that were running before and after this time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from exporter.collectors.energy.counter import MAX_INTERVAL_SECONDS
from exporter.collectors.job import GpuProcessUse, MachineUse
from exporter.families import Collected
from exporter.ledger.energy import families
from exporter.ledger.energy.carbon_file import CARBON_FILE, CarbonFile
from exporter.ledger.energy.counted_runs import PASS_TOLERANCE_SECONDS, CountedRun, CountedRuns
from exporter.ledger.energy.device_time import LOST_SECONDS, GpuCharges, GpuTime
from exporter.ledger.energy.devices import DeviceEnergy, EnergyDevices
from exporter.ledger.energy.gpu_division import GpuDivision, GpuSliceWithPhases, GpuSnapshot
from exporter.ledger.energy.gpu_holders import running_pids
from exporter.ledger.energy.latest_shares import DeviceShare, LatestShares
from exporter.ledger.energy.node_lock import NodeLock
from exporter.ledger.energy.options import EnergyOptions, Intensity
from exporter.ledger.energy.power_split import PhaseSplit, PowerSplitter
from exporter.ledger.energy.records import DevicesRecord, decode_devices
from exporter.ledger.energy.shares import Share, compute_shares
from exporter.ledger.energy.sources import Sources
from exporter.ledger.energy.work import WorkSnapshot
from exporter.ledger.state.store import StateRecord, StateStore

STATE = "state"
"""Reason of a collector failure and of the resulting energy gap: the state of a run is unreadable."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """Options with the carbon file that they name."""

    options: EnergyOptions
    carbon_file: CarbonFile | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _DivisionInput:
    """Input of a division of the energy of all devices, except GPUs with known processes."""

    previous_machine_use: MachineUse | None  # at the previous division; None in the first division
    machine_use: MachineUse
    gpu_use: Sequence[GpuProcessUse]
    work: WorkSnapshot
    only_run: str | None  # run that receives all energy of the machine
    now: float  # monotonic time
    seconds: float  # since the previous division


class EnergyCollector:
    """Collector that divides the energy of the devices among the runs."""

    name = "energy"
    specs = families.SPECS
    reasons = (STATE, CARBON_FILE)

    def __init__(
        self,
        sources: Sources,
        store: StateStore,
        lock: NodeLock,
        *,
        boot: str,
        options: EnergyOptions | None = None,
        linger_seconds: float = 900.0,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = sources
        self._lock = lock
        self._boot = boot
        self._linger_seconds = linger_seconds
        self._clock = clock
        self._monotonic = monotonic
        self._state: StateRecord[DevicesRecord] = store.record("energy", decode_devices)
        self._runs = CountedRuns(store, boot)
        self._reset()
        self.configure(options or EnergyOptions())

    def configure(self, options: EnergyOptions) -> None:
        """Replace the options from the next pass on. May be called on any thread."""
        path = options.carbon_intensity_file
        self._settings = _Settings(options, None if path is None else CarbonFile(path))

    def collect(self) -> Collected:
        """Read, divide, save and publish the energy."""
        collected = Collected()
        is_counting = self._lock.acquire()
        collected.add(families.COUNTING, float(is_counting))
        if not is_counting:
            collected.unsupported.append(
                "another exporter on this machine counts the energy; the families of runs are absent here"
            )
            self._reset()
            return collected
        if self._lock.cannot_lock:
            collected.unsupported.append(
                f"cannot lock {self._lock.path}: a second exporter on this machine would count the same energy"
            )
        settings = self._settings
        self._options = settings.options
        self._intensity = self._read_intensity(settings, collected)
        if self._load_devices(collected):
            self._count(collected)
        self._publish(collected)
        return collected

    def _reset(self) -> None:
        """Release the state for other exporters, and discard all data in memory."""
        self._state.release()
        self._runs.release_all()
        self._devices = EnergyDevices(self._boot)
        self._is_loaded = False
        # Monotonic time of the last division; None before the first pass. Moved to the current time if no division is possible for
        # `MAX_INTERVAL_SECONDS`.
        self._divided_at: float | None = None
        self._started_at = 0.0  # monotonic time of the first pass of this sidecar
        self._last_machine_use: MachineUse | None = None
        self._shares = LatestShares()
        self._splitter = PowerSplitter()
        self._gpus = GpuDivision()
        self._gpu_charges = GpuCharges()

    def _read_intensity(self, settings: _Settings, collected: Collected) -> Intensity | None:
        """Return the intensity from the configuration or the file. A failed read of the file is part of *collected*."""
        file = settings.carbon_file
        if file is None:
            return settings.options.configured_intensity
        with collected.part():
            file.read()
        return file.intensity

    # Loading --------------------------------------------------------------------------------------------

    def _load_devices(self, collected: Collected) -> bool:
        """Load the devices if they are not loaded. Return False if their state is unreadable or locked by a different sidecar."""
        if not self._is_loaded:
            with collected.part():
                if self._state.claim():
                    record = self._state.load() or DevicesRecord()
                    self._devices.resume(record)
                    if record.boot == self._boot:
                        self._gpu_charges.resume(record.gpu_times)
                    self._runs.previous_sidecar_pass = self._devices.passed_at
                    self._is_loaded = True
                else:
                    collected.unsupported.append(
                        "a different sidecar holds the energy totals of this machine; energy is absent here"
                    )
        return self._is_loaded

    # Counting -------------------------------------------------------------------------------------------

    def _count(self, collected: Collected) -> None:
        """Read the sources, divide the energy since the last pass among the runs, and save the counters.

        Energy that cannot be divided within `MAX_INTERVAL_SECONDS` is attributed to no run.
        """
        now, alive_runs, gpu_use = self._monotonic(), self._sources.alive_runs(), self._sources.gpu_use()
        self._update_devices(gpu_use, alive_runs, now=now)
        work, machine_use = self._sources.work(), self._sources.machine_use()
        only_run: str | None = None
        if self._options.whole_machine and alive_runs is not None and len(alive_runs) == 1:
            (only_run,) = alive_runs
            machine_use = machine_use or MachineUse(
                time=now, runs=(), cpu_busy_seconds=None, cpus=1, memory_used_bytes=None
            )
        if self._divided_at is None:
            self._divided_at = self._started_at = now
        attributed_uuids: Collection[str] = ()
        if only_run is None:
            self._attribute_gpus(work, machine_use, collected, now=now)
            attributed_uuids = self._gpus.uuids
        is_divided = False
        if machine_use is not None and (
            self._last_machine_use is None or machine_use.time > self._last_machine_use.time
        ):
            with collected.part():
                self._divide(
                    gpu_use,
                    machine_use,
                    work,
                    only_run,
                    collected,
                    now=now,
                    attributed_uuids=attributed_uuids,
                )
                is_divided = True
        if now - self._divided_at > MAX_INTERVAL_SECONDS:
            self._devices.mark_divided()
            self._divided_at = now
            self._shares.keep_gpus(attributed_uuids)
        if alive_runs is not None:
            self._charge_lost_gpus(alive_runs, collected, now=now)
        self._apply_outcomes(work, is_divided=is_divided)
        self._save(collected)
        self._runs.release_ended(alive_runs, linger_seconds=self._linger_seconds, now=now)

    def _update_devices(
        self, gpu_use: Sequence[GpuProcessUse], alive_runs: Collection[str] | None, *, now: float
    ) -> None:
        """Read the power samples and the energy of the devices.

        A device without listed processes is known to be idle only in two cases: the driver lists processes of another device, or no run is
        running.
        """
        busy_uuids = {use.uuid for use in gpu_use}
        is_idle_known = bool(busy_uuids) or (alive_runs is not None and not alive_runs)
        is_working_without_processes = False if is_idle_known else None
        self._splitter.read(self._sources.power_samples, wall=self._clock(), now=now)
        self._devices.update(
            self._sources.readings(),
            now,
            is_working=lambda device: True if device in busy_uuids else is_working_without_processes,
        )

    def _apply_outcomes(self, work: WorkSnapshot, *, is_divided: bool) -> None:
        """Apply the outcomes of the work.

        In a pass without a division, the outcomes of running runs wait, because the energy of the work is not counted yet.
        """
        running_runs = {process.run for process in work.processes if process.is_alive}
        for name, run in self._runs:
            if is_divided or name not in running_runs:
                run.counters.apply_outcomes(work.account(name, run.counters.session))

    def _divide(
        self,
        gpu_use: Sequence[GpuProcessUse],
        machine_use: MachineUse,
        work: WorkSnapshot,
        only_run: str | None,
        collected: Collected,
        *,
        now: float,
        attributed_uuids: Collection[str],
    ) -> None:
        """Add each run's share of the energy since the last division, except for the GPUs in *attributed_uuids*.

        Raises CollectError before any change of the counters if the state of a run is unreadable.
        """
        names = {run.run for run in machine_use.runs} if only_run is None else {only_run}
        runs = {name: self._runs.load(name, collected) for name in sorted(names)}
        previous_machine_use, self._last_machine_use = self._last_machine_use, machine_use
        self._divided_at = now
        self._shares.keep_gpus(attributed_uuids)
        for name, run in runs.items():
            run.counters.mark_alive(now)
            run.counters.start_division(
                [process for process in work.processes if process.run == name and process.is_alive]
            )
        # The first division covers the time since the sidecar's first reading.
        seconds = now - self._started_at
        if previous_machine_use is not None:
            seconds = machine_use.time - previous_machine_use.time
        division = _DivisionInput(
            previous_machine_use=previous_machine_use,
            machine_use=machine_use,
            gpu_use=gpu_use,
            work=work,
            only_run=only_run,
            now=now,
            seconds=seconds,
        )
        for device in self._devices:
            if device.reading.device not in attributed_uuids:
                self._divide_device(device, runs, division)

    def _divide_device(
        self, device: DeviceEnergy, runs: Mapping[str, CountedRun], division: _DivisionInput
    ) -> None:
        """Add each run's share of the energy of a device."""
        reading, previous_machine_use = device.reading, division.previous_machine_use
        shares = compute_shares(
            reading,
            previous_machine_use or division.machine_use,
            division.machine_use,
            division.gpu_use,
            division.only_run,
        )
        split = self._measured_split(device, shares, division.work, division.now)
        waiting_joules = 0.0 if split is None else _waiting_joules(device, split)
        for share in shares:
            self._shares.add(
                DeviceShare(
                    run=share.run, component=reading.component, device=reading.device, ratio=share.ratio
                )
            )
            run = runs[share.run]
            # The CPU time of a run is a difference between two passes: CPU energy waits for the second pass.
            must_wait = previous_machine_use is None and share.method == "cpu_share"
            inherited_joules = device.inherited_joules if run.spans_restart else 0.0
            available_joules = device.pending_joules - waiting_joules + inherited_joules
            joules = 0.0 if must_wait else share.ratio * available_joules
            run.counters.add_energy(
                reading, share.method, joules, division.seconds, self._options, self._intensity, split
            )
            if reading.component == "gpu":
                start = division.now - division.seconds
                self._charge_gpu(
                    run,
                    GpuTime(
                        run=share.run, device=reading.device, ratio=share.ratio, start=start, end=division.now
                    ),
                )
        is_cpu_waiting = previous_machine_use is None and division.only_run is None
        if not is_cpu_waiting or reading.component in {"gpu", "dram"}:
            device.mark_divided(waiting_joules)

    def _attribute_gpus(
        self, work: WorkSnapshot, machine_use: MachineUse | None, collected: Collected, *, now: float
    ) -> None:
        """Add the energy of the GPUs with known processes to the runs of these processes."""
        job, listings = self._sources.job_processes() or (), self._sources.gpu_listings()
        pids = {process.pid for listing in listings for process in listing.processes}
        lives = self._sources.process_lives(pids | running_pids(job))
        snapshot = GpuSnapshot(job, machine_use, work, listings, lives, self._sources.gpu_uuids())
        for slice_with_phases in self._gpus.divide(self._devices, snapshot, wall=self._clock(), now=now):
            is_added = False
            with collected.part():
                self._add_slice(slice_with_phases, collected, now=now)
                is_added = True
            if not is_added:
                slice_with_phases.device.add_gap(STATE, slice_with_phases.gpu_slice.joules)
        for device in self._devices:
            reading = device.reading
            if reading.device in self._gpus.uuids:
                if now - self._started_at > PASS_TOLERANCE_SECONDS:
                    device.inherited_joules = 0.0
                is_lost = reading.joules is None or now - reading.time > LOST_SECONDS
                if is_lost or not self._gpus.has_undivided_energy(reading.device):
                    self._shares.discard_gpu(reading.device)

    def _add_slice(self, slice_with_phases: GpuSliceWithPhases, collected: Collected, *, now: float) -> None:
        """Add the energy and the GPU time of a slice to its run. Raises CollectError if the state of the run is unreadable."""
        device, gpu_slice = slice_with_phases.device, slice_with_phases.gpu_slice
        reading, run = device.reading, self._runs.load(gpu_slice.run, collected)
        run.counters.mark_alive(now)
        if self._gpus.reports_training(gpu_slice.run):
            run.counters.mark_reporting()
        split = None
        if gpu_slice.ratio == 1.0:
            split = self._splitter.split_interval(
                reading.device, slice_with_phases.intervals, gpu_slice.start, gpu_slice.end
            )
        joules, seconds = gpu_slice.joules, gpu_slice.end - gpu_slice.start
        if run.spans_restart:
            joules += device.take_inherited_joules(gpu_slice.ratio)
        run.counters.add_energy(
            reading, gpu_slice.method, joules, seconds, self._options, self._intensity, split
        )
        self._charge_gpu(
            run,
            GpuTime(
                run=gpu_slice.run,
                device=reading.device,
                ratio=gpu_slice.ratio,
                start=gpu_slice.start,
                end=gpu_slice.end,
            ),
        )
        self._shares.add_slice(reading.device, gpu_slice)

    def _charge_gpu(self, run: CountedRun, gpu_time: GpuTime) -> None:
        """Add the price of a time on a GPU to the cost of the run."""
        seconds = self._gpu_charges.charge(gpu_time, spans_restart=run.spans_restart)
        run.counters.add_gpu_cost(gpu_time.ratio * seconds, self._options)

    def _charge_lost_gpus(self, alive_runs: Collection[str], collected: Collected, *, now: float) -> None:
        """Add the price of lost GPUs to the runs that used the GPUs last and are still alive."""
        readings = [device.reading for device in self._devices]
        readable_uuids = {
            reading.device
            for reading in readings
            if reading.joules is not None and now - reading.time <= LOST_SECONDS
        }
        for gpu_time in self._gpu_charges.lost_gpu_times(now, readable_uuids, alive_runs):
            with collected.part():
                run = self._runs.load(gpu_time.run, collected)
                seconds = gpu_time.end - gpu_time.start
                run.counters.add_gpu_cost(gpu_time.ratio * seconds, self._options)

    def _measured_split(
        self, device: DeviceEnergy, shares: Sequence[Share], work: WorkSnapshot, now: float
    ) -> PhaseSplit | None:
        """Return the measured energy by phase of a GPU that a single run uses.

        Returns None for a device that several runs or no run use, for energy of the time without a sidecar, and for an incomplete
        measurement.
        """
        uuid, ranks = device.reading.device, []
        if len(shares) == 1 and shares[0].method in {"exclusive", "whole"} and not device.inherited_joules:
            processes = [
                process for process in work.processes if process.run == shares[0].run and process.is_alive
            ]
            ranks = [
                process.intervals for process in processes if process.device == uuid or len(processes) == 1
            ]
        return self._splitter.split_since_last_call(uuid, ranks, now)

    def _save(self, collected: Collected) -> None:
        """Save the devices, and then the counters of the runs, unless the devices could not be saved."""
        is_saved = False
        with collected.part():
            self._state.save(replace(self._devices.record(), gpu_times=self._gpu_charges.records()))
            is_saved = True
        self._runs.save(collected, are_devices_saved=is_saved)

    # Publishing -----------------------------------------------------------------------------------------

    def _publish(self, collected: Collected) -> None:
        """Add all families. The counters of a run are added only if they are saved."""
        families.add_devices(collected, self._devices)
        families.add_tariffs(collected, self._options, self._intensity)
        for name, run in self._runs:
            for sample in run.counters.samples() if run.is_saved else ():
                collected.add(sample.spec, sample.value, name, *sample.labels)
        for share in self._shares:
            collected.add(families.SHARE, min(1.0, share.ratio), share.run, share.component, share.device)


def _waiting_joules(device: DeviceEnergy, split: PhaseSplit) -> float:
    """Return the energy that waits for the phases of the same time: all energy if the split has no weights."""
    waiting_joules = split.waiting_joules if split.weight_by_phase else device.pending_joules
    return min(device.pending_joules, waiting_joules)
