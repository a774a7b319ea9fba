"""Where the cost grows: ranks and series of a node, processes of a job, runs through one state file, iterations.

The real sidecar with its default settings, over real processes; what is measured of it is the kernel's. Prints one JSON
document of curves; with `--pictures` (and matplotlib) it draws each into docs/images.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from report import QUICK, REPOSITORY, child, described, feed_directory, memory_mib, process_seconds

WATCHED_SECONDS = 6.0 if QUICK else 15.0
RANKS = (1, 4, 16) if QUICK else (1, 4, 16, 64)
PROCESSES = (1, 10, 100) if QUICK else (1, 10, 100, 1000, 2000)
RUNS = (10, 20) if QUICK else (50, 200, 500, 1000)
ITERATIONS = (1_000, 10_000) if QUICK else (1_000, 10_000, 100_000, 1_000_000)
STATS = 50


def forked(work: Callable[..., None], *arguments: int) -> int:
    """Run something in a forked child; its id."""
    pid = os.fork()
    if pid == 0:
        try:
            work(*arguments)
        finally:
            os._exit(0)
    return pid


@contextlib.contextmanager
def children(*calls: Callable[[], None]) -> Iterator[None]:
    """Keep forked children at work while the block lasts, each in a process group of its own, which ends with it."""

    def leading(call: Callable[[], None]) -> None:
        os.setpgid(0, 0)
        call()

    pids = [forked(partial(leading, call)) for call in calls]
    try:
        yield
    finally:
        for pid in pids:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def be_rank(number: int, ranks: int) -> None:
    """One rank of a job: 50 Stats and an iteration, once a second."""
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(ranks))
    import exporter
    from exporter import training

    stats = [exporter.Stat(f"growth.part{index}", ["mean", "max"], unit="seconds") for index in range(STATS)]
    with training.training_loop(train_iterations_start=0):
        while True:
            with training.training_iteration():
                time.sleep(1.0)
                training.record(loss=2.0, tokens=1024)
            for stat in stats:
                stat.add(time.time() % 1.0)


@contextlib.contextmanager
def sidecar(feed: Path, **environment: str) -> Iterator[tuple[int, str]]:
    """Run the sidecar; its process id and the address of its page."""
    command = [
        sys.executable, "-m", "exporter", "--web.listen-address=127.0.0.1:0", f"--feed.dir={feed}",
        f"--state.dir={feed}", "--gpu.replay=no-gpu",
    ]  # fmt: skip
    with child(command, until=r"http://127\.0\.0\.1:\d+", **environment) as (process, address):
        yield process.pid, f"{address}/metrics"


def watched(pid: int, url: str) -> dict[str, float]:
    """What a sidecar takes in its steady state, scraped as by Prometheus."""
    for _ in range(2):
        page(url)
        time.sleep(WATCHED_SECONDS / 3)
    before, began = process_seconds(pid), time.monotonic()
    while time.monotonic() < began + WATCHED_SECONDS:
        time.sleep(WATCHED_SECONDS / 3)
        body = page(url)
    percent = (process_seconds(pid) - before) / (time.monotonic() - began) * 100
    series = sum(not line.startswith(b"#") for line in body.splitlines())
    return {
        "% of a core": round(percent, 2),
        "MiB": memory_mib(pid),
        "series": series,
        "KiB of a scrape": len(body) // 1024,
    }


def page(url: str) -> bytes:
    """The page as text, which a sidecar that has just begun does not have yet."""
    while True:
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(url, timeout=60) as answer:
            found: bytes = answer.read()
            return found
        time.sleep(0.2)


def ranks() -> dict[str, Any]:
    """Ranks of one node, 50 Stats each; with them grow the series."""
    points = []
    for count in RANKS:
        with feed_directory() as feed:
            os.environ.update(EXPORTER_FEED_DIR=str(feed), EXPORTER_RUN="growth")
            with (
                children(*(partial(be_rank, each, count) for each in range(count))),
                sidecar(feed) as (pid, url),
            ):
                while page(url).count(b"training_process_up{") < count:
                    time.sleep(0.5)
                points.append({"ranks": count, **watched(pid, url)})
    return {"title": "Ranks of a node, each with 50 Stats", "points": points}


def processes() -> dict[str, Any]:
    """Processes of one job."""
    points = []
    for count in PROCESSES:
        with feed_directory() as feed:
            os.environ.update(EXPORTER_FEED_DIR=str(feed), EXPORTER_RUN="growth")

            def rank_with_children(count: int = count) -> None:
                for _ in range(count - 1):
                    forked(signal.pause)
                be_rank(0, 1)

            with children(rank_with_children), sidecar(feed) as (pid, url):
                while b"training_process_up{" not in page(url):
                    time.sleep(0.5)
                points.append({"processes": count, **watched(pid, url)})
    return {"title": "Processes of a job", "points": points}


def runs() -> dict[str, Any]:
    """Runs that ended, one after another, through one state file."""
    points = []

    def one(number: int) -> None:
        os.environ["EXPORTER_RUN"] = f"run-{number}"
        from exporter import flush, training

        with training.training_loop(train_iterations_start=0), training.training_iteration():
            pass
        flush()

    with feed_directory() as feed:
        os.environ["EXPORTER_FEED_DIR"] = str(feed)
        with sidecar(feed) as (pid, url):
            done = 0
            for count in RUNS:
                while done < count:
                    os.waitpid(forked(one, done), 0)
                    done += 1
                    time.sleep(0.02)
                state = sum(path.stat().st_size for path in (feed / "ledger").iterdir()) // 1024
                points.append({"runs": count, **watched(pid, url), "KiB of state": state})
    return {"title": "Runs through one state file, within minutes", "points": points}


def iterations() -> dict[str, Any]:
    """Instrumented iterations of one process."""
    points = []
    done = 0
    with contextlib.ExitStack() as stack:
        os.environ["EXPORTER_FEED_DIR"] = str(stack.enter_context(feed_directory()))
        from exporter import training

        stack.enter_context(training.training_loop(train_iterations_start=0))
        for count in ITERATIONS:
            began, before = time.thread_time(), done
            while done < count:
                with training.training_iteration():
                    training.record(loss=2.0)
                done += 1
            points.append(
                {
                    "iterations": count,
                    "µs each": round((time.thread_time() - began) / (done - before) * 1e6, 2),
                    "MiB": memory_mib(os.getpid()),
                }
            )
    return {"title": "Instrumented iterations of a process", "points": points}


def draw(curves: Sequence[dict[str, Any]]) -> None:
    """One picture a curve."""
    try:
        import_module("matplotlib").use("svg")
    except ImportError:
        sys.stderr.write("no pictures: pip install matplotlib\n")
        return
    pyplot = import_module("matplotlib.pyplot")
    for curve in curves:
        names = list(curve["points"][0])
        across, measured = names[0], [name for name in names[1:] if name != "series"]
        figure, axes = pyplot.subplots(
            1, len(measured), figsize=(3.2 * len(measured), 2.6), layout="constrained"
        )
        for axis, name in zip(axes if len(measured) > 1 else [axes], measured, strict=True):
            axis.plot([p[across] for p in curve["points"]], [p[name] for p in curve["points"]], marker="o")
            axis.set(xlabel=across, title=name, xscale="log", ylim=(0, None))
            axis.grid(alpha=0.3)
        figure.savefig(REPOSITORY / f"docs/images/growth-{across}.svg", metadata={"Date": None})


def main() -> None:
    """Measure, print, and draw where asked."""
    # A process of its own for each curve: what one has imported is not the next one's.
    if name := next((each for each in sys.argv[1:] if not each.startswith("-")), ""):
        print(json.dumps(globals()[name]()))
        return
    curves = []
    for each in ("ranks", "processes", "runs", "iterations"):
        quick = ["--quick"] if QUICK else []
        with os.popen(" ".join([sys.executable, __file__, each, *quick])) as told:
            curves.append(json.loads(told.read()))
    if "--pictures" in sys.argv:
        draw(curves)
    print(json.dumps({**described(), "curves": curves}, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
