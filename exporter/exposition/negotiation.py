"""Which format, and whether compressed: what a scrape's Accept and Accept-Encoding headers ask for; and compressing.

Used in the sidecar, at every scrape. Pure functions of header text that anyone on the network can choose,
so nothing here raises: what cannot be understood is passed over, and what remains decides. When nothing
remains the answer is the plain text format, which every scraper and every person can read.
"""

from __future__ import annotations

import enum
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

OPENMETRICS_VERSIONS = frozenset({"", "0.0.1", "1.0.0"})
"""Versions of an `application/openmetrics-text` range that 1.0.0 satisfies; 0.0.1 is what Prometheus calls
the drafts of 1.0, and no version is any version. 2.0 and the unknown are not offered."""

TEXT_VERSIONS = frozenset({"", "0.0.4"})
"""Versions of a `text/plain` range that 0.0.4 satisfies; 1.0.0 (quoted UTF-8 names) is not offered."""

# Commas and semicolons inside a quoted string separate nothing; one that is never closed ends with the header.
# Nothing in these patterns can fail once begun, so that no header makes them search twice.
_ELEMENT = re.compile(r'(?:[^",]|"(?:[^"\\]|\\.?)*"?)+', re.DOTALL)
_PARAMETER = re.compile(r'(?:[^";]|"(?:[^"\\]|\\.?)*"?)+', re.DOTALL)
_WEIGHT = re.compile(r"0(\.[0-9]*)?|1(\.0*)?")


class Format(enum.Enum):
    """An exposition format, by the exact content type that Prometheus 3 insists on."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

    @property
    def content_type(self) -> str:
        """The value of the Content-Type header."""
        return self.value


@dataclass(frozen=True, slots=True)
class _Range:
    """One element of an Accept or Accept-Encoding header, in lower case; `weight` is its q."""

    name: str
    weight: float
    parameters: Mapping[str, str]


def negotiate(accept: str | None) -> Format:
    """Choose the format of an answer.

    The range that names a format most closely gives its weight, and the heavier format wins. At equal
    weights OpenMetrics wins where it is named, and plain text where only a wildcard covers both.

    Args:
        accept: The Accept header; None when there is none. Several headers are joined by commas.
    """
    ranges = _ranges(accept)
    openmetrics, named = _weigh(ranges, "application", "openmetrics-text", OPENMETRICS_VERSIONS)
    text, _ = _weigh(ranges, "text", "plain", TEXT_VERSIONS)
    wins = openmetrics > 0.0 and (openmetrics > text or (named and openmetrics == text))
    return Format.OPENMETRICS if wins else Format.TEXT


def accepts_gzip(accept_encoding: str | None) -> bool:
    """Say whether an answer may be gzip: asked for, by name or by `*`, and not less than no encoding.

    Args:
        accept_encoding: The Accept-Encoding header; None when there is none, which asks for no encoding.
    """
    weights: dict[str, float] = {}
    for each in _ranges(accept_encoding):
        weights.setdefault(each.name, each.weight)
    gzip = weights.get("gzip", weights.get("x-gzip", weights.get("*", 0.0)))
    return gzip > 0.0 and gzip >= weights.get("identity", 0.0)


def compress(body: bytes) -> bytes:
    """Make one gzip member, fast: level 9 takes twenty times as long for two thirds of the bytes."""
    compressor = zlib.compressobj(1, zlib.DEFLATED, wbits=zlib.MAX_WBITS | 16)
    return compressor.compress(body) + compressor.flush()


def _weigh(ranges: list[_Range], kind: str, subtype: str, versions: frozenset[str]) -> tuple[float, bool]:
    """The weight of a media type, and whether a range names it in full; 0.0 when no range covers it."""
    closeness = {f"{kind}/{subtype}": 3, f"{kind}/*": 2, "*/*": 1}
    best, weight = 0, 0.0
    for each in ranges:
        close = closeness.get(each.name, 0)
        if not close or (close == 3 and each.parameters.get("version", "") not in versions):
            continue
        if close > best or (close == best and each.weight > weight):
            best, weight = close, each.weight
    return weight, best == 3


def _ranges(header: str | None) -> list[_Range]:
    """The elements of a header; those whose weight is malformed are left out."""
    found = []
    for element in _ELEMENT.findall(header or ""):
        name, *rest = _PARAMETER.findall(element) or [""]
        parameters: dict[str, str] = {}
        for parameter in rest:
            key, _, value = parameter.partition("=")
            parameters.setdefault(key.strip().lower(), value.strip().strip('"').lower())
        weight = parameters.get("q", "1")
        if _WEIGHT.fullmatch(weight):
            found.append(_Range(name.strip().lower(), float(weight), parameters))
    return found
