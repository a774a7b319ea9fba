"""Command `python -m dashboards.scenario [--seconds S] [--stay]`: run the scenario and print the address of its Prometheus."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from dashboards.scenario import DEFAULT_SECONDS, Timeline
from dashboards.scenario.cluster import Cluster


def main(arguments: Sequence[str]) -> int:
    """Run the scenario until its end or a signal.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(prog="python -m dashboards.scenario", description=__doc__)
    parser.add_argument("--seconds", type=float, default=DEFAULT_SECONDS, help="length (default %(default)s)")
    parser.add_argument("--stay", action="store_true", help="keep serving after the end, until Ctrl-C")
    given = parser.parse_args(arguments)
    enough = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: enough.set())
    work = Path(tempfile.mkdtemp(prefix="exporter-scenario-"))
    try:
        with Cluster(work, Timeline(seconds=given.seconds)) as cluster:
            print(f"Prometheus: {cluster.url}\nLogs: {work}", flush=True)  # noqa: T201  # what it is for
            enough.wait(given.seconds)
            print("The scenario is over.", flush=True)  # noqa: T201  # what it is for
            if given.stay:
                enough.wait()
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
