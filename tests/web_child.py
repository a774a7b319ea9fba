"""Web server in a child process, for tests with hostile clients; `web_support.ServerProcess` starts and controls this program.

The only argument is a JSON object. All of its keys are optional:

- `series`: number of series on the page, 2000 by default.
- `listen`: address of the server, a free port of 127.0.0.1 by default.
- `web_config`: path of a web.config.yml.
- `limits`: arguments of `Limits`.
- `max_files`: limit of open descriptors of the process.
- `max_memory_bytes`: limit of the address space of the process. The garbage collector then has the thresholds of the sidecar.

The program first writes a JSON line with the addresses of the server. It then reads commands from standard input, one per line. The
reply to a command is a JSON line with the samples that the server exports about itself, the number of renderings, and the resources of the
process. Commands:

- `measure` changes nothing.
- `slow SECONDS` delays each rendering.
- `hang` blocks rendering until `release`.
- `finish` blocks rendering until half a second after SIGTERM.
- `release` ends the blocking.
- `exhaust` opens descriptors until none is free.

SIGTERM stops the server and ends the process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

from exporter.exposition.negotiation import Format
from exporter.web.endpoints import Endpoint, HealthEndpoint, MetricsEndpoint, ReadinessEndpoint
from exporter.web.http import Limits
from exporter.web.server import Server


class SyntheticPage:
    """Page of *series* synthetic series, whose rendering can be delayed or blocked."""

    def __init__(self, series: int) -> None:
        self._series = series
        self.render_count = 0
        self.render_delay_seconds = 0.0
        self.rendering_allowed = threading.Event()
        self.rendering_allowed.set()

    def render(self, output_format: Format, _names: frozenset[str]) -> bytes:
        """Return the page in the text format or in OpenMetrics."""
        self.render_count += 1
        self.rendering_allowed.wait()
        time.sleep(self.render_delay_seconds)
        lines = [f'load{{unit="{index}"}} {index}' for index in range(self._series)]
        end = "# EOF\n" if output_format is Format.OPENMETRICS else ""
        return ("# TYPE load gauge\n" + "\n".join(lines) + "\n" + end).encode()


def endpoints_of(page: SyntheticPage) -> list[Endpoint]:
    """Return the endpoints that serve a page of synthetic series."""
    return [MetricsEndpoint(page.render), HealthEndpoint(), ReadinessEndpoint()]


def sample_values(server: Server) -> dict[str, float]:
    """Return the server's own samples, with keys such as `exporter_http_requests_total{/metrics,200}`."""
    value_by_key = {}
    for family in server.families():
        for sample in family.samples:
            labels = "{" + ",".join(sample.labels.values()) + "}" if sample.labels else ""
            value_by_key[sample.name + labels] = sample.value
    return value_by_key


def main() -> None:
    options = json.loads(sys.argv[1])
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    if "max_files" in options:
        hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (options["max_files"], hard_limit))
    if "max_memory_bytes" in options:
        gc.set_threshold(10_000, 20, 20)  # the thresholds of the sidecar, on which its memory depends
        resource.setrlimit(resource.RLIMIT_AS, (options["max_memory_bytes"],) * 2)
    page = SyntheticPage(options.get("series", 2000))
    web_config = options.get("web_config")
    server = Server(
        endpoints_of(page),
        listen=[options.get("listen", "127.0.0.1:0")],
        web_config=None if web_config is None else Path(web_config),
        limits=Limits(**options.get("limits", {})),
    )

    finishes_late = False  # SIGTERM ends the blocking of the rendering half a second later

    def terminate(_signal_number: int, _frame: object) -> None:
        if finishes_late:
            threading.Timer(0.5, page.rendering_allowed.set).start()
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, terminate)
    # If SIGTERM arrives just before a blocking read of standard input, Python runs the handler only after the read. The timer
    # interrupts the read ten times a second, so that the handler runs soon.
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    statm = os.open("/proc/self/statm", os.O_RDONLY)  # stays open, because a test may use all descriptors
    server.start()
    print(json.dumps({"urls": server.urls}), flush=True)
    try:
        for line in sys.stdin:
            command, *arguments = line.split()
            if command in {"hang", "finish"}:
                page.rendering_allowed.clear()
                finishes_late = command == "finish"
            elif command == "slow":
                page.render_delay_seconds = float(arguments[0])
            elif command == "release":
                page.rendering_allowed.set()
            elif command == "exhaust":
                with contextlib.suppress(OSError):
                    while True:
                        os.dup(statm)
            resident_pages = int(os.pread(statm, 200, 0).split()[1])
            measured = sample_values(server) | {
                "renders": page.render_count,
                "cpu_seconds": time.process_time(),
                "resident_bytes": resident_pages * resource.getpagesize(),
                "threads": threading.active_count(),
            }
            print(json.dumps(measured), flush=True)
    finally:
        server.stop()
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
