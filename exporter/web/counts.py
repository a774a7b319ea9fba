"""What the web server counts about itself, the families it shows it as, and who scrapes it regularly.

Used in the sidecar. The loop's thread alone writes; any thread reads. No file, no lock: each number is read
once, and a dict is copied in one step before it is walked.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from prometheus_client.core import Metric

from exporter.families import FamilySpec

PeerError = Literal["reset", "truncated", "head_timeout", "write_timeout", "tls", "certificate"]

PEER_ERRORS: tuple[PeerError, ...] = (
    "certificate",
    "head_timeout",
    "reset",
    "tls",
    "truncated",
    "write_timeout",
)

SCRAPES = FamilySpec(
    "exporter_scrapes_total",
    "counter",
    "Answers of the telemetry path that were sent completely.",
    source="web server",
)
SCRAPE_DURATION = FamilySpec(
    "exporter_scrape_duration_seconds_total",
    "counter",
    "Time from the end of a scrape's request to the end of its answer, of all complete answers together.",
    unit="seconds",
    source="web server, monotonic clock",
)
RESPONSE_BYTES = FamilySpec(
    "exporter_response_bytes",
    "gauge",
    "Size of the last complete answer of the telemetry path as sent, without its header; absent before it.",
    unit="bytes",
    source="web server",
)
REQUESTS = FamilySpec(
    "exporter_http_requests_total",
    "counter",
    'Requests answered; route "other" is an unknown path, "malformed" a request that could not be read.',
    labels=("route", "code"),
    source="web server",
)
CONNECTIONS = FamilySpec(
    "exporter_http_connections",
    "gauge",
    "Open connections by what they are doing.",
    labels=("state",),
    source="web server's guard",
)
EVICTED = FamilySpec(
    "exporter_http_connections_evicted_total",
    "counter",
    "Connections closed to make room for a newer one.",
    source="web server's guard",
)
REFUSED = FamilySpec(
    "exporter_http_connections_refused_total",
    "counter",
    "Connections closed at once because all others were being answered.",
    source="web server's guard",
)
ACCEPT_ERRORS = FamilySpec(
    "exporter_http_accept_errors_total",
    "counter",
    "Failures to accept a connection, for want of file descriptors or memory.",
    source="accept(2)",
)
PEER_ERROR = FamilySpec(
    "exporter_http_peer_errors_total",
    "counter",
    "Connections that ended by a peer's fault: too slow, broken off, or without a valid TLS session.",
    labels=("reason",),
    source="web server",
)
RENDER_TIMEOUTS = FamilySpec(
    "exporter_http_render_timeouts_total",
    "counter",
    "Requests answered 503 because their answer was not made in time.",
    source="web server",
)
RENDERS = FamilySpec(
    "exporter_http_renders_total",
    "counter",
    "Answers made by a worker thread.",
    source="web server",
)
RENDERS_JOINED = FamilySpec(
    "exporter_http_renders_joined_total",
    "counter",
    "Requests that shared an answer that was being made already.",
    source="web server",
)
RELOADS = FamilySpec(
    "exporter_web_config_reloads_total",
    "counter",
    "Changes of web.config.yml or its files that were taken over; absent without that file.",
    source="web server",
)
RELOAD_ERRORS = FamilySpec(
    "exporter_web_config_reload_errors_total",
    "counter",
    "Changes of web.config.yml or its files that could not be taken over; absent without that file.",
    source="web server",
)
RELOAD_SUCCESSFUL = FamilySpec(
    "exporter_web_config_last_reload_successful",
    "gauge",
    "1 when the settings in force are those of web.config.yml and its files as they are now, else 0; "
    "absent without that file.",
    source="web server",
)

SPECS = (
    SCRAPES,
    SCRAPE_DURATION,
    RESPONSE_BYTES,
    REQUESTS,
    CONNECTIONS,
    EVICTED,
    REFUSED,
    ACCEPT_ERRORS,
    PEER_ERROR,
    RENDER_TIMEOUTS,
    RENDERS,
    RENDERS_JOINED,
    RELOADS,
    RELOAD_ERRORS,
    RELOAD_SUCCESSFUL,
)
"""Every family of this server."""


MAX_CLIENTS = 64
REMEMBERED_SCRAPES = 3
TOLERANCE_RATIO = 0.2
TOLERANCE_SECONDS = 0.5
"""Two gaps between scrapes are one interval when they differ by no more than the larger of both."""


class Scrapers:
    """Complete scrapes by client: an address and a user agent, so that a person's curl beside a Prometheus is apart."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: OrderedDict[tuple[str, str], tuple[float, ...]] = OrderedDict()

    def note(self, peer: str, agent: str, now: float) -> None:
        """Note one scrape; `now` is monotonic."""
        client = (peer, agent)
        with self._lock:
            times = self._times.pop(client, ())
            self._times[client] = (*times, now)[-REMEMBERED_SCRAPES:]
            if len(self._times) > MAX_CLIENTS:
                # Who came once goes first: user agents cost nothing, and must not push a scraper out.
                once = (key for key, seen in self._times.items() if len(seen) == 1)
                del self._times[next(once, next(iter(self._times)))]

    def next_expected(self, now: float) -> float | None:
        """Give the monotonic time at which the next scrape of a regular scraper is due; None without one.

        A client is one when it came at least twice, and with the same gap where it came more often. It is gone
        when its next scrape is late by a whole interval; until then the time may have passed already.
        """
        with self._lock:
            seen = list(self._times.values())
        expected = [(times[-1], interval) for times in seen if (interval := _interval(times)) is not None]
        return min((last + gap for last, gap in expected if now < last + 2 * gap), default=None)


def _interval(times: tuple[float, ...]) -> float | None:
    gaps = [later - earlier for earlier, later in pairwise(times)]
    if not gaps:
        return None
    shortest, longest = min(gaps), max(gaps)
    regular = longest - shortest <= max(TOLERANCE_SECONDS, TOLERANCE_RATIO * longest)
    return gaps[-1] if regular else None


@dataclass(slots=True)
class Counts:
    """What has happened so far; plain numbers that only the loop's thread changes.

    Attributes:
        scrapes: Complete answers of the telemetry path.
        scrape_seconds: The time they took, together.
        response_bytes: Size of the last of them; None before the first.
        requests: By (route, status).
        peer_errors: By reason.
        refused: Connections closed for want of room.
        accept_errors: Failed accepts.
        render_timeouts: Answers that were late.
        renders: Answers made.
        renders_joined: Requests that shared one.
        scrapers: Who comes back at an interval.
    """

    scrapes: int = 0
    scrape_seconds: float = 0.0
    response_bytes: int | None = None
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    peer_errors: Counter[PeerError] = field(default_factory=Counter)
    refused: int = 0
    accept_errors: int = 0
    render_timeouts: int = 0
    renders: int = 0
    renders_joined: int = 0
    scrapers: Scrapers = field(default_factory=Scrapers)

    def scraped(self, seconds: float, size: int) -> None:
        """Count one complete answer of the telemetry path."""
        self.scrapes += 1
        self.scrape_seconds += seconds
        self.response_bytes = size

    def families(self) -> list[Metric]:
        """These numbers as families; the guard and the settings add theirs."""
        requests = sorted(self.requests.copy().items())
        last = self.response_bytes
        return [
            number(SCRAPES, self.scrapes),
            number(SCRAPE_DURATION, self.scrape_seconds),
            RESPONSE_BYTES.family({} if last is None else {(): last}),
            REQUESTS.family({(route, str(code)): count for (route, code), count in requests}),
            number(REFUSED, self.refused),
            number(ACCEPT_ERRORS, self.accept_errors),
            PEER_ERROR.family({(reason,): self.peer_errors[reason] for reason in PEER_ERRORS}),
            number(RENDER_TIMEOUTS, self.render_timeouts),
            number(RENDERS, self.renders),
            number(RENDERS_JOINED, self.renders_joined),
        ]


def number(spec: FamilySpec, value: float) -> Metric:
    """A family of one sample without labels."""
    return spec.family({(): value})
