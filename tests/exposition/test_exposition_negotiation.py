"""What real scrapers ask for, and what hostile ones do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.exposition.negotiation import Format, accepts_gzip, negotiate

OM = "application/openmetrics-text"
PROMETHEUS_2_42 = f"{OM};version=1.0.0,{OM};version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
PROMETHEUS_3 = (
    f"{OM};version=1.0.0;escaping=allow-utf-8;q=0.6,{OM};version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROTOBUF = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
PROMETHEUS_3_NATIVE = PROTOBUF + ";q=0.7," + PROMETHEUS_3
PROMETHEUS_3_TEXT_ONLY = "text/plain;version=0.0.4;q=0.6,*/*;q=0.5"
VICTORIA_METRICS = "text/plain;version=0.0.4;q=1,*/*;q=0.1"
TELEGRAF = f"{PROTOBUF};q=0.7,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/webp,*/*;q=0.8"


def test_the_content_types_are_those_that_prometheus_3_insists_on() -> None:
    assert Format.TEXT.value == "text/plain; version=0.0.4; charset=utf-8"
    assert Format.OPENMETRICS.value == "application/openmetrics-text; version=1.0.0; charset=utf-8"


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (PROMETHEUS_2_42, Format.OPENMETRICS),
        (PROMETHEUS_3, Format.OPENMETRICS),
        (PROMETHEUS_3_NATIVE, Format.OPENMETRICS),
        (f'{OM}; version="1.0.0"; charset=utf-8', Format.OPENMETRICS),
        ("APPLICATION/OpenMetrics-Text;VERSION=1.0.0", Format.OPENMETRICS),
        (f"text/plain;q=0.2, {OM};q=0.3", Format.OPENMETRICS),
        (f"{OM};version=99.0.0;q=1.0,{OM};version=1.0.0;q=0.2,text/plain;q=0.1", Format.OPENMETRICS),
        (None, Format.TEXT),
        ("*/*", Format.TEXT),
        (BROWSER, Format.TEXT),
        (VICTORIA_METRICS, Format.TEXT),
        (PROMETHEUS_3_TEXT_ONLY, Format.TEXT),
        (TELEGRAF, Format.TEXT),
        (f"{OM};q=0.2,text/plain;version=0.0.4;q=0.8", Format.TEXT),
        (f"{OM};q=0,*/*", Format.TEXT),
        (f"{OM};version=2.0.0", Format.TEXT),
        (f"{OM};version=1.0.0;q=abc", Format.TEXT),
        (f"{OM};version=1.0.0;q=nan", Format.TEXT),
        (";;,,;q=1;=,", Format.TEXT),
    ],
)
def test_who_prefers_openmetrics_gets_it_and_everyone_else_plain_text(
    accept: str | None, expected: Format
) -> None:
    assert negotiate(accept) is expected


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [
        *((each, True) for each in ("gzip", "GZIP", "deflate, gzip;q=0.5", "*", "br, *;q=0.1")),
        *((each, False) for each in (None, "", "identity", "br", "gzip;q=0", "*;q=0", "gzip;q=nan")),
        ("identity, gzip;q=0.5", False),
    ],
)
def test_gzip_is_used_when_it_is_accepted_and_not_less_wanted(accepted: str | None, expected: bool) -> None:
    assert accepts_gzip(accepted) is expected


_PIECES = st.sampled_from(
    [*'",;=\\/* \t', OM, "text/plain", "gzip", "version", "q", "1.0.0", "0.5", "é", "\0"]
)


@settings(deadline=None)
@given(header=st.lists(_PIECES | st.text(max_size=3)).map("".join))
def test_no_header_raises(header: str) -> None:
    assert negotiate(header) in Format
    assert accepts_gzip(header) in (True, False)
