"""Shared parts of the benchmarks: rows with budgets, interleaved timing, child processes, a JSON report."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

QUICK = "--quick" in sys.argv
REPOSITORY = Path(__file__).resolve().parent.parent
if sys.argv[1:2] in (["-h"], ["--help"]):
    print(sys.modules["__main__"].__doc__)
    raise SystemExit


@dataclass(frozen=True)
class Row:
    """Measured figure with its budget.

    Attributes:
        figure: Name of the figure.
        value: Measured value.
        unit: Unit of the value, the budget and the peers; "" for a ratio or a count.
        budget: Maximum allowed value; None without a budget.
        peers: Values of other tools, measured in the same run, by name.
        notes: Further values of the run as text with units.
    """

    figure: str
    value: float
    unit: str = ""
    budget: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()


def describe_run() -> dict[str, object]:
    """Return the machine, the Python version, the commit, the benchmark, and whether the run is quick."""
    version = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "commit": version.stdout.strip() or "unknown",
        "benchmark": Path(sys.argv[0]).name,
        "quick": QUICK,
    }


def report(rows: Sequence[Row], **details: object) -> None:
    """Print the rows and the description of the run as JSON. Exit with status 0, or 1 if a budget is exceeded."""
    budgets = [{**asdict(row), "holds": row.budget is None or row.value <= row.budget} for row in rows]
    print(json.dumps({**describe_run(), "budgets": budgets, **details}, indent=1))
    sys.exit(0 if all(row["holds"] for row in budgets) else 1)


def take_turns(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    loops: int,
    clock: Callable[[], float] = time.thread_time,
    after_round: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Return the median duration of a call of each contender in nanoseconds, without the loop. The contenders take turns.

    Args:
        contenders: Functions by name.
        rounds: Number of rounds. In a round, each contender is measured once.
        loops: Number of calls of a contender in a round.
        clock: Clock in seconds. The default is the CPU time of this thread, which other programs affect less than wall time.
        after_round: Function that is called after each round, outside the measured time.
    """
    contenders_and_loop = {"": lambda: None, **contenders}
    times: dict[str, list[float]] = {name: [] for name in contenders_and_loop}
    for _ in range(rounds):
        for name, call in contenders_and_loop.items():
            started = clock()
            for _ in range(loops):
                call()
            times[name].append((clock() - started) / loops * 1e9)
        after_round()
    medians = {name: statistics.median(durations) for name, durations in times.items()}
    empty = medians.pop("")
    return {name: round(max(0.0, median - empty), 1) for name, median in medians.items()}


@contextlib.contextmanager
def feed_directory() -> Iterator[Path]:
    """Create a feed directory for the block, in shared memory if available, like the default feed directory."""
    memory_directory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = tempfile.mkdtemp(prefix="exporter-bench-", dir=memory_directory)
    try:
        yield Path(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def child(
    command: Sequence[str | Path], *, ready_pattern: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a process during the block. Yields the process and the part of its output that matched *ready_pattern*."""
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if ready_line := re.search(ready_pattern, line):
                # Read on, because the process would block once the pipe is full.
                threading.Thread(target=deque, args=(process.stdout, 0), daemon=True).start()
                yield process, ready_line.group()
                return
        raise RuntimeError(f"{command} ended before it was ready")
    finally:
        process.kill()
        process.wait()


def thread_seconds(name: str) -> float:
    """Return the CPU time of a thread of this process in seconds, from the kernel's schedstat (in nanoseconds)."""
    for thread in threading.enumerate():
        if thread.name == name:
            fields = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text(encoding="ascii").split()
            return int(fields[0]) / 1e9
    raise RuntimeError(f"no thread {name}")


def process_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process in seconds."""
    cpu_clock = (~pid << 3) | 2  # see clock_getcpuclockid(3)
    return time.clock_gettime(cpu_clock)


def memory_mib(pid: int) -> float:
    """Return the proportional set size of a process in MiB."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return round(int(re.findall(r"^Pss: +(\d+) kB", rollup, re.MULTILINE)[0]) / 1024, 1)
