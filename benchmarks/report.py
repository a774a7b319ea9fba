"""What the benchmarks share: rows of the budget, contenders that take turns, processes of their own, one JSON document."""

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
    """One line of the budget.

    Attributes:
        what: Is measured.
        measured: The number, in the unit that `what` names.
        budget: At most so much; None where there is no budget.
        peers: What others take for the same, in the same run.
    """

    what: str
    measured: float
    budget: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)


def described() -> dict[str, object]:
    """What one must know of this run to compare it with another."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "commit": found.stdout.strip() or "unknown",
        "benchmark": Path(sys.argv[0]).name,
    }


def report(rows: Sequence[Row], **details: object) -> None:
    """Print the rows with what one must know to compare them; end with status 1 when a budget does not hold."""
    budgets = [{**asdict(row), "holds": row.budget is None or row.measured <= row.budget} for row in rows]
    print(json.dumps({**described(), "budgets": budgets, **details}, indent=1))
    sys.exit(0 if all(each["holds"] for each in budgets) else 1)


def take_turns(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    loops: int,
    clock: Callable[[], float] = time.thread_time,
    between: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Time a call of each contender, interleaved; the median over the rounds, in nanoseconds, without the loop's own.

    Args:
        contenders: By name.
        rounds: Of all of them.
        loops: Calls of one in a round.
        clock: Seconds; by default the processor time of this thread, so that other programs count little.
        between: Called after each round, unmeasured.
    """
    every = {"": lambda: None, **contenders}
    times: dict[str, list[float]] = {name: [] for name in every}
    for _ in range(rounds):
        for name, call in every.items():
            began = clock()
            for _ in range(loops):
                call()
            times[name].append((clock() - began) / loops * 1e9)
        between()
    medians = {name: statistics.median(found) for name, found in times.items()}
    empty = medians.pop("")
    return {name: round(max(0.0, median - empty), 1) for name, median in medians.items()}


@contextlib.contextmanager
def feed_directory() -> Iterator[Path]:
    """Make a feed directory, in shared memory where there is some, as the default one is."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = tempfile.mkdtemp(prefix="exporter-bench-", dir=shared)
    yield Path(directory)
    shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def child(
    command: Sequence[str | Path], *, until: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a process while the block lasts: it, and the part of its output that says it is ready."""
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
            if found := re.search(until, line):
                # Whoever writes on and is not read stands still in the end.
                threading.Thread(target=deque, args=(process.stdout, 0), daemon=True).start()
                yield process, found.group()
                return
        raise RuntimeError(f"{command} ended before it was ready")
    finally:
        process.kill()
        process.wait()


def thread_seconds(name: str) -> float:
    """Processor time of one of this process's threads, from the kernel (nanosecond resolution)."""
    for thread in threading.enumerate():
        if thread.name == name:
            fields = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text(encoding="ascii").split()
            return int(fields[0]) / 1e9
    raise RuntimeError(f"no thread {name}")


def process_seconds(pid: int) -> float:
    """Processor time of all threads of a process."""
    return time.clock_gettime((~pid << 3) | 2)


def memory_mib(pid: int) -> float:
    """Resident memory of a process, what it shares divided by the number of sharers."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return round(int(re.findall(r"^Pss: +(\d+) kB", rollup, re.MULTILINE)[0]) / 1024, 1)
