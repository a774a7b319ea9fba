"""The collectors, put together and scheduled as the configuration says, also when another takes its place.

Used in the sidecar by `serve`; called on the main thread at the start, and on the thread of a reload, one at a time.
The ledger knows which processes record; the collector of processes finds the rest of each run and what it uses; the
collectors of devices measure energy; the energy ledger divides it. Each is handed the others' latest values as
callables, so that none waits for another, and one that is switched off is a source that knows nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from exporter.cli.configuration import CollectorSettings, Configuration
from exporter.cli.gpu_wiring import KeptGpus
from exporter.cli.sections import Goodput, GpuSection
from exporter.collectors.catalogue import CATALOGUE, EXTRA, CollectorEntry, extra_collectors
from exporter.collectors.energy.rapl import RaplCollector
from exporter.collectors.gpu.collector import GpuCollector, visible_devices
from exporter.collectors.host.filesystem import CheckpointDirsCollector
from exporter.collectors.host.memory import oom_kills
from exporter.collectors.job import EnergyReading, GpuProcessUse, MachineUse
from exporter.collectors.processes.collector import ProcessCollector
from exporter.collectors.processes.memory import ProcessMemoryCollector
from exporter.collectors.processes.tree import Member
from exporter.collectors.scheduler import Scheduler
from exporter.families import AnyCollector
from exporter.feed import runs
from exporter.ledger.collector import JobCollector
from exporter.ledger.energy.collector import EnergyCollector, Sources
from exporter.ledger.energy.node_lock import NodeLock
from exporter.ledger.families.run_info import Gpus
from exporter.ledger.goodput.ends import Witnesses
from exporter.ledger.store import StateStore
from exporter.replay.machines import collector_arguments

FEED, ENERGY = "feed", "energy"
"""The ledger's own collectors, which are not in the catalogue."""

LEDGER_DEADLINE_SECONDS = 10.0

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Wiring:
    """Makes collectors, schedules them, and knows the latest of each kind that others ask.

    What stays as it was in another configuration keeps its block, its verdict and a pass under way.

    Args:
        configuration: To begin with.
        scheduler: Calls the collectors.
        jobs: The ledger's collector of the feed.
        state: Where totals are kept.
        feed_directory: Where runs tell how their jobs ended.

    Attributes:
        gpu: Watches the GPUs; None where nobody does.
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
        self.gpu: KeptGpus | None = None
        self._scheduler = scheduler
        self._jobs = jobs
        self._pages = state
        self._linger_seconds = configuration.feed.linger
        self._processes: ProcessCollector | None = None
        self._had_members = False
        self._rapl: RaplCollector | None = None
        self._extra: list[str] = []
        settings = configuration.energy
        self._cpu_idle_watts, self._cpu_tdp_watts = settings.cpu_idle_watts, settings.cpu_tdp_watts
        boot = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else ""
        jobs.gpus = Gpus(use=self._gpu_use, readings=self._gpu_readings)
        jobs.sessions.ends.witnesses = Witnesses(
            oom_kills=oom_kills,
            ends=lambda: runs.ends(feed_directory),
            machine=(socket.gethostname(), boot),
        )
        self._lock = NodeLock(settings.lock_dir, boot)
        self._energy = EnergyCollector(
            Sources(
                readings=self._readings,
                use=self._machine_use,
                gpu_use=self._gpu_use,
                alive=self._alive,
                work=lambda: jobs.work,
            ),
            self._pages,
            self._lock,
            boot=boot,
            tariffs=settings.tariffs(),
            whole_machine=settings.whole_machine,
            linger_seconds=configuration.feed.linger,
        )
        self._configure_goodput(configuration.goodput)

    def begin(self, configuration: Configuration) -> None:
        """Schedule all that is enabled."""
        interval = configuration.feed.interval
        self._scheduler.add(
            self._jobs, interval_seconds=interval, deadline_seconds=LEDGER_DEADLINE_SECONDS, eases=True
        )
        for entry in CATALOGUE:
            if configuration.collectors[entry.name].enabled:
                self._add(entry, configuration.collectors[entry.name])
        self._add_extra(configuration.collectors[EXTRA.name])
        if configuration.gpu.enabled:
            self._add_gpus(configuration.gpu)
        if configuration.energy.enabled:
            self._add_energy(configuration)

    def change(self, old: Configuration, new: Configuration) -> None:
        """Follow from one configuration to the next."""
        if new.feed.interval != old.feed.interval:
            self._scheduler.reschedule(
                FEED, interval_seconds=new.feed.interval, deadline_seconds=LEDGER_DEADLINE_SECONDS
            )
        for entry in CATALOGUE:
            self._change(entry, old.collectors[entry.name], new.collectors[entry.name])
        if old.collectors[EXTRA.name] != new.collectors[EXTRA.name]:
            for name in self._extra:
                self._scheduler.remove(name)
            self._add_extra(new.collectors[EXTRA.name])
        if old.gpu != new.gpu:
            self._change_gpus(old.gpu, new.gpu)
        if new.energy != old.energy:
            self._energy.configure(new.energy.tariffs(), whole_machine=new.energy.whole_machine)
            self._scheduler.remove(ENERGY)
            if new.energy.enabled:
                self._add_energy(new)
        if new.goodput != old.goodput:
            self._configure_goodput(new.goodput)

    def job_came(self) -> bool:
        """Whether there are processes of a job since the last question, and were none before."""
        had, self._had_members = self._had_members, bool(self._members())
        return self._had_members and not had

    def close(self) -> None:
        """Let go of the GPUs, and let another exporter of this machine count its energy."""
        self._replace_gpus(None)
        self._lock.release()

    def _configure_goodput(self, settings: Goodput) -> None:
        self._jobs.sessions.options = settings.options()
        self._jobs.peaks = settings.peaks()

    # What is scheduled ----------------------------------------------------------------------------------

    def _change(self, entry: CollectorEntry, old: CollectorSettings, new: CollectorSettings) -> None:
        if old == new:
            return
        if old.enabled and new.enabled and old.own_options() == new.own_options():
            self._scheduler.reschedule(
                entry.name, interval_seconds=new.interval, deadline_seconds=new.deadline
            )
            return
        self._scheduler.remove(entry.name)
        if entry.name == ProcessCollector.name:
            self._processes = None
        elif entry.name == RaplCollector.name:
            self._rapl = None
        if new.enabled:
            self._add(entry, new)

    def _change_gpus(self, old: GpuSection, new: GpuSection) -> None:
        if old.enabled and new.enabled and replace(old, interval=new.interval, deadline=new.deadline) == new:
            self._scheduler.reschedule(
                KeptGpus.name, interval_seconds=new.interval, deadline_seconds=new.deadline
            )
            return
        self._scheduler.remove(KeptGpus.name)
        if new.enabled:
            self._add_gpus(new)
        else:
            self._replace_gpus(None)

    def _add(self, entry: CollectorEntry, settings: CollectorSettings) -> None:
        made = self._made(entry, settings.own_options())
        self._scheduler.add(made, interval_seconds=settings.interval, deadline_seconds=settings.deadline)

    def _made(self, entry: CollectorEntry, options: dict[str, Any]) -> AnyCollector:
        if entry.name == ProcessCollector.name:
            self._processes = ProcessCollector(
                job=lambda: self._jobs.processes,
                gpu_use=self._gpu_use,
                keeper=self._pages,
                linger_seconds=self._linger_seconds,
                **options,
            )
            return self._processes
        if entry.name == ProcessMemoryCollector.name:
            return ProcessMemoryCollector(members=self._members, **options)
        if entry.name == RaplCollector.name:
            self._rapl = RaplCollector(
                keeper=self._pages,
                counts=self._lock.acquire,
                working=self._is_working,
                idle_watts=self._cpu_idle_watts,
                tdp_watts=self._cpu_tdp_watts,
                **options,
            )
            return self._rapl
        if entry.name == CheckpointDirsCollector.name:
            options = {"runs": self._alive, **options}
        made: AnyCollector = entry.factory(**options)
        return made

    def _add_extra(self, settings: CollectorSettings) -> None:
        found = extra_collectors(**settings.own_options()) if settings.enabled else []
        self._extra = [each.name for each in found]
        for each in found:
            self._scheduler.add(each, interval_seconds=settings.interval, deadline_seconds=settings.deadline)

    def _add_gpus(self, settings: GpuSection) -> None:
        replayed = {} if settings.replay is None else collector_arguments(settings.replay)
        visible = visible_devices()
        # Its process and its counters go on by themselves; what befalls a GPU is published at once.
        on_change = lambda: self._scheduler.run_soon(KeptGpus.name)  # noqa: E731  (it is a value, not a definition)
        made = KeptGpus(
            lambda: GpuCollector(settings, visible=visible, on_change=on_change, **replayed),
            self._pages,
            counts=self._lock.acquire,
            released=self.gpu is not None and self.gpu.released,
        )
        self._replace_gpus(made)
        self._scheduler.add(
            made, interval_seconds=settings.interval, deadline_seconds=settings.deadline, eases=True
        )

    def _replace_gpus(self, made: KeptGpus | None) -> None:
        before, self.gpu = self.gpu, made
        if before is not None:
            before.close()

    def _add_energy(self, configuration: Configuration) -> None:
        interval = configuration.energy.interval
        self._scheduler.add(self._energy, interval_seconds=interval, deadline_seconds=LEDGER_DEADLINE_SECONDS)

    # What they ask each other ---------------------------------------------------------------------------

    def _members(self) -> Sequence[Member]:
        return () if self._processes is None else self._processes.members

    def _machine_use(self) -> MachineUse | None:
        return None if self._processes is None else self._processes.use

    def _gpu_use(self) -> Sequence[GpuProcessUse]:
        return () if self.gpu is None else self.gpu.processes()

    def _gpu_readings(self) -> Sequence[EnergyReading]:
        return () if self.gpu is None else self.gpu.energies()

    def _readings(self) -> Sequence[EnergyReading]:
        return (*(() if self._rapl is None else self._rapl.readings), *self._gpu_readings())

    def _alive(self) -> Collection[str] | None:
        processes = self._jobs.processes
        return None if processes is None else {each.process.run for each in processes if each.alive}

    def _is_working(self) -> bool | None:
        alive = self._alive()
        return None if alive is None else bool(alive)
