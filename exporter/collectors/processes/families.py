"""Families of the job's processes."""

from __future__ import annotations

from exporter.families import FamilySpec

_HIDDEN = "where the processes are not visible (a different pid namespace)"
_NOT_RUNNING = f"without a running process, or {_HIDDEN}"
_PRIVATE = "without a running process or without permission (same user or ptrace)"
_NO_IO = "without permission (same user or ptrace), or on a kernel without /proc/<pid>/io"

PROCESS_UP = FamilySpec(
    name="training_process_up",
    type="gauge",
    labels=("run", "rank"),
    help=(
        "1 if any recording process of the rank is running, otherwise 0. training_feed_alive has the value of"
        " each process."
    ),
    absent="*expired*",
    source="record lock on the lock file of the feed",
    details=("A running process holds a record lock on the lock file of its feed.",),
)
INSTANCES = FamilySpec(
    name="training_process_instances",
    type="gauge",
    labels=("run", "rank", "role"),
    help="Running processes by role: trainer, dataloader (worker processes of multiprocessing), other.",
    absent=_HIDDEN,
    source="feed, descendants of the recording processes",
)
STATE = FamilySpec(
    name="training_process_state",
    type="gauge",
    labels=("run", "rank", "role", "state"),
    help="Processes by state: running, sleeping, disk_sleep, stopped, tracing_stop, zombie, dead, idle.",
    absent="for a state without processes",
    source="/proc/<pid>/stat state",
)
CPU = FamilySpec(
    name="training_process_cpu_seconds_total",
    type="counter",
    unit="seconds",
    labels=("run", "rank", "role", "mode"),
    help=(
        "CPU time of the processes by mode (user, system) since the exporter started, including processes that"
        " have exited."
    ),
    absent=_HIDDEN,
    source="/proc/<pid>/stat utime, stime",
)
RESIDENT = FamilySpec(
    name="training_process_resident_bytes",
    type="gauge",
    unit="bytes",
    labels=("run", "rank", "role"),
    help="Resident memory (RSS); memory shared by several processes counts for each process.",
    absent=_NOT_RUNNING,
    source="/proc/<pid>/statm resident",
)
IO_READ = FamilySpec(
    name="training_process_io_read_bytes_total",
    type="counter",
    unit="bytes",
    labels=("run", "rank", "role"),
    help="Bytes that the processes read from storage since the exporter started.",
    absent=_NO_IO,
    source="/proc/<pid>/io read_bytes",
    details=("Includes processes that have exited.",),
)
IO_WRITTEN = FamilySpec(
    name="training_process_io_written_bytes_total",
    type="counter",
    unit="bytes",
    labels=("run", "rank", "role"),
    help="Bytes that the processes wrote to storage since the exporter started.",
    absent=_NO_IO,
    source="/proc/<pid>/io write_bytes",
    details=("Includes processes that have exited.",),
)
THREADS = FamilySpec(
    name="training_process_threads",
    type="gauge",
    labels=("run", "rank", "role"),
    help="Number of threads of the processes.",
    absent=_NOT_RUNNING,
    source="/proc/<pid>/status Threads",
)
OPEN_FDS = FamilySpec(
    name="training_process_open_fds",
    type="gauge",
    labels=("run", "rank", "role"),
    help="Number of open file descriptors of the process that has the most.",
    absent=_PRIVATE,
    source="/proc/<pid>/fd",
)
GPU_MEMORY = FamilySpec(
    name="training_process_gpu_memory_bytes",
    type="gauge",
    unit="bytes",
    labels=("run", "rank", "role", "gpu", "uuid"),
    help="Device memory that the processes use on a GPU.",
    absent=(
        "where the driver does not report the memory of every process of the group, or reports pids of a different pid"
        " namespace"
    ),
    source="NVML compute running processes",
    details=("In some MIG modes and on vGPUs, the driver does not report memory by process.",),
)
SPECS = (PROCESS_UP, INSTANCES, STATE, CPU, RESIDENT, IO_READ, IO_WRITTEN, THREADS, OPEN_FDS, GPU_MEMORY)
