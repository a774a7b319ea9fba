"""Simulated /proc, for states of processes that a test cannot create for real."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from ledger_support import START, make_process

from exporter.collectors.job import GpuProcessUse, JobProcess
from exporter.collectors.processes.collector import ProcessCollector
from exporter.families import Collected

BOOT_TIME = START - 100_000.0
MONOTONIC_START_SECONDS = 1000.0
"""Time of the simulated monotonic clock at START."""
CLOCK_TICKS_PER_SECOND = 100
IO_TEMPLATE = "rchar: 1\nwchar: 2\nsyscr: 3\nsyscw: 4\nread_bytes: {read_bytes}\nwrite_bytes: 8192\n"
"""Content of /proc/<pid>/io, with the number of read bytes as a placeholder."""


@dataclass
class FakeProcess:
    """Simulated process. Changes are visible after the next `Proc.write`."""

    pid: int
    parent: int = 1
    comm: str = "python"
    command: str = "python\0train.py\0"
    state: str = "S"
    started_at: float = START - 50.0
    user_seconds: float = 1.0
    threads: int = 4
    namespace_pid: int | None = None
    cpus: str | None = "0-3"
    read_bytes: int = 4096
    io: str | None = IO_TEMPLATE  # None for a kernel without /proc/<pid>/io


@dataclass
class Proc:
    """Simulated /proc tree and clocks."""

    root: Path
    processes: dict[int, FakeProcess] = field(default_factory=dict)
    monotonic_seconds: float = MONOTONIC_START_SECONDS
    wall: float = START

    def add(self, process: FakeProcess) -> FakeProcess:
        self.processes[process.pid] = process
        return process

    def end(self, pid: int) -> None:
        """Remove a process for which its parent has waited. As in Linux, the I/O of the parent then includes that of the child."""
        ended_process = self.processes.pop(pid)
        if ended_process.parent in self.processes:
            self.processes[ended_process.parent].read_bytes += ended_process.read_bytes
        for process in self.processes.values():
            if process.parent == pid:
                process.parent = 1

    def advance(self, seconds: float) -> None:
        self.monotonic_seconds += seconds
        self.wall += seconds

    @property
    def uptime_seconds(self) -> float:
        return self.monotonic_seconds - MONOTONIC_START_SECONDS + START - BOOT_TIME

    def write(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        boot_time = round(self.wall - self.uptime_seconds)
        (self.root / "stat").write_text(
            f"cpu  10000 0 0 9000 900 0 0 0 0 0\nintr 1\nbtime {boot_time}\nprocesses 9\n"
        )
        (self.root / "uptime").write_text(f"{self.uptime_seconds:.2f} 1.00\n")
        kibibytes_by_name = {"MemTotal": 1000000, "MemAvailable": 600000}
        names = (*kibibytes_by_name, "MemFree", "Buffers", "Cached", "Shmem", "Slab", "Active", "Inactive")
        (self.root / "meminfo").write_text(
            "".join(f"{name}: {kibibytes_by_name.get(name, 1)} kB\n" for name in names)
        )
        boot = self.root / "sys/kernel/random"
        boot.mkdir(parents=True)
        (boot / "boot_id").write_text("11111111-2222-3333-4444-555555555555\n")
        for process in self.processes.values():
            self._write(process)

    def _write(self, process: FakeProcess) -> None:
        directory = self.root / str(process.pid)
        start_ticks = round((process.started_at - BOOT_TIME) * CLOCK_TICKS_PER_SECOND)
        user_ticks = round(process.user_seconds * CLOCK_TICKS_PER_SECOND)
        # Of proc_pid_stat(5): pid, comm, state, ppid … utime, stime … num_threads … starttime.
        fields = ["0"] * 52
        fields[:4] = [str(process.pid), f"({process.comm})", process.state, str(process.parent)]
        fields[13:15] = [str(user_ticks), str(CLOCK_TICKS_PER_SECOND // 2)]
        fields[19], fields[21] = str(process.threads), str(start_ticks)
        task = directory / "task" / str(process.pid)
        task.mkdir(parents=True)
        children = [f"{child.pid} " for child in self.processes.values() if child.parent == process.pid]
        (task / "children").write_text("".join(children))
        (directory / "stat").write_text(" ".join(fields) + "\n")
        (directory / "statm").write_text("5000 1000 100 1 0 900 0\n")
        (directory / "cmdline").write_text("" if process.state == "Z" else process.command)
        inner_pid = "" if process.namespace_pid is None else f"\t{process.namespace_pid}"
        cpus_line = "" if process.cpus is None else f"Cpus_allowed_list:\t{process.cpus}\n"
        (directory / "status").write_text(
            f"Name:\t{process.comm}\nThreads:\t{process.threads}\nNSpid:\t{process.pid}{inner_pid}\n{cpus_line}"
        )
        if process.io is not None:
            (directory / "io").write_text(process.io.format(read_bytes=process.read_bytes))
        (directory / "smaps_rollup").write_text(
            "00400000-7fff00000000 ---p 00000000 00:00 0  [rollup]\nRss: 9 kB\nPss: 300 kB\n"
            "Private_Clean: 20 kB\nPrivate_Dirty: 100 kB\n"
        )
        for descriptor in range(5):
            (directory / "fd" / str(descriptor)).mkdir(parents=True)


@dataclass
class JobOnProc:
    """Job on a simulated /proc, with its processes in the feed and on GPUs, and the collector."""

    proc: Proc
    processes: list[JobProcess] = field(default_factory=list)
    gpus: list[GpuProcessUse] = field(default_factory=list)

    def __post_init__(self) -> None:
        # The collector starts before the processes of the job.
        wall, self.proc.wall = self.proc.wall, START - 60.0
        psutil.PROCFS_PATH = str(self.proc.root)  # the fixture of the tests restores the path
        self.collector = ProcessCollector(
            job=lambda: self.processes,
            gpu_use=lambda: self.gpus,
            discover_seconds=0.0,
            clock=lambda: self.proc.wall,
            monotonic=lambda: self.proc.monotonic_seconds,
            own_pid=999_999,
        )
        self.proc.wall = wall

    def add_recording(self, process: FakeProcess, *, rank: int | None = 0) -> JobProcess:
        """Add a recording process. Its first Stat was created 10 s after its start."""
        role = "trainer" if rank is not None else "agent"
        identity = make_process(run="r", rank=rank, role=role, started=process.started_at + 10.0)
        namespace_pid = process.namespace_pid or process.pid
        job_process = JobProcess(identity.replace(pid=namespace_pid), is_alive=True, pid=process.pid)
        self.processes.append(job_process)
        return job_process

    def end_recording(self) -> None:
        """End the first recording process and remove its feed file."""
        first_process = self.processes[0]
        self.proc.end(first_process.identity.pid)
        self.processes[0] = JobProcess(first_process.identity, is_alive=False)

    def collect(self, *, after_seconds: float = 5.0) -> Collected:
        self.proc.advance(after_seconds)
        self.proc.write()
        return self.collector.collect()


def labels_of(collected: Collected, name: str) -> Sequence[tuple[str, ...]]:
    """Return the labels of every series of a family."""
    return [
        tuple(sample.labels.values())
        for metric in collected
        for sample in metric.samples
        if sample.name == name
    ]
