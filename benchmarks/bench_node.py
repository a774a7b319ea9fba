"""Measures what the sidecar and its NVML child cost on a node with eight GPUs and a job of eight ranks.

The real sidecar with its default settings replays the machine `h100` through the real child; the job is one process
per rank with 50 Stats, as in `bench_sidecar`, whose parts this uses. Scraped every 15 s. The processor time of both
processes is from the kernel, over the same while; series are those of a page without the job's own Stats, and with
them. Prints one JSON document.

    python benchmarks/bench_node.py [--quick]    quick: scraped every 5 s, which costs twice as much
"""

from __future__ import annotations

import gzip
import re
import sys
import time
from collections import Counter
from pathlib import Path

from bench_sidecar import QUICK, STATS, Server, child, feed_directory, job
from report import report

RANKS = 8
SCRAPE_SECONDS = 5.0 if QUICK else 15.0
SCRAPES_BEFORE = 3
SCRAPES = 2 if QUICK else 4


def nvml_child(parent: int) -> int:
    """The process id of the child."""
    children = Path(f"/proc/{parent}/task").glob("*/children")
    return next(int(pid) for each in children for pid in each.read_text().split())


def cost(pid: int, cpu_seconds: float, wall_seconds: float) -> dict[str, float]:
    """Share of a core, memory with and without what is shared with other processes."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kib = {name: int(number) for name, number in re.findall(r"(\w+): +(\d+) kB", rollup)}
    return {
        "percent_of_a_core": round(100 * cpu_seconds / wall_seconds, 3),
        "resident_mib": round(kib["Rss"] / 1024, 1),
        "proportional_mib": round(kib["Pss"] / 1024, 1),
    }


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process."""
    return time.clock_gettime((~pid << 3) | 2)


def scrape(server: Server, count: int) -> None:
    """Scrape every so often, at even times."""
    due = time.monotonic()
    for _ in range(count):
        due += SCRAPE_SECONDS
        time.sleep(max(0.0, due - time.monotonic()))
        server.scrape()


def main() -> None:
    with feed_directory() as directory:
        command = [
            sys.executable,
            "-m",
            "exporter",
            "--web.listen-address=127.0.0.1:0",
            f"--feed.dir={directory}",
            "--gpu.replay=h100",
        ]
        with child(command, until=r"http://127\.0\.0\.1:\d+") as (pid, url), job(directory, RANKS, STATS):
            server = Server(pid, url)
            scrape(server, SCRAPES_BEFORE)
            pids = {"sidecar": pid, "NVML child": nvml_child(pid)}
            before = {name: cpu_seconds(each) for name, each in pids.items()}
            began = time.monotonic()
            scrape(server, SCRAPES)
            wall = time.monotonic() - began
            found: dict[str, object] = {
                name: cost(each, cpu_seconds(each) - before[name], wall) for name, each in pids.items()
            }
            lines = gzip.decompress(server.body).decode().splitlines()
    names = Counter(re.split(r"[{ ]", line)[0] for line in lines if line and not line.startswith("#"))
    ours = Counter({name: count for name, count in names.items() if not name.startswith("bench_")})
    prefixes = Counter[str]()
    for name, count in ours.items():
        prefixes[name.partition("_")[0]] += count
    found["series"] = {"with the Stats": names.total(), "without": ours.total(), "by prefix": dict(prefixes)}
    report({"eight GPUs, eight ranks": found, "largest families": dict(ours.most_common(12))})


if __name__ == "__main__":
    main()
