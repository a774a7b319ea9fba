"""Content negotiation by Accept and Accept-Encoding.

The functions raise no exception, because clients choose the headers. Malformed elements are ignored. Without a valid element,
the format is plain text.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache


class Format(enum.Enum):
    """Exposition formats. The value is the content type, exactly as Prometheus 3 requires it."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    PROTOBUF = "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"


@dataclass(frozen=True, slots=True)
class AcceptedElement:
    """Element of Accept or Accept-Encoding, in lower case."""

    name: str
    weight: float  # parameter q; 1 by default
    parameters: Mapping[str, str]


_CACHED_HEADERS = 16
"""Number of cached headers: a scraper sends the same headers each time."""

_PROTOBUF = ("application/vnd.google.protobuf", "io.prometheus.client.metricfamily", "delimited")
"""Name and parameters `proto` and `encoding` of the protobuf format, in lower case."""


@lru_cache(maxsize=_CACHED_HEADERS)
def negotiate(accept: str | None) -> Format:
    """Return the format with the greatest weight. With equal weights, protobuf precedes OpenMetrics, which precedes text.

    Protobuf is chosen only for clients that accept OpenMetrics too, such as Prometheus: other clients that accept protobuf,
    such as Telegraf, read classic histograms only. Repeated headers are joined by commas.
    """
    # In the order of preference: of equal weights, `max` returns the first.
    weights = {Format.PROTOBUF: 0.0, Format.OPENMETRICS: 0.0, Format.TEXT: 0.0}
    for element in _elements(accept):
        name, parameters = element.name, element.parameters
        version = parameters.get("version", "")
        # Prometheus requests the drafts of OpenMetrics 1.0 as version 0.0.1.
        if name == "application/openmetrics-text" and version in ("", "0.0.1", "1.0.0"):
            body_format = Format.OPENMETRICS
        elif name == "text/plain" and version in ("", "0.0.4"):
            body_format = Format.TEXT
        elif (name, parameters.get("proto"), parameters.get("encoding")) == _PROTOBUF:
            body_format = Format.PROTOBUF
        else:
            continue
        weights[body_format] = max(weights[body_format], element.weight)
    if not weights[Format.OPENMETRICS]:
        weights[Format.PROTOBUF] = 0.0
    best, weight = max(weights.items(), key=lambda item: item[1])
    return best if weight > 0.0 else Format.TEXT


@lru_cache(maxsize=_CACHED_HEADERS)
def accepts_gzip(accept_encoding: str | None) -> bool:
    """Return True if the client accepts gzip, by name or by `*`, and does not prefer `identity`, an unencoded body."""
    weights = {element.name: element.weight for element in _elements(accept_encoding)}
    gzip_weight = weights.get("gzip", weights.get("*", 0.0))
    return gzip_weight > 0.0 and gzip_weight >= weights.get("identity", 0.0)


def _elements(header: str | None) -> Iterator[AcceptedElement]:
    """Yield the elements of a header that have a valid weight."""
    for element in (header or "").lower().split(","):
        name, *parameters = element.split(";")
        pairs = (parameter.partition("=") for parameter in parameters)
        value_by_parameter = {key.strip(): value.strip(' "') for key, _, value in pairs}
        try:
            weight = float(value_by_parameter.get("q", "1"))
        except ValueError:
            continue
        if 0.0 <= weight <= 1.0:
            yield AcceptedElement(name.strip(), weight, value_by_parameter)
