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
    assert Format.TEXT.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert Format.OPENMETRICS.content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"


@pytest.mark.parametrize(
    "accept",
    [
        PROMETHEUS_2_42,
        PROMETHEUS_3,
        PROMETHEUS_3_NATIVE,
        OM,
        f"{OM};version=0.0.1",
        f'{OM}; version="1.0.0"; charset=utf-8',
        "APPLICATION/OpenMetrics-Text;VERSION=1.0.0",
        f"text/plain;q=0.2, {OM};q=0.3",
        f"text/plain, {OM}",
        f"{OM};version=99.0.0;q=1.0,{OM};version=1.0.0;q=0.2,text/plain;q=0.1",
        f"*/*,{OM};q=1",
        f"text/html,{OM};q=0.4",
    ],
)
def test_who_prefers_openmetrics_gets_it(accept: str) -> None:
    assert negotiate(accept) is Format.OPENMETRICS


@pytest.mark.parametrize(
    "accept",
    [
        None,
        "",
        "*/*",
        BROWSER,
        VICTORIA_METRICS,
        PROMETHEUS_3_TEXT_ONLY,
        TELEGRAF,
        "text/plain",
        "application/json",
        f"{OM};q=0.2,text/plain;version=0.0.4;q=0.8",
        f"{OM};q=0,*/*",
        f"{OM};q=0",
        f"{OM};version=2.0.0",
        f"{OM};version=abc",
        f"{OM};version=1.0.0;q=abc",
        f"{OM};version=1.0.0;q=nan",
        f"{OM};version=1.0.0;q=1.1",
        ";;,,;q=1;=,",
    ],
)
def test_everyone_else_gets_plain_text(accept: str | None) -> None:
    assert negotiate(accept) is Format.TEXT


@pytest.mark.parametrize(
    "accepted", ["gzip", "GZIP", "deflate, gzip;q=0.5", "*", "br, *;q=0.1", "gzip;q=1.000"]
)
def test_gzip_is_used_when_it_is_accepted(accepted: str) -> None:
    assert accepts_gzip(accepted)


@pytest.mark.parametrize(
    "accepted",
    [
        None,
        "",
        "identity",
        "br, deflate",
        "gzip;q=0",
        "*;q=0",
        "identity, gzip;q=0.5",
        "gzip;q=nan",
    ],
)
def test_gzip_is_not_used_when_it_is_refused_or_less_wanted(accepted: str | None) -> None:
    assert not accepts_gzip(accepted)


_PIECES = st.sampled_from(
    [*'",;=\\/* \t', OM, "text/plain", "gzip", "version", "q", "1.0.0", "0.5", "é", "\0"]
)


@settings(deadline=None)
@given(header=st.lists(_PIECES | st.text(max_size=3)).map("".join))
def test_no_header_raises(header: str) -> None:
    assert negotiate(header) in Format
    assert accepts_gzip(header) in (True, False)
