"""Which format, and whether compressed: what a scrape's Accept and Accept-Encoding headers ask for; and compressing.

Used in the sidecar, at every scrape. Nothing here raises, since anyone on the network chooses the headers: what cannot
be understood is passed over, and when nothing remains the answer is plain text, which everybody can read.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Iterator


class Format(enum.Enum):
    """An exposition format, by the exact content type that Prometheus 3 insists on."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    PROTOBUF = "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"


_PROTOBUF = ("application/vnd.google.protobuf", "io.prometheus.client.metricfamily", "delimited")


def negotiate(accept: str | None) -> Format:
    """The format named with the greatest weight, the richer of two with the same; several headers are joined by commas.

    Protobuf only for who names OpenMetrics, too, as Prometheus does: Telegraf and others ask for it always, and know
    classic histograms alone.
    """
    weights = {Format.PROTOBUF: 0.0, Format.OPENMETRICS: 0.0, Format.TEXT: 0.0}
    for name, weight, asked in _ranges(accept):
        version = asked.get("version", "")
        # 0.0.1 is what Prometheus calls the drafts of OpenMetrics 1.0.
        if name == "application/openmetrics-text" and version in ("", "0.0.1", "1.0.0"):
            form = Format.OPENMETRICS
        elif name == "text/plain" and version in ("", "0.0.4"):
            form = Format.TEXT
        elif (name, asked.get("proto"), asked.get("encoding")) == _PROTOBUF:
            form = Format.PROTOBUF
        else:
            continue
        weights[form] = max(weights[form], weight)
    if not weights[Format.OPENMETRICS]:
        weights[Format.PROTOBUF] = 0.0
    best, weight = max(weights.items(), key=lambda item: item[1])
    return best if weight > 0.0 else Format.TEXT


def accepts_gzip(accept_encoding: str | None) -> bool:
    """Whether an answer may be gzip: asked for, by name or by `*`, and not less than no encoding."""
    weights = {name: weight for name, weight, _ in _ranges(accept_encoding)}
    gzip = weights.get("gzip", weights.get("*", 0.0))
    return gzip > 0.0 and gzip >= weights.get("identity", 0.0)


def compress(body: bytes) -> bytes:
    """Make one gzip member, fast: level 9 takes twenty times as long for two thirds of the bytes."""
    compressor = zlib.compressobj(1, zlib.DEFLATED, wbits=zlib.MAX_WBITS | 16)
    return compressor.compress(body) + compressor.flush()


def _ranges(header: str | None) -> Iterator[tuple[str, float, dict[str, str]]]:
    """Name, weight (q) and parameters of a header's elements; those whose weight is malformed are left out."""
    for element in (header or "").lower().split(","):
        name, *parameters = element.split(";")
        pairs = (each.partition("=") for each in parameters)
        found = {key.strip(): value.strip(' "') for key, _, value in pairs}
        try:
            weight = float(found.get("q", "1"))
        except ValueError:
            continue
        if 0.0 <= weight <= 1.0:
            yield name.strip(), weight, found
