"""Schedule of the collectors, built from the configuration and rebuilt after a reload.

A collector reads the latest values of other collectors through callables, so that collectors do not wait for each other.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from exporter.cli.configuration import Configuration
from exporter.cli.sections import GpuSection
from exporter.collectors.catalogue import LOCAL_LANE, CollectorEntry, entries, extra_collectors
from exporter.collectors.energy.rapl import RaplCollector
from exporter.collectors.gpu.collector import GpuCollector, visible_devices
from exporter.collectors.host.checkpoint_dirs import CheckpointDirsCollector
from exporter.collectors.host.memory import read_oom_kills
from exporter.collectors.job import EnergyReading, GpuProcessUse, MachineUse
from exporter.collectors.options import ExtraOptions
from exporter.collectors.processes.collector import ProcessCollector
from exporter.collectors.processes.lives import ProcessLives
from exporter.collectors.processes.memory import ProcessMemoryCollector
from exporter.collectors.processes.tree import Member
from exporter.collectors.scheduler import Scheduler
from exporter.families import AnyCollector
from exporter.feed import runs
from exporter.hangs.collector import HangCollector, HangReport
from exporter.ledger.collector import JobCollector
from exporter.ledger.energy.collector import EnergyCollector
from exporter.ledger.energy.gpu_holders import running_pids
from exporter.ledger.energy.node_lock import NodeLock
from exporter.ledger.energy.sources import Sources
from exporter.ledger.families.run_info import Gpus
from exporter.ledger.goodput.attempt import MachineIdentity
from exporter.ledger.goodput.endings import ExitEvidence
from exporter.ledger.state.store import StateStore
from exporter.recording.stacks import StackDetail
from exporter.replay.machines import replay_arguments

# Names of the ledger's collectors, which are not in the catalogue.
FEED = "feed"
ENERGY = "energy"

LEDGER_DEADLINE_SECONDS = 10.0
"""Deadline of the collectors `FEED` and `ENERGY`."""
HANG_DEADLINE_SECONDS = 10.0
"""Deadline of the collector of hangs."""
LEDGER_LANE = "ledger"
"""Lane of the collectors `FEED` and `ENERGY`. Both write to the state directory, where a write may hang."""

_CollectorT = TypeVar("_CollectorT", HangCollector, ProcessCollector, RaplCollector)

_BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Interval and deadline of a collector, in seconds."""

    interval_seconds: float
    deadline_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleEntry:
    """Row of the schedule. After a reload, changed options recreate the collectors, and changed times reschedule them."""

    name: str
    create: Callable[[], Sequence[AnyCollector]]
    times: Times
    options: object = None
    lane: str | None = None  # thread that the collectors share with others; None for a thread of their own

    def is_unchanged(self, previous: ScheduleEntry) -> bool:
        """Return True if a reload has changed neither the options nor the times of the row."""
        return self.options == previous.options and self.times == previous.times


@dataclass(frozen=True, slots=True)
class RunningEntry:
    """Row of the schedule with its running collectors."""

    entry: ScheduleEntry
    collectors: Sequence[AnyCollector]


class Wiring:
    """Builder of the schedule, which also passes the values of collectors to other collectors.

    Attributes:
        gpu: The running GPU collector; None while GPU collection is disabled.
    """

    def __init__(
        self,
        configuration: Configuration,
        scheduler: Scheduler,
        *,
        jobs: JobCollector,
        state: StateStore,
        feed_directory: Path,
    ) -> None:
        self.gpu: GpuCollector | None = None
        self._scheduler = scheduler
        self._jobs = jobs
        self._state = state
        self._feed_directory = feed_directory
        self._linger_seconds = configuration.feed.linger
        self._had_members = False
        self._running: dict[str, RunningEntry] = {}
        # Options that need a restart: the first values also apply after a reload.
        self._initial_energy = configuration.energy
        boot_id = _BOOT_ID_PATH.read_text(encoding="ascii").strip() if _BOOT_ID_PATH.exists() else ""
        jobs.gpus = Gpus(use=self._gpu_use, readings=self._gpu_readings)
        jobs.endings.evidence = ExitEvidence(
            oom_kills=read_oom_kills,
            ends=lambda: runs.process_ends(feed_directory),
            launches=lambda: runs.launch_ids(feed_directory),
            machine=MachineIdentity(socket.gethostname(), boot_id),
        )
        self._lock = NodeLock(self._initial_energy.lock_dir, boot_id)
        self._lives = ProcessLives()
        self._energy = EnergyCollector(
            Sources(
                readings=self._energy_readings,
                machine_use=self._machine_use,
                gpu_use=self._gpu_use,
                alive_runs=self._active_runs,
                work=lambda: jobs.work,
                power_samples=lambda after: (
                    {} if self.gpu is None else self.gpu.registry.power_samples(after)
                ),
                gpu_listings=lambda: () if self.gpu is None else self.gpu.registry.listings(),
                gpu_uuids=lambda: {} if self.gpu is None else self.gpu.registry.uuids(),
                process_lives=self._lives.watch,
                job_processes=lambda: jobs.processes,
            ),
            self._state,
            self._lock,
            boot=boot_id,
            options=self._initial_energy,
            linger_seconds=configuration.feed.linger,
        )

    def apply(self, configuration: Configuration) -> None:
        """Schedule the enabled collectors. A collector with unchanged options and times continues to run.

        All steps that can fail precede the first change: after an exception, the previous configuration stays in force.

        Raises:
            OSError: The system refuses the descriptors of a collector.
            RuntimeError: The system refuses a thread.
        """
        new_entries = {entry.name: entry for entry in self._entries(configuration)}
        collectors_by_name: dict[str, Sequence[AnyCollector]] = {}
        for name, entry in new_entries.items():
            running = self._running.get(name)
            if running is None or entry.options != running.entry.options:
                collectors_by_name[name] = entry.create()
            elif not entry.is_unchanged(running.entry):
                collectors_by_name[name] = running.collectors
        gpu = self.gpu if GpuCollector.name in new_entries else None
        for collector in collectors_by_name.get(GpuCollector.name, ()):
            if isinstance(collector, GpuCollector):
                gpu = collector
                gpu.start()  # no effect on the running GPU collector
        self._energy.configure(configuration.energy)
        self._jobs.sessions.options = configuration.goodput
        for name in [name for name in self._running if name not in new_entries or name in collectors_by_name]:
            for collector in self._running.pop(name).collectors:
                self._scheduler.remove(collector.name)
        self._replace_gpu(gpu)
        for name, collectors in collectors_by_name.items():
            self._schedule(new_entries[name], collectors)

    def _schedule(self, entry: ScheduleEntry, collectors: Sequence[AnyCollector]) -> None:
        """Add the collectors of a row to the scheduler."""
        self._running[entry.name] = RunningEntry(entry, collectors)
        for collector in collectors:
            self._scheduler.add(
                collector,
                interval_seconds=entry.times.interval_seconds,
                deadline_seconds=entry.times.deadline_seconds,
                lane=entry.lane,
            )

    def _entries(self, configuration: Configuration) -> Iterator[ScheduleEntry]:
        """Yield the rows of the enabled collectors."""
        feed, gpu, energy = configuration.feed, configuration.gpu, configuration.energy
        yield ScheduleEntry(
            name=FEED,
            create=lambda: [self._jobs],
            times=Times(interval_seconds=feed.interval, deadline_seconds=LEDGER_DEADLINE_SECONDS),
            lane=LEDGER_LANE,
        )
        for entry in entries(configuration.collectors):
            options = entry.options
            if options.enabled:
                yield ScheduleEntry(
                    name=entry.name,
                    create=partial(self._create, entry),
                    times=Times(
                        interval_seconds=options.interval, deadline_seconds=options.effective_deadline
                    ),
                    options=options.own_options(),
                    lane=entry.lane,
                )
        if configuration.hang.stack_detail is not None:
            yield ScheduleEntry(
                name=HangCollector.name,
                create=partial(self._create_hangs, configuration.hang.stack_detail),
                times=Times(
                    interval_seconds=configuration.hang.interval, deadline_seconds=HANG_DEADLINE_SECONDS
                ),
                options=configuration.hang.stack_detail,
                lane=LOCAL_LANE,
            )
        if gpu.enabled:
            yield ScheduleEntry(
                name=GpuCollector.name,
                create=partial(self._create_gpus, gpu),
                times=Times(interval_seconds=gpu.interval, deadline_seconds=gpu.effective_deadline),
                # Constant times, because new times need no new NVML child.
                options=replace(gpu, interval=1.0, deadline=1.0),
            )
        if energy.enabled:
            yield ScheduleEntry(
                name=ENERGY,
                create=lambda: [self._energy],
                times=Times(interval_seconds=energy.interval, deadline_seconds=LEDGER_DEADLINE_SECONDS),
                options=energy,
                lane=LEDGER_LANE,
            )

    def has_new_job(self) -> bool:
        """Return True if there are processes of jobs now, and there were none at the previous call. Remembers the present state."""
        had_members, self._had_members = self._had_members, bool(self._members())
        return self._had_members and not had_members

    def close(self) -> None:
        """Stop the GPU collector, and release the lock on the node's energy counters."""
        self._replace_gpu(None)
        self._lives.stop()
        self._lock.release()

    def _create(self, entry: CollectorEntry) -> Sequence[AnyCollector]:
        """Create the collectors of a row of the catalogue, with the functions that return the values of other collectors."""
        if isinstance(entry.options, ExtraOptions):
            return extra_collectors(entry.options.classes)
        sources: dict[str, Any] = {}
        if entry.name == ProcessCollector.name:
            sources = {"job": lambda: self._jobs.processes, "gpu_use": self._gpu_use}
            sources["linger_seconds"] = self._linger_seconds
        elif entry.name == RaplCollector.name:
            sources = {"counts_energy": self._lock.acquire, "is_working": self._is_working}
            sources["idle_watts"] = self._initial_energy.cpu_idle_watts
            sources["tdp_watts"] = self._initial_energy.cpu_tdp_watts
        elif entry.name == ProcessMemoryCollector.name:
            sources = {"members": self._members}
        elif entry.name == CheckpointDirsCollector.name:
            sources = {"runs": self._active_runs}
        return [entry.factory(**sources, **entry.options.own_options())]

    def _create_hangs(self, detail: StackDetail) -> Sequence[AnyCollector]:
        return [HangCollector(self._feed_directory, lambda: self._jobs.overdue_runs, detail=detail)]

    def hangs(self) -> Sequence[HangReport]:
        """Return the explanations of the runs that hang now."""
        collector = self._find(HangCollector)
        return () if collector is None else collector.reports()

    def _create_gpus(self, settings: GpuSection) -> Sequence[AnyCollector]:
        """Create a GPU collector. While NVML is detached, the new collector is detached, too."""
        collector_arguments = {} if settings.replay is None else replay_arguments(settings.replay)
        visible = visible_devices()
        publish = partial(self._scheduler.run_soon, GpuCollector.name)

        def on_sample() -> None:
            # A publication after each pass over the GPUs keeps the rates of counters even.
            publish()
            # A run may be shorter than the interval of the energy collector. Therefore, starts and ends of processes are recorded here.
            self._lives.watch(
                {process.pid for process in self._gpu_use()} | running_pids(self._jobs.processes or ())
            )

        return [
            GpuCollector(
                settings,
                visible=visible,
                on_change=publish,
                on_sample=on_sample,
                counts_energy=self._lock.acquire,
                is_detached=self.gpu is not None and self.gpu.is_detached,
                **collector_arguments,
            )
        ]

    def _replace_gpu(self, collector: GpuCollector | None) -> None:
        """Use a started GPU collector, or none, from now on. Stop the previous GPU collector."""
        previous, self.gpu = self.gpu, collector
        if previous is not None and previous is not collector:
            previous.stop()

    def _find(self, collector_class: type[_CollectorT]) -> _CollectorT | None:
        """Return the scheduled collector of a class, or None."""
        running = self._running.get(collector_class.name)
        collectors = () if running is None else running.collectors
        return next((collector for collector in collectors if isinstance(collector, collector_class)), None)

    def _members(self) -> Sequence[Member]:
        """Return the processes of the jobs, or no processes if the process collector is disabled."""
        processes = self._find(ProcessCollector)
        return () if processes is None else processes.members

    def _machine_use(self) -> MachineUse | None:
        """Return the use of the machine by the jobs, or None if the process collector is disabled."""
        processes = self._find(ProcessCollector)
        return None if processes is None else processes.use

    def _gpu_use(self) -> Sequence[GpuProcessUse]:
        return () if self.gpu is None else self.gpu.registry.processes()

    def _gpu_readings(self) -> Sequence[EnergyReading]:
        return () if self.gpu is None else self.gpu.energies()

    def _energy_readings(self) -> Sequence[EnergyReading]:
        """Return the energy counters of the CPUs and of the GPUs."""
        rapl = self._find(RaplCollector)
        return (*(() if rapl is None else rapl.readings), *self._gpu_readings())

    def _active_runs(self) -> Collection[str] | None:
        """Return the runs with a living process, or None if the feed has not been read."""
        processes = self._jobs.processes
        return None if processes is None else {entry.identity.run for entry in processes if entry.is_alive}

    def _is_working(self) -> bool | None:
        """Return True if a run has a living process, or None if the feed has not been read."""
        active_runs = self._active_runs()
        return None if active_runs is None else bool(active_runs)
