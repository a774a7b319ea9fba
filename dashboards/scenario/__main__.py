"""Command `python -m dashboards.scenario [--seconds S] [--stay]`: run the scenario and print the address of its Prometheus."""

from __future__ import annotations

import argparse
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
    """Run the scenario and return 0.

    A signal ends the scenario early. With `--stay`, Prometheus, the exporters and the ranks remain after the end until a signal. The
    files of the scenario are removed, except after an error.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dashboards.scenario",
        description="Run the scenario and print the address of its Prometheus.",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=DEFAULT_SECONDS,
        help="duration of the scenario in seconds (default %(default)s)",
    )
    parser.add_argument(
        "--stay",
        action="store_true",
        help="keep Prometheus, the exporters and the ranks after the end, until SIGINT (Ctrl-C) or SIGTERM",
    )
    options = parser.parse_args(arguments)
    stop_event = threading.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda *_: stop_event.set())
    directory = Path(tempfile.mkdtemp(prefix="exporter-scenario-"))
    with Cluster(directory, Timeline(duration_seconds=options.seconds)) as cluster:
        print(f"Prometheus: {cluster.url}\nLogs (removed after a normal end): {directory}", flush=True)  # noqa: T201  # the command prints the address for its user
        if not stop_event.wait(options.seconds):
            print("The scenario has ended.", flush=True)  # noqa: T201  # the command reports progress to its user
        if options.stay:
            stop_event.wait()
    # Not in a finally block: after an error, the directory with the logs must stay.
    shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
