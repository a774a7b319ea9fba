"""Web server in a child process, for tests with hostile clients; `web_support.Child` starts and controls this program.

The only argument is a JSON object with options. The program first writes a JSON line with the addresses of the
server. The program then reads commands, one per line, from standard input, and replies to each command with a JSON
line of statistics:

- `stats` changes nothing.
- `slow SECONDS` delays each rendering.
- `hang` blocks rendering until `release`.
- `finish` blocks rendering until half a second after SIGTERM.
- `release` ends the blocking.

SIGTERM stops the server and ends the process.
"""

from __future__ import annotations

import gc
import json
import logging
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


def fixed_endpoints(page: Page) -> list[Endpoint]:
    """Return the endpoints that serve a page of synthetic series."""
    return [MetricsEndpoint(page.metrics), HealthEndpoint(), ReadinessEndpoint()]


class Page:
    """Page of synthetic series, whose rendering can be blocked or delayed."""

    def __init__(self, series: int) -> None:
        self._series = series
        self.renders = 0
        self.render_delay_seconds = 0.0
        self.rendering_allowed = threading.Event()
        self.rendering_allowed.set()

    def metrics(self, form: Format, names: frozenset[str]) -> bytes:
        self.renders += 1
        self.rendering_allowed.wait()
        time.sleep(self.render_delay_seconds)
        lines = [f'load{{unit="{index}"}} {index}' for index in range(self._series)]
        end = "# EOF\n" if form is Format.OPENMETRICS else ""
        return ("# TYPE load gauge\n" + "\n".join(lines) + "\n" + end).encode()


def sample_values(server: Server) -> dict[str, float]:
    """Return the server's own metrics, keyed like `name{value1,value2}`."""
    values_by_name = {}
    for family in server.families():
        for sample in family.samples:
            labels = "{" + ",".join(sample.labels.values()) + "}" if sample.labels else ""
            values_by_name[sample.name + labels] = sample.value
    return values_by_name


def main() -> None:
    options = json.loads(sys.argv[1])
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    if "files" in options:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (options["files"], hard))
    if "memory_bytes" in options:
        gc.set_threshold(10_000, 20, 20)  # the thresholds of the sidecar
        resource.setrlimit(resource.RLIMIT_AS, (options["memory_bytes"],) * 2)
    page = Page(options.get("series", 2000))
    web_config = options.get("web_config")
    server = Server(
        fixed_endpoints(page),
        listen=[options.get("listen", "127.0.0.1:0")],
        web_config=None if web_config is None else Path(web_config),
        limits=Limits(**options.get("limits", {})),
    )

    finishes_late = False

    def terminate(number: int, frame: object) -> None:
        if finishes_late:
            threading.Timer(0.5, page.rendering_allowed.set).start()
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, terminate)
    # If SIGTERM arrives just before a blocking read of standard input, Python runs the handler only after the read. The timer
    # interrupts the read ten times a second, so that the handler runs soon.
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
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
            stats = {**sample_values(server), "renders": page.renders, "cpu": time.process_time()}
            stats["resident"] = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            print(json.dumps({**stats, "threads": threading.active_count()}), flush=True)
    finally:
        server.stop()
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
