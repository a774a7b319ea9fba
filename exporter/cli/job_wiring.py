"""Wiring: the collectors that need each other, put together.

Used in the sidecar by `serve`. The ledger knows which processes record; the collector of processes finds the rest
of each run and what it uses; the collectors of devices measure energy; the energy ledger divides it. Each is
handed the others' latest values as callables, so that none waits for another, and one that is switched off is a
source that knows nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from exporter.cli.configuration import Configuration
from exporter.cli.energy_settings import Energy
from exporter.cli.goodput_settings import Goodput
from exporter.cli.gpu_settings import GpuSection
from exporter.cli.gpu_wiring import KeptGpus
from exporter.collectors.catalogue import CollectorEntry
from exporter.collectors.energy.rapl import RaplCollector
from exporter.collectors.gpu.collector import GpuCollector, visible_devices
from exporter.collectors.host.checkpoint_dirs import CheckpointDirsCollector
from exporter.collectors.host.memory import oom_kills
from exporter.collectors.job import EnergyReading, GpuProcessUse, MachineUse
from exporter.collectors.processes.collector import ProcessCollector
from exporter.collectors.processes.memory import ProcessMemoryCollector
from exporter.collectors.processes.tree import Member
from exporter.families import AnyCollector
from exporter.feed import runs
from exporter.ledger.collector import JobCollector
from exporter.ledger.energy.collector import EnergyCollector, Sources
from exporter.ledger.energy.node_lock import NodeLock
from exporter.ledger.families.run_info import Gpus
from exporter.ledger.goodput.ends import Witnesses
from exporter.ledger.pages import Pages
from exporter.ledger.store import StateStore
from exporter.replay.machines import collector_arguments

ENERGY = "energy"
"""The collector that divides energy; not in the catalogue, as it is the ledger's."""

ENERGY_DEADLINE_SECONDS = 10.0

PROCESSES, PROCESS_MEMORY = ProcessCollector.name, ProcessMemoryCollector.name

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Wiring:
    """Makes collectors, and knows the latest of each kind that others ask.

    Args:
        configuration: To begin with.
        jobs: The ledger's collector of the feed.
        state: Where totals are kept.
        feed_directory: Where runs tell how their jobs ended.

    Attributes:
        energy: Divides energy among the runs.
        gpu: Watches the GPUs; None where nobody does.
    """

    def __init__(
        self, configuration: Configuration, *, jobs: JobCollector, state: StateStore, feed_directory: Path
    ) -> None:
        self.gpu: KeptGpus | None = None
        self._jobs = jobs
        self._pages = Pages(state)
        self._linger_seconds = configuration.feed.linger
        self._processes: ProcessCollector | None = None
        self._had_members = False
        self._rapl: RaplCollector | None = None
        settings = configuration.energy
        self._cpu_idle_watts, self._cpu_tdp_watts = settings.cpu_idle_watts, settings.cpu_tdp_watts
        boot = _boot_id()
        jobs.gpus = Gpus(use=self._gpu_use, readings=self._gpu_readings)
        jobs.sessions.ends.witnesses = Witnesses(
            oom_kills=oom_kills,
            ends=lambda: runs.ends(feed_directory),
            machine=(socket.gethostname(), boot),
        )
        self.configure_goodput(configuration.goodput)
        self._lock = NodeLock(settings.lock_dir, boot)
        self.energy = EnergyCollector(
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

    def make(self, entry: CollectorEntry, options: dict[str, Any]) -> AnyCollector:
        """Make a collector of the catalogue."""
        if entry.name == PROCESSES:
            self._processes = ProcessCollector(
                job=lambda: self._jobs.processes,
                gpu_use=self._gpu_use,
                keeper=self._pages,
                linger_seconds=self._linger_seconds,
                **options,
            )
            return self._processes
        if entry.name == PROCESS_MEMORY:
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

    def make_gpus(self, settings: GpuSection, *, on_change: Callable[[], None]) -> KeptGpus:
        """Make a collector of the GPUs, which touches nothing before its first pass.

        Args:
            settings: Which, and how closely.
            on_change: Called when NVML, or a GPU, goes or returns.

        Raises:
            ConfigurationError: The machine to replay cannot be read any more.
        """
        replayed = {} if settings.replay is None else collector_arguments(settings.replay)
        visible = visible_devices()
        return KeptGpus(
            lambda: GpuCollector(settings, visible=visible, on_change=on_change, **replayed),
            self._pages,
            counts=self._lock.acquire,
            released=self.gpu is not None and self.gpu.released,
        )

    def replace_gpus(self, made: KeptGpus | None) -> None:
        """Ask other GPUs, or none, from now on; those of before are let go of."""
        before, self.gpu = self.gpu, made
        if before is not None:
            before.close()

    def forget(self, name: str) -> None:
        """Ask a collector nothing any more, since it was switched off or made anew."""
        if name == PROCESSES:
            self._processes = None
        elif name == RaplCollector.name:
            self._rapl = None

    def job_came(self) -> bool:
        """Whether there are processes of a job since the last question, and were none before."""
        had, self._had_members = self._had_members, bool(self._members())
        return self._had_members and not had

    def configure(self, settings: Energy) -> None:
        """Use other tariffs."""
        self.energy.configure(settings.tariffs(), whole_machine=settings.whole_machine)

    def configure_goodput(self, settings: Goodput) -> None:
        """Count by other rules."""
        self._jobs.sessions.options = settings.options()
        self._jobs.peaks = settings.peaks()

    def close(self) -> None:
        """Let go of the GPUs, and let another exporter of this machine count its energy."""
        self.replace_gpus(None)
        self._lock.release()

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


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
