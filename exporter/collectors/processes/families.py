"""The families of processes: sums by run, rank and role; a pid is never a label.

Used in the sidecar by the collectors of processes. Values only.
"""

from __future__ import annotations

from exporter.families import FamilySpec

LABELS = ("run", "rank", "role")

_ABSENT = "Absent where the processes cannot be seen (another pid namespace)."
_KEPT = "Absent also while its total cannot be kept."
_DENIED = "Absent without the right to read it (same user, or ptrace)."

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
IO_READ = FamilySpec(
    "training_process_io_read_bytes_total",
    "counter",
    f"Bytes that were fetched from storage. {_DENIED}",
    LABELS,
    unit="bytes",
    source="/proc/<pid>/io read_bytes",
)
IO_WRITTEN = FamilySpec(
    "training_process_io_written_bytes_total",
    "counter",
    f"Bytes that were sent to storage. {_DENIED}",
    LABELS,
    unit="bytes",
    source="/proc/<pid>/io write_bytes",
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
    f"File descriptors that are open in the process with the most. {_DENIED}",
    LABELS,
    source="/proc/<pid>/fd",
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
    (*LABELS, "gpu", "uuid"),
    unit="bytes",
    source="NVML compute running processes",
)
SPECS = (
    UP,
    INSTANCES,
    STATE,
    CPU,
    RESIDENT,
    IO_READ,
    IO_WRITTEN,
    THREADS,
    OPEN_FDS,
    EXITS,
    GPU_MEMORY,
)

UNIQUE = FamilySpec(
    "training_process_unique_bytes",
    "gauge",
    f"Memory that would be free if the processes ended, each on its own (USS). {_DENIED} Absent also while the time for it does not suffice.",
    LABELS,
    unit="bytes",
    source="/proc/<pid>/smaps_rollup Private_*",
)
PROPORTIONAL = FamilySpec(
    "training_process_proportional_bytes",
    "gauge",
    f"Memory of the processes, what they share divided by the number of sharers (PSS). {_DENIED} Absent also while the time for it does not suffice.",
    LABELS,
    unit="bytes",
    source="/proc/<pid>/smaps_rollup Pss",
)
MEMORY_SPECS = (UNIQUE, PROPORTIONAL)
