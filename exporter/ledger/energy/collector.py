"""EnergyCollector: from the devices' joules to the energy, carbon, water and cost of every run.

Each pass saves first what was divided, then what the runs got: a sidecar killed between the two loses a few seconds of
energy, and counts none twice. Energy that no run can be shown to have used is in no `training_` family. What was used
while no sidecar ran goes to the runs that lived before and after.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from exporter.collectors.energy.counter import LONGEST_SECONDS
from exporter.collectors.job import EnergyReading, GpuProcessUse, Keeper, MachineUse, Page
from exporter.families import Collected
from exporter.feed.files import RecordLock
from exporter.ledger.energy import families
from exporter.ledger.energy.attribution import (
    PowerSource,
    PowerSplitter,
    Share,
    Split,
    WorkUse,
    shares_of,
)
from exporter.ledger.energy.devices import Device, Devices
from exporter.ledger.energy.runs import RunEnergy
from exporter.ledger.energy.tariffs import CARBON_FILE, SECONDS_PER_HOUR, CarbonFile, EnergyOptions

MODE = 0o666
"""Whoever may run an exporter must be able to take the lock after another user."""
SAME_PASS_SECONDS = 60.0
"""A run that lived so shortly before the last pass of a sidecar lived until its end."""


class NodeLock:
    """Of all exporters on one machine, one counts its energy; may be asked from any thread.

    The lock is on a file in shared memory, named by the machine's boot: the kernel drops it when its holder dies. The file
    is never removed: whoever removed it could take it from under another's lock.
    """

    def __init__(self, directory: Path, machine: str) -> None:
        self.path = directory / f"training-exporter-energy-{machine or 'machine'}.lock"
        self.impossible = False  # no lock can be had here at all, as the last question showed
        self._lock: RecordLock | None = None
        self._guard = threading.Lock()

    def acquire(self) -> bool:
        """Become, or stay, the one that counts; cheap to call again.

        Where no lock can be had it counts too, since it would be wrong not to on a machine with one exporter.
        """
        with self._guard:
            if self._lock is None or not self._lock.keep():
                self._drop()
                try:
                    self._make_file()
                    self._lock, self.impossible = RecordLock.take(str(self.path), create_mode=None), False
                except OSError:
                    self.impossible = True
            return self._lock is not None or self.impossible

    def release(self) -> None:
        """Let another exporter count."""
        with self._guard:
            self._drop()

    def _drop(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _make_file(self) -> None:
        # Not O_CREAT alone on a file of another user: fs.protected_regular forbids that in shared directories.
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
            with contextlib.suppress(OSError):
                os.fchmod(descriptor, MODE)  # whatever the umask
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Sources:
    """What the energy ledger asks in every pass; each may be called from any thread, None is not known."""

    readings: Callable[[], Sequence[EnergyReading]]
    use: Callable[[], MachineUse | None]
    gpu_use: Callable[[], Sequence[GpuProcessUse]]
    alive: Callable[[], Collection[str] | None]  # the runs that live, as the feed says
    work: Callable[[], WorkUse] = WorkUse
    power: PowerSource = lambda _after: {}  # a default


@dataclass(slots=True, eq=False)
class _Run:
    """A run in memory."""

    page: Page
    counters: RunEnergy
    kept: bool = False  # what was saved before is part of the counters
    saved: bool = False  # they may be shown as they are
    survived: bool = False  # it lived when the last sidecar made its last pass


class EnergyCollector:
    """Counts the energy of the runs."""

    name = "energy"
    specs = families.SPECS
    reasons = ("state", CARBON_FILE)

    def __init__(
        self,
        sources: Sources,
        keeper: Keeper,
        lock: NodeLock,
        *,
        boot: str,
        options: EnergyOptions | None = None,
        linger_seconds: float = 900.0,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = sources
        self._keeper = keeper
        self._lock = lock
        self._boot = boot
        self._linger_seconds = linger_seconds
        self._clock = clock
        self._monotonic = monotonic
        self._page = keeper.page("energy")
        self._runs: dict[str, _Run] = {}
        self._begin()
        self.configure(options or EnergyOptions())

    def configure(self, options: EnergyOptions) -> None:
        """Use other tariffs from the next pass on; may be called from any thread."""
        path = options.carbon_intensity_file
        self._settings = options, None if path is None else CarbonFile(path, clock=self._clock)

    def collect(self) -> Collected:
        """Make one pass."""
        collected = Collected()
        counting = self._lock.acquire()
        collected.add(families.COUNTING, float(counting))
        if not counting:
            collected.unsupported.append("another exporter on this machine counts its energy: absent here")
            self._begin()
            return collected
        if self._lock.impossible:
            told = f"no lock at {self._lock.path}: a second exporter here would count energy again"
            collected.unsupported.append(told)
        self._tariffs, file = self._settings
        with collected.part():
            if file is not None:
                file.look()
        self._intensity = self._tariffs.intensity(file)
        if self._open_devices(collected):
            self._count(collected)
        self._publish(collected)
        return collected

    # In memory ------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Know nothing: what another exporter has counted meanwhile is not to be counted again."""
        self._page.close()
        for run in self._runs.values():
            run.page.close()
        self._runs = {}
        self._devices = Devices(self._boot)
        self._kept = False  # what was saved before is part of the devices
        self._last_pass: float | None = None  # of the sidecar before this one, in this boot
        self._divided: MachineUse | None = None
        self._divided_at: float | None = None
        self._began_at = 0.0  # the first pass of this sidecar
        self._shares: dict[tuple[str, ...], float] = {}
        self._splitter = PowerSplitter()

    def _open_devices(self, collected: Collected) -> bool:
        """Learn what was counted before; False where it is not known, or another sidecar keeps it."""
        with collected.part():
            rows = None if self._kept else self._page.load()
            if rows is not None:
                self._devices.resume(rows)
                self._last_pass, self._kept = self._devices.passed_at, True
            elif not self._kept:
                told = "another sidecar keeps this machine's energy totals: absent here"
                collected.unsupported.append(told)
        return self._kept

    def _open_run(self, name: str, collected: Collected) -> _Run:
        """Learn what was counted of a run before; raises a CollectError where it cannot be read now."""
        run = self._runs.get(name) or _Run(self._keeper.page("energy", name), RunEnergy(self._boot))
        rows = None if run.kept else run.page.load()
        if rows is not None:
            run.counters.resume(rows)
            alive_at, last_pass = run.counters.alive_at, self._last_pass
            if alive_at is not None and last_pass is not None:
                run.survived = 0 <= last_pass - alive_at <= SAME_PASS_SECONDS
            run.kept = True
        elif not run.kept:
            collected.unsupported.append(f"another sidecar counts the energy of run {name!r}: absent here")
        self._runs[name] = run
        return run

    # Counting -------------------------------------------------------------------------------------------

    def _count(self, collected: Collected) -> None:
        now, alive, gpu_use = self._monotonic(), self._sources.alive(), self._sources.gpu_use()
        held = {use.uuid for use in gpu_use}
        # That nobody works is certain only where processes are listed at all.
        idle = False if held or (alive is not None and not alive) else None
        self._splitter.take(self._sources.power, wall=self._clock(), now=now)
        readings = self._sources.readings()
        self._devices.update(readings, now, working=lambda device: True if device in held else idle)
        work, use, whole = self._sources.work(), self._sources.use(), None
        if self._tariffs.whole_machine and alive is not None and len(alive) == 1:
            (whole,) = alive
            use = use or MachineUse(now, (), None, 1, None)
        if self._divided_at is None:
            self._divided_at = self._began_at = now
        divided = False
        if use is not None and (self._divided is None or use.at > self._divided.at):
            with collected.part():
                self._divide(gpu_use, use, work, whole, collected, now=now)
                divided = True
        if now - self._divided_at > LONGEST_SECONDS:
            self._devices.settle()
            self._divided_at, self._shares = now, {}
        # What has become of their work the living are told when they have been given what it took.
        living = {each.run for each in work.processes}
        for name, run in self._runs.items():
            if divided or name not in living:
                run.counters.settle(work.flow(name, run.counters.session))
        self._save(collected)
        for name, run in list(self._runs.items()):
            if now - (run.counters.alive_at or 0.0) > self._linger_seconds:
                run.page.close()
                del self._runs[name]

    def _divide(
        self,
        gpu_use: Sequence[GpuProcessUse],
        use: MachineUse,
        work: WorkUse,
        whole: str | None,
        collected: Collected,
        *,
        now: float,
    ) -> None:
        """Give every run its part of what was used since the last time; it waits where a run's page cannot be read."""
        names = {run.run for run in use.runs} if whole is None else {whole}
        runs = {name: self._open_run(name, collected) for name in sorted(names)}
        tariffs, intensity = self._tariffs, self._intensity
        before, self._divided, self._divided_at, self._shares = self._divided, use, now, {}
        # The first time it is what was used since the sidecar's first reading.
        seconds = now - self._began_at if before is None else use.at - before.at
        for name, run in runs.items():
            run.counters.alive_at = now
            run.counters.begin([each for each in work.processes if each.run == name])
            run.counters.hold(None, 1 / len(runs), seconds, tariffs)
        for device in self._devices:
            shares = shares_of(device.reading, before or use, use, gpu_use, whole)
            split = self._measured(device, shares, work, now)
            keeps = 0.0
            if split is not None:
                keeps = min(device.pending, split.waiting) if split.joules else device.pending
            for share in shares:
                self._shares[share.run, device.reading.component, device.reading.device] = share.ratio
                run = runs[share.run]
                # What CPUs have done is known from the second time on; until then their energy waits.
                waits = before is None and share.method == "cpu_share"
                bridged = device.bridged if run.survived else 0.0
                used = 0.0 if waits else share.ratio * (device.pending - keeps + bridged)
                run.counters.use(device.reading, share.method, used, seconds, tariffs, intensity, split)
                run.counters.hold(device.reading, share.ratio, seconds, tariffs)
            if before is not None or whole is not None or device.reading.component in {"gpu", "dram"}:
                device.settle(keeps)

    def _measured(self, device: Device, shares: Sequence[Share], work: WorkUse, now: float) -> Split | None:
        """Split what a GPU drew by phase, where it served one run alone and that is known of all the time."""
        uuid, ranks = device.reading.device, []
        if len(shares) == 1 and shares[0].method in {"exclusive", "whole"} and not device.bridged:
            ours = [each for each in work.processes if each.run == shares[0].run]
            ranks = [each.stays for each in ours if each.device == uuid or len(ours) == 1]
        return self._splitter.split(uuid, ranks, now)

    def _save(self, collected: Collected) -> None:
        saved = False
        with collected.part():
            self._page.save(self._devices.rows())
            saved = True
        for run in self._runs.values():
            run.saved = run.saved and saved and not run.counters.changed
            if run.kept and saved and not run.saved:
                with collected.part():
                    run.page.save(run.counters.rows())
                    run.saved, run.counters.changed = True, False

    # What goes out --------------------------------------------------------------------------------------

    def _publish(self, collected: Collected) -> None:
        self._tell_devices(collected)
        self._tell_tariffs(collected)
        for name, run in self._runs.items():
            for spec, labels, value in run.counters.samples() if run.saved else ():
                collected.add(spec, value, name, *labels)
        for labels, ratio in self._shares.items():
            collected.add(families.SHARE, min(1.0, ratio), *labels)

    def _tell_devices(self, collected: Collected) -> None:
        corrected: Counter[tuple[str, str]] = Counter()
        for device in self._devices:
            reading = device.reading
            measured = "true" if reading.measured else "false"
            what = (reading.component, reading.device, reading.source, measured, reading.name, reading.index)
            collected.add(families.SOURCE_INFO, 1.0, *what)
            for method, watts in device.idle.by_method().items() if reading.component == "gpu" else ():
                collected.add(families.GPU_IDLE, watts, reading.index, reading.device, method)
            collected.add(families.CROSSCHECK, device.crosscheck(), reading.device)
            for reason, seconds in reading.gap_seconds.items():
                collected.add(families.GAP, seconds, reading.component, reading.device, reason)
            for resets in (reading.resets, device.counter.resets):
                corrected.update({(reading.device, reason): int(count) for reason, count in resets.items()})
        for labels, count in (+corrected).items():
            collected.add(families.RESETS, count, *labels)

    def _tell_tariffs(self, collected: Collected) -> None:
        tariffs, intensity = self._tariffs, self._intensity
        collected.add(families.PUE, tariffs.pue, "config")
        if intensity is not None:
            zone, source = tariffs.carbon_zone, intensity.source
            labels = (zone, source, tariffs.carbon_factor or "", tariffs.carbon_kind or "")
            collected.add(families.INTENSITY, intensity.grams_per_joule, *labels)
            collected.add(families.INTENSITY_TIME, intensity.since, zone, source)
        currency = tariffs.currency or ""
        collected.add(families.PRICE, tariffs.price_per_joule, currency, "config")
        prices = {each.device: each.per_hour for each in reversed(tariffs.device_prices)}
        for device, price in prices.items():  # of two for one device the first counts
            collected.add(families.DEVICE_PRICE, price / SECONDS_PER_HOUR, currency, device)
