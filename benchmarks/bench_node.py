"""Measures what the sidecar and its NVML child cost on a node with eight GPUs and a job of eight ranks.

The real sidecar with its default settings replays the machine `h100` through the real child; the job is one process
per rank with 50 Stats, as in `bench_sidecar`, whose parts this uses, once without and once with telling their
training. Never scraped for a while, then every 15 s. The processor time of both processes is from the kernel, over the same while;
series are those of a page without the job's own Stats, and with them. Prints one JSON document.

    python benchmarks/bench_node.py [--quick]    quick: scraped every 5 s, which costs twice as much
"""

from __future__ import annotations

import gzip
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from bench_sidecar import QUICK, STATS, Server, feed_directory, job, sidecar
from report import report

RANKS = 8
SCRAPE_SECONDS = 5.0 if QUICK else 15.0
SCRAPES_BEFORE = 3
SCRAPES = 2 if QUICK else 4
UNSCRAPED_SECONDS = 5.0 if QUICK else 30.0
FORGOTTEN_SECONDS = 6.0 if QUICK else 66.0  # after a minute without a scrape it expects none


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


def measure(*, trains: bool) -> dict[str, object]:
    """The node, with ranks that tell their training or not."""
    with (
        feed_directory() as directory,
        sidecar(directory, "--gpu.replay=h100") as server,
        job(directory, RANKS, STATS, trains=trains),
    ):
        time.sleep(FORGOTTEN_SECONDS)
        found: dict[str, object] = {"never scraped": costs(server, lambda: time.sleep(UNSCRAPED_SECONDS))}
        scrape(server, SCRAPES_BEFORE)
        found[f"scraped every {SCRAPE_SECONDS:g} s"] = costs(server, lambda: scrape(server, SCRAPES))
        lines = gzip.decompress(server.body).decode().splitlines()
    names = Counter(re.split(r"[{ ]", line)[0] for line in lines if line and not line.startswith("#"))
    ours = Counter({name: count for name, count in names.items() if not name.startswith("bench_")})
    prefixes = Counter[str]()
    for name, count in ours.items():
        prefixes[name.partition("_")[0]] += count
    found["series"] = {"with the Stats": names.total(), "without": ours.total(), "by prefix": dict(prefixes)}
    found["largest families"] = dict(ours.most_common(12))
    return found


def costs(server: Server, meanwhile: Callable[[], None]) -> dict[str, object]:
    """What both processes cost over a while."""
    pids = {"sidecar": server.pid, "NVML child": nvml_child(server.pid)}
    before = {name: cpu_seconds(each) for name, each in pids.items()}
    began = time.monotonic()
    meanwhile()
    wall = time.monotonic() - began
    return {name: cost(each, cpu_seconds(each) - before[name], wall) for name, each in pids.items()}


def main() -> None:
    report(
        {
            "eight GPUs, eight ranks": measure(trains=False),
            "the same, with ranks that tell their training": measure(trains=True),
        }
    )


if __name__ == "__main__":
    main()
