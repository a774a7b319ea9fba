"""Counters of the web server, their families, and the detection of regular scrapers.

The event loop writes the counters; other threads only read.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, get_args

from prometheus_client.core import Metric

from exporter.families import FamilySpec

Reason = Literal[
    "accept", "certificate", "evicted", "full", "head_timeout", "reset", "tls", "truncated", "write_timeout"
]
"""Label value of `exporter_http_connection_errors_total`."""

SCRAPES = FamilySpec(
    name="exporter_scrapes_total",
    type="counter",
    help="Complete responses with status 200 to GET requests of /metrics, except responses without any family.",
    source="web server",
)
SCRAPE_DURATION = FamilySpec(
    name="exporter_scrape_duration_seconds_total",
    type="counter",
    unit="seconds",
    help="Time from the end of a scrape's request to the end of its complete response, summed over all scrapes.",
    source="web server, monotonic clock",
)
REQUESTS = FamilySpec(
    name="exporter_http_requests_total",
    type="counter",
    labels=("route", "code"),
    help=(
        'Responses by route and status code. The route "other" is an unknown path; "malformed" is a request that is not valid'
        " HTTP(S), has a body, or exceeds a limit."
    ),
    source="web server",
)
CONNECTIONS = FamilySpec(
    name="exporter_http_connections",
    type="gauge",
    labels=("state",),
    help="Open connections by state.",
    source="web server's connection guard",
    details=(
        "`incomplete`: the TLS handshake or the request head is missing.",
        "`idle`: no request.",
        "`running`: the response is being rendered.",
        "`writing`: the response is being sent.",
    ),
)
CONNECTION_ERRORS = FamilySpec(
    name="exporter_http_connection_errors_total",
    type="counter",
    labels=("reason",),
    help="Connections that were refused or ended early, by reason.",
    source="web server's connection guard",
    details=(
        (
            "Reasons of the exporter: `accept` (no descriptors or memory), `full` (no connection could be"
            " closed for the new one), `evicted` (closed for a newer one)."
        ),
        ("Reasons of the peer: `certificate`, `head_timeout`, `reset`, `tls`, `truncated`, `write_timeout`."),
    ),
)
RELOAD_SUCCESSFUL = FamilySpec(
    name="exporter_web_config_last_reload_successful",
    type="gauge",
    help=(
        "1 if the current web configuration file, with the certificates and keys that the file names, is in"
        " force, otherwise 0."
    ),
    absent="without a web configuration file",
    source="web server",
)
SPECS = (SCRAPES, SCRAPE_DURATION, REQUESTS, CONNECTIONS, CONNECTION_ERRORS, RELOAD_SUCCESSFUL)

MAX_CLIENTS = 64
"""Maximum number of clients whose scrapes are recorded."""
SCRAPES_PER_CLIENT = 3
"""Maximum number of recorded scrapes of a client."""
# Two gaps between scrapes are equal intervals if they differ by at most the larger of both tolerances.
TOLERANCE_RATIO = 0.2
TOLERANCE_SECONDS = 0.5


class Scrapers:
    """Times of complete scrapes by client: an address and a user agent, which separates curl from Prometheus."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: OrderedDict[tuple[str, str], tuple[float, ...]] = OrderedDict()

    def record(self, peer: str, agent: str, now: float) -> None:
        """Record a scrape at a monotonic time."""
        client = (peer, agent)
        with self._lock:
            times = self._times.pop(client, ())
            self._times[client] = (*times, now)[-SCRAPES_PER_CLIENT:]
            if len(self._times) > MAX_CLIENTS:
                # Other clients with a single scrape are dropped first: arbitrary user agents must not displace a scraper. Otherwise,
                # the client whose last scrape is the oldest is dropped: the clients of earlier days must not exclude a new scraper.
                single_scrape_clients = (
                    key for key, scrapes in self._times.items() if len(scrapes) == 1 and key != client
                )
                del self._times[next(single_scrape_clients, next(iter(self._times)))]

    def next_expected(self, now: float) -> float | None:
        """Return the monotonic time of the next scrape of a regular client.

        A client is regular if the gaps between its last scrapes are equal; two scrapes are enough. A client that is late by
        an interval is no longer regular. Returns None without a regular client.
        """
        with self._lock:
            clients = list(self._times.values())
        expected_times = []
        for times in clients:
            gaps = [later - earlier for earlier, later in pairwise(times)]
            if not gaps or max(gaps) - min(gaps) > max(TOLERANCE_SECONDS, TOLERANCE_RATIO * max(gaps)):
                continue
            if now < times[-1] + 2 * gaps[-1]:
                expected_times.append(times[-1] + gaps[-1])
        return min(expected_times, default=None)


@dataclass(slots=True)
class Counts:
    """Counters since the start."""

    scrapes: int = 0
    scrape_seconds: float = 0.0
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # by route and status
    errors: Counter[Reason] = field(default_factory=Counter)
    scrapers: Scrapers = field(default_factory=Scrapers)

    def families(self) -> list[Metric]:
        """Return the counters as families."""
        requests = sorted(self.requests.copy().items())
        return [
            SCRAPES.family({(): self.scrapes}),
            SCRAPE_DURATION.family({(): self.scrape_seconds}),
            REQUESTS.family({(route, str(code)): count for (route, code), count in requests}),
            CONNECTION_ERRORS.family({(reason,): self.errors[reason] for reason in get_args(Reason)}),
        ]
