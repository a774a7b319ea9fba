"""The collectors, put together and scheduled as the configuration says, also when another takes its place.

Each is handed the others' latest values as callables, so that none waits for another.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from exporter.cli.configuration import Configuration
from exporter.cli.sections import GpuSection
from exporter.collectors.catalogue import CATALOGUE, EXTRA, CollectorEntry, extra_collectors
from exporter.collectors.energy.rapl import RaplCollector
from exporter.collectors.gpu.collector import GpuCollector, visible_devices
from exporter.collectors.host.checkpoint_dirs import CheckpointDirsCollector
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
from exporter.ledger.goodput.attempt import MachineIdentity
from exporter.ledger.goodput.endings import ExitEvidence
from exporter.ledger.state.store import StateStore
from exporter.replay.machines import collector_arguments

FEED, ENERGY = "feed", "energy"
"""The ledger's own collectors, which are not in the catalogue."""

LEDGER_DEADLINE_SECONDS = 10.0
LEDGER_LANE = "ledger"
"""Both write to the state directory, where both can hang."""

_C = TypeVar("_C", ProcessCollector, RaplCollector)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Scheduled(NamedTuple):
    """What is to be scheduled: made anew when its options change, otherwise added again with other times."""

    name: str
    options: Any
    interval: float
    deadline: float
    make: Callable[[], Sequence[AnyCollector]]
    lane: str | None = None  # None for a thread of its own


class Wiring:
    """Makes collectors, schedules them, and knows the latest of each kind that others ask; `gpu` is None without GPUs."""

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
        self._pages = state
        self._linger_seconds = configuration.feed.linger
        self._had_members = False
        self._running: dict[str, tuple[Scheduled, Sequence[AnyCollector]]] = {}
        self._settings = settings = configuration.energy  # at the start
        boot = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else ""
        jobs.gpus = Gpus(use=self._gpu_use, readings=self._gpu_readings)
        jobs.endings.evidence = ExitEvidence(
            oom_kills=oom_kills,
            ends=lambda: runs.ends(feed_directory),
            launches=lambda: runs.launches(feed_directory),
            machine=MachineIdentity(socket.gethostname(), boot),
        )
        self._lock = NodeLock(settings.lock_dir, boot)
        self._energy = EnergyCollector(
            Sources(
                readings=self._readings,
                use=self._machine_use,
                gpu_use=self._gpu_use,
                alive=self._alive,
                work=lambda: jobs.work,
                power=lambda after: {} if self.gpu is None else self.gpu.registry.power_samples(after),
            ),
            self._pages,
            self._lock,
            boot=boot,
            options=settings,
            linger_seconds=configuration.feed.linger,
        )

    def follow(self, configuration: Configuration) -> None:
        """Schedule what is enabled; what stays as it was keeps its block, its verdict and a pass under way."""
        wanted = {each.name: each for each in self._wanted(configuration)}
        self._energy.configure(configuration.energy)
        self._jobs.sessions.options = configuration.goodput
        kept: dict[str, Sequence[AnyCollector]] = {}  # those that only get other times
        for name, (before, collectors) in list(self._running.items()):
            now = wanted.get(name)
            if now is None or now[:4] != before[:4]:
                del self._running[name]
                for collector in collectors:
                    self._scheduler.remove(collector.name)
                if now is not None and now.options == before.options:
                    kept[name] = collectors
        if GpuCollector.name not in wanted:
            self._replace_gpus(None)
        for name, each in wanted.items():
            if name not in self._running:
                made = kept.get(name) or each.make()
                self._running[name] = each, made
                for collector in made:
                    self._scheduler.add(
                        collector,
                        interval_seconds=each.interval,
                        deadline_seconds=each.deadline,
                        lane=each.lane,
                    )

    def _wanted(self, configuration: Configuration) -> Iterator[Scheduled]:
        feed, gpu, energy = configuration.feed, configuration.gpu, configuration.energy
        yield Scheduled(FEED, None, feed.interval, LEDGER_DEADLINE_SECONDS, lambda: [self._jobs], LEDGER_LANE)
        for entry in (*CATALOGUE, EXTRA):
            settings = configuration.collectors[entry.name]
            if settings.enabled:
                options = settings.own_options()
                make = partial(self._made, entry, options)
                yield Scheduled(entry.name, options, settings.interval, settings.deadline, make, entry.lane)
        if gpu.enabled:
            # Other times need no new child.
            same = replace(gpu, interval=1.0, deadline=1.0)
            make = partial(self._made_gpus, gpu)
            yield Scheduled(GpuCollector.name, same, gpu.interval, gpu.deadline, make)
        if energy.enabled:
            yield Scheduled(
                ENERGY, energy, energy.interval, LEDGER_DEADLINE_SECONDS, lambda: [self._energy], LEDGER_LANE
            )

    def job_came(self) -> bool:
        """Whether there are processes of a job since the last question, and were none before."""
        had, self._had_members = self._had_members, bool(self._members())
        return self._had_members and not had

    def close(self) -> None:
        """Let go of the GPUs, and let another exporter of this machine count its energy."""
        self._replace_gpus(None)
        self._lock.release()

    def _made(self, entry: CollectorEntry, options: dict[str, Any]) -> Sequence[AnyCollector]:
        if entry is EXTRA:
            return extra_collectors(**options)
        more: dict[str, Any] = {}
        if entry.name == ProcessCollector.name:
            more = {"job": lambda: self._jobs.processes, "gpu_use": self._gpu_use}
            more["linger_seconds"] = self._linger_seconds
        elif entry.name == RaplCollector.name:
            more = {"counts": self._lock.acquire, "working": self._is_working}
            watts = self._settings.cpu_idle_watts, self._settings.cpu_tdp_watts
            more["idle_watts"], more["tdp_watts"] = watts
        elif entry.name == ProcessMemoryCollector.name:
            more = {"members": self._members}
        elif entry.name == CheckpointDirsCollector.name:
            more = {"runs": self._alive}
        return [entry.factory(**more, **options)]

    def _made_gpus(self, settings: GpuSection) -> Sequence[AnyCollector]:
        replayed = {} if settings.replay is None else collector_arguments(settings.replay)
        visible = visible_devices()
        publish = partial(self._scheduler.run_soon, GpuCollector.name)
        made = GpuCollector(
            settings,
            visible=visible,
            on_change=publish,
            on_sample=publish,  # at the pace of the readings, so that rates of counters are even
            counts_energy=self._lock.acquire,
            detached=self.gpu is not None and self.gpu.detached,
            **replayed,
        )
        self._replace_gpus(made)
        return [made]

    def _replace_gpus(self, made: GpuCollector | None) -> None:
        before, self.gpu = self.gpu, made
        if before is not None:
            before.stop()
        if made is not None:
            made.start()

    # What they ask each other ---------------------------------------------------------------------------

    def _of(self, kind: type[_C]) -> _C | None:
        """The collector of a kind, while it runs."""
        _, collectors = self._running.get(kind.name, (None, ()))
        return next((each for each in collectors if isinstance(each, kind)), None)

    def _members(self) -> Sequence[Member]:
        processes = self._of(ProcessCollector)
        return () if processes is None else processes.members

    def _machine_use(self) -> MachineUse | None:
        processes = self._of(ProcessCollector)
        return None if processes is None else processes.use

    def _gpu_use(self) -> Sequence[GpuProcessUse]:
        return () if self.gpu is None else self.gpu.registry.processes()

    def _gpu_readings(self) -> Sequence[EnergyReading]:
        return () if self.gpu is None else self.gpu.registry.energies()

    def _readings(self) -> Sequence[EnergyReading]:
        rapl = self._of(RaplCollector)
        return (*(() if rapl is None else rapl.readings), *self._gpu_readings())

    def _alive(self) -> Collection[str] | None:
        processes = self._jobs.processes
        return None if processes is None else {each.process.run for each in processes if each.alive}

    def _is_working(self) -> bool | None:
        alive = self._alive()
        return None if alive is None else bool(alive)
