"""The families of processes: what they are, and how a pass over the processes becomes samples.

Used in the sidecar by the collector of processes. Sums by run, rank and role; a pid is never a label.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from exporter.collectors.draft import Draft
from exporter.collectors.family import FamilySpec
from exporter.collectors.job import GpuProcessUse
from exporter.collectors.process_counts import Group, RunCounts

LABELS = ("run", "rank", "role")
GPU_LABELS = (*LABELS, "gpu", "uuid")

_ABSENT = "Absent where the processes cannot be seen (another pid namespace)."
_KEPT = "Absent also while its total cannot be kept."

UP = FamilySpec(
    "training_process_up",
    "gauge",
    "Whether the rank's process is alive (1) or has ended (0), as the kernel's lock on its feed file says. Absent a while after the end.",
    ("run", "rank"),
    source="record lock of the feed",
)
INSTANCES = FamilySpec(
    "training_process_instances",
    "gauge",
    f"Living processes; roles are trainer, dataloader (worker processes made by multiprocessing) and other. {_ABSENT}",
    LABELS,
    source="feed, /proc/<pid>/task/*/children",
)
STATE = FamilySpec(
    "training_process_state",
    "gauge",
    "Processes in a state: running, sleeping, disk_sleep, stopped, tracing_stop, zombie, dead, idle. Absent for a state that none is in.",
    (*LABELS, "state"),
    source="/proc/<pid>/stat state",
)
CPU = FamilySpec(
    "training_process_cpu_seconds_total",
    "counter",
    f"CPU time of all processes that there ever were, those that ended included. {_ABSENT} {_KEPT}",
    (*LABELS, "mode"),
    unit="seconds",
    source="/proc/<pid>/stat utime, stime",
)
RESIDENT = FamilySpec(
    "training_process_resident_bytes",
    "gauge",
    f"Memory in RAM; what several processes share is counted for each. {_ABSENT}",
    LABELS,
    unit="bytes",
    source="/proc/<pid>/statm resident",
)
VIRTUAL = FamilySpec(
    "training_process_virtual_bytes",
    "gauge",
    f"Address space. {_ABSENT}",
    LABELS,
    unit="bytes",
    source="/proc/<pid>/stat vsize",
)
SHARED = FamilySpec(
    "training_process_shared_bytes",
    "gauge",
    f"Memory in RAM that belongs to files and shared memory. {_ABSENT}",
    LABELS,
    unit="bytes",
    source="/proc/<pid>/statm shared",
)
IO_READ = FamilySpec(
    "training_process_io_read_bytes_total",
    "counter",
    "Bytes that were fetched from storage. Absent without the right to read it (same user, or ptrace).",
    LABELS,
    unit="bytes",
    source="/proc/<pid>/io read_bytes",
)
IO_WRITE = FamilySpec(
    "training_process_io_write_bytes_total",
    "counter",
    "Bytes that were sent to storage. Absent without the right to read it (same user, or ptrace).",
    LABELS,
    unit="bytes",
    source="/proc/<pid>/io write_bytes",
)
IO_RCHAR = FamilySpec(
    "training_process_io_rchar_bytes_total",
    "counter",
    "Bytes that read calls returned, from the page cache and pipes too. Absent without the right to read it (same user, or ptrace).",
    LABELS,
    unit="bytes",
    source="/proc/<pid>/io rchar",
)
IO_WCHAR = FamilySpec(
    "training_process_io_wchar_bytes_total",
    "counter",
    "Bytes that write calls took, into the page cache and pipes too. Absent without the right to read it (same user, or ptrace).",
    LABELS,
    unit="bytes",
    source="/proc/<pid>/io wchar",
)
IO_SYSCALLS = FamilySpec(
    "training_process_io_syscalls_total",
    "counter",
    "Calls that read or write. Absent without the right to read it (same user, or ptrace).",
    (*LABELS, "direction"),
    source="/proc/<pid>/io syscr, syscw",
)
THREADS = FamilySpec(
    "training_process_threads",
    "gauge",
    f"Threads. {_ABSENT}",
    LABELS,
    source="/proc/<pid>/stat num_threads",
)
OPEN_FDS = FamilySpec(
    "training_process_open_fds",
    "gauge",
    "File descriptors that are open in the process with the most. Absent without the right to read it (same user, or ptrace).",
    LABELS,
    source="/proc/<pid>/fd",
)
MAX_FDS = FamilySpec(
    "training_process_max_fds",
    "gauge",
    "File descriptors that the process with the most may have open. Absent without a limit and without the right to read it.",
    LABELS,
    source="/proc/<pid>/limits Max open files, soft",
)
SWITCHES = FamilySpec(
    "training_process_context_switches_total",
    "counter",
    f"Context switches of the main threads: voluntary (it waited) and involuntary (it was made to). {_ABSENT} {_KEPT}",
    (*LABELS, "kind"),
    source="/proc/<pid>/status voluntary_ctxt_switches, nonvoluntary_ctxt_switches",
)
FAULTS = FamilySpec(
    "training_process_major_faults_total",
    "counter",
    f"Page faults that had to read from storage. {_ABSENT} {_KEPT}",
    LABELS,
    source="/proc/<pid>/stat majflt",
)
START_TIME = FamilySpec(
    "training_process_start_time_seconds",
    "gauge",
    f"When the oldest living process of the group started, Unix time. {_ABSENT}",
    LABELS,
    unit="seconds",
    source="/proc/stat btime + /proc/<pid>/stat starttime",
)
EXITS = FamilySpec(
    "training_process_exits_total",
    "counter",
    "Processes that ended: completed (with status 0), failed (another status, or a signal), orderly (the feed was closed in order; the status was not seen), unknown. Absent while its total cannot be kept.",
    (*LABELS, "reason"),
    source="/proc/<pid>/stat exit_code of zombies, feed",
)
GPU_MEMORY = FamilySpec(
    "training_process_gpu_memory_bytes",
    "gauge",
    "GPU memory of the processes. Absent where the driver does not tell it (some MIG modes, vGPU) or gives pids of another namespace.",
    GPU_LABELS,
    unit="bytes",
    source="NVML compute running processes",
)
_GPU_RATIOS = {
    name: FamilySpec(
        f"training_process_gpu_{name}_utilization_ratio",
        "gauge",
        f"Share of time in which the processes kept the GPU's {what} busy. Absent where the driver does not tell it (MIG) or gives pids of another namespace.",
        GPU_LABELS,
        unit="ratio",
        source="NVML process utilization",
    )
    for name, what in (
        ("sm", "multiprocessors"),
        ("memory", "memory"),
        ("encoder", "video encoder"),
        ("decoder", "video decoder"),
    )
}
GPU_SM_SECONDS = FamilySpec(
    "training_process_gpu_sm_seconds_total",
    "counter",
    "Time in which the processes kept the GPU's multiprocessors busy, weighted by utilization. Absent where the driver does not tell it.",
    GPU_LABELS,
    unit="seconds",
    source="integral of NVML process utilization",
)
SPECS = (
    UP,
    INSTANCES,
    STATE,
    CPU,
    RESIDENT,
    VIRTUAL,
    SHARED,
    IO_READ,
    IO_WRITE,
    IO_RCHAR,
    IO_WCHAR,
    IO_SYSCALLS,
    THREADS,
    OPEN_FDS,
    MAX_FDS,
    SWITCHES,
    FAULTS,
    START_TIME,
    EXITS,
    GPU_MEMORY,
    *_GPU_RATIOS.values(),
    GPU_SM_SECONDS,
)

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "disk_sleep",
    "T": "stopped",
    "t": "tracing_stop",
    "Z": "zombie",
    "X": "dead",
    "x": "dead",
    "I": "idle",
}

_IO_COUNTERS: tuple[tuple[FamilySpec, str, tuple[str, ...]], ...] = (
    (IO_READ, "read_bytes", ()),
    (IO_WRITE, "write_bytes", ()),
    (IO_RCHAR, "rchar", ()),
    (IO_WCHAR, "wchar", ()),
    (IO_SYSCALLS, "syscr", ("read",)),
    (IO_SYSCALLS, "syscw", ("write",)),
)

Samples = dict[FamilySpec, dict[tuple[str, ...], float]]


@dataclass(slots=True, eq=False)
class GroupUse:
    """What the living processes of one group use now.

    Attributes:
        instances: Their number.
        states: Processes by state.
        resident_bytes: Sum.
        virtual_bytes: Sum.
        shared_bytes: Sum.
        threads: Sum.
        open_descriptors: Most of any; None as long as none was read.
        descriptor_limit: Of that one.
        start_seconds: Unix time of the oldest; None without any.
        io_denied: Whether somebody's I/O could not be read, so that no sum is right.
        descriptors_denied: Likewise.
    """

    instances: int = 0
    states: Counter[str] = field(default_factory=Counter)
    resident_bytes: int = 0
    virtual_bytes: int = 0
    shared_bytes: int = 0
    threads: int = 0
    open_descriptors: int | None = None
    descriptor_limit: int | None = None
    start_seconds: float | None = None
    io_denied: bool = False
    descriptors_denied: bool = False


class ProcessBlock:
    """The samples of one pass."""

    def __init__(self) -> None:
        self._samples: Samples = {spec: {} for spec in SPECS}

    def _put(self, spec: FamilySpec, value: float, *labels: str) -> None:
        self._samples[spec][labels] = value

    def add_up(self, run: str, rank: str, *, alive: bool) -> None:
        """Add whether a rank lives: one of its processes is enough."""
        before = self._samples[UP].get((run, rank), 0)
        self._put(UP, max(before, float(alive)), run, rank)

    def add_use(self, labels: tuple[str, ...], use: GroupUse) -> None:
        """Add what a group uses now."""
        self._put(INSTANCES, use.instances, *labels)
        for state, count in use.states.items():
            self._put(STATE, count, *labels, state)
        if not use.instances:
            return
        self._put(RESIDENT, use.resident_bytes, *labels)
        self._put(VIRTUAL, use.virtual_bytes, *labels)
        self._put(SHARED, use.shared_bytes, *labels)
        self._put(THREADS, use.threads, *labels)
        if use.start_seconds is not None:
            self._put(START_TIME, use.start_seconds, *labels)
        if use.open_descriptors is not None and not use.descriptors_denied:
            self._put(OPEN_FDS, use.open_descriptors, *labels)
            if use.descriptor_limit is not None:
                self._put(MAX_FDS, use.descriptor_limit, *labels)

    def add_counts(self, run: str, counts: RunCounts, uses: Mapping[Group, GroupUse]) -> None:
        """Add the counters of a run."""
        for (rank, role), values, ends in counts.groups():
            labels = (run, rank, role)
            for mode in ("user", "system"):
                self._put(CPU, values[mode], *labels, mode)
            self._put(FAULTS, values["major_faults"], *labels)
            for kind in ("voluntary", "involuntary"):
                self._put(SWITCHES, values[kind], *labels, kind)
            use = uses.get((rank, role))
            if use is None:
                self._put(INSTANCES, 0, *labels)
            if use is None or not use.io_denied:
                for spec, counter, more in _IO_COUNTERS:
                    self._put(spec, values[counter], *labels, *more)
            for reason, count in ends.items():
                self._put(EXITS, count, *labels, reason)
        for (rank, role, gpu, uuid), seconds in counts.gpus():
            self._put(GPU_SM_SECONDS, seconds, run, rank, role, gpu, uuid)

    def add_gpu(self, labels: tuple[str, ...], uses: Iterable[GpuProcessUse]) -> None:
        """Add what a group uses of one GPU; a sum of which a part is unknown is left out."""
        every = list(uses)
        memory = [use.memory_bytes for use in every]
        known = [size for size in memory if size is not None]
        if len(known) == len(memory):
            self._put(GPU_MEMORY, sum(known), *labels)
        for name, spec in _GPU_RATIOS.items():
            ratios = [use.ratios[name] for use in every if name in use.ratios]
            if ratios:
                self._put(spec, min(1.0, sum(ratios)), *labels)

    def put_into(self, draft: Draft) -> None:
        """Hand everything over."""
        for spec, samples in self._samples.items():
            draft.add_family(spec, samples)
