"""The families of processes: sums by run, rank and role; a pid is never a label.

Used in the sidecar by the collectors of processes. Values only.
"""

from __future__ import annotations

from exporter.families import family

LABELS = ("run", "rank", "role")

_ABSENT = "Absent where the processes cannot be seen (another pid namespace)."
_KEPT = "Absent also while its total cannot be kept."
_DENIED = "Absent without the right to read it (same user, or ptrace)."

UP = family(
    "training_process_up",
    "Whether the rank's process is alive (1) or has ended (0), as the kernel's lock on its feed file says. Absent a while after the end.",
    "record lock of the feed",
    "run",
    "rank",
)
INSTANCES = family(
    "training_process_instances",
    f"Living processes; roles are trainer, dataloader (worker processes made by multiprocessing) and other. {_ABSENT}",
    "feed, /proc/<pid>/task/*/children",
    *LABELS,
)
STATE = family(
    "training_process_state",
    "Processes in a state: running, sleeping, disk_sleep, stopped, tracing_stop, zombie, dead, idle. Absent for a state that none is in.",
    "/proc/<pid>/stat state",
    *LABELS,
    "state",
)
CPU = family(
    "training_process_cpu_seconds_total",
    f"CPU time of all processes that there ever were, those that ended included. {_ABSENT} {_KEPT}",
    "/proc/<pid>/stat utime, stime",
    *LABELS,
    "mode",
)
RESIDENT = family(
    "training_process_resident_bytes",
    f"Memory in RAM; what several processes share is counted for each. {_ABSENT}",
    "/proc/<pid>/statm resident",
    *LABELS,
)
IO_READ = family(
    "training_process_io_read_bytes_total",
    f"Bytes that were fetched from storage. {_DENIED}",
    "/proc/<pid>/io read_bytes",
    *LABELS,
)
IO_WRITTEN = family(
    "training_process_io_written_bytes_total",
    f"Bytes that were sent to storage. {_DENIED}",
    "/proc/<pid>/io write_bytes",
    *LABELS,
)
THREADS = family("training_process_threads", f"Threads. {_ABSENT}", "/proc/<pid>/stat num_threads", *LABELS)
OPEN_FDS = family(
    "training_process_open_fds",
    f"File descriptors that are open in the process with the most. {_DENIED}",
    "/proc/<pid>/fd",
    *LABELS,
)
EXITS = family(
    "training_process_exits_total",
    "Processes that ended: completed (with status 0), failed (another status, or a signal), orderly (the feed was closed in order; the status was not seen), unknown. Absent while its total cannot be kept.",
    "/proc/<pid>/stat exit_code of zombies, feed",
    *LABELS,
    "reason",
)
GPU_MEMORY = family(
    "training_process_gpu_memory_bytes",
    "GPU memory of the processes. Absent where the driver does not tell it (some MIG modes, vGPU) or gives pids of another namespace.",
    "NVML compute running processes",
    *LABELS,
    "gpu",
    "uuid",
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

UNIQUE = family(
    "training_process_unique_bytes",
    f"Memory that would be free if the processes ended, each on its own (USS). {_DENIED} Absent also while the time for it does not suffice.",
    "/proc/<pid>/smaps_rollup Private_*",
    *LABELS,
)
PROPORTIONAL = family(
    "training_process_proportional_bytes",
    f"Memory of the processes, what they share divided by the number of sharers (PSS). {_DENIED} Absent also while the time for it does not suffice.",
    "/proc/<pid>/smaps_rollup Pss",
    *LABELS,
)
MEMORY_SPECS = (UNIQUE, PROPORTIONAL)
