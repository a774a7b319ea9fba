"""One gzip member of fragments that were compressed apart."""

from __future__ import annotations

import gzip
import http.server
import shutil
import subprocess
import threading
import zlib
from collections.abc import Iterator

import pytest
from exposition_support import page_of, read, runaway
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.exposition.compression import deflate, join
from exporter.exposition.negotiation import Format

_TEXT = st.binary(max_size=200) | st.integers(0, 40_000).map(lambda size: b"name{a=1} 2.0\n" * (size // 14))


@settings(deadline=None)
@given(parts=st.lists(_TEXT, max_size=5))
def test_joined_fragments_are_one_member_that_holds_the_joined_text(parts: list[bytes]) -> None:
    body = join([deflate(part) for part in parts])

    reader = zlib.decompressobj(wbits=31)
    assert reader.decompress(body) == b"".join(parts)
    assert reader.eof
    assert not reader.unused_data
    assert gzip.decompress(body) == b"".join(parts)


def test_a_fragment_may_be_joined_again_and_in_another_order() -> None:
    first, second = deflate(b"a" * 1000), deflate(b"b" * 1000)

    assert gzip.decompress(join([second, first, second])) == b"b" * 1000 + b"a" * 1000 + b"b" * 1000


@pytest.mark.parametrize("form", list(Format))
def test_a_compressed_body_is_the_plain_body(form: Format) -> None:
    page = page_of(runaway("a", range(500)))
    page.publish("other", [runaway("b", range(300))])
    page.watch("self", page.families)

    page.render(form, compress=False)  # from here on the self-metrics stay as they are
    plain, compressed = page.render(form, compress=False), page.render(form, compress=True)

    assert gzip.decompress(compressed) == plain
    assert len(compressed) < len(plain) / 3
    assert len(read(plain, form)) >= 800


def test_a_page_without_blocks_is_an_empty_body() -> None:
    page = page_of()

    assert page.render(Format.TEXT, compress=False) == b""
    assert gzip.decompress(page.render(Format.TEXT, compress=True)) == b""
    assert gzip.decompress(page.render(Format.OPENMETRICS, compress=True)) == b"# EOF\n"


BODY = page_of(runaway("a", range(2000)), runaway("b", range(20)))


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = BODY.render(Format.TEXT, compress=True)
        self.send_response(200)
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()
        thread.join()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_reads_a_compressed_body(url: str) -> None:
    command = ["curl", "-sS", "--fail", "--noproxy", "*", "--compressed", url]

    answer = subprocess.run(command, capture_output=True, check=True)

    assert answer.stdout == BODY.render(Format.TEXT, compress=False)


@pytest.mark.skipif(shutil.which("gzip") is None, reason="gzip is not installed")
def test_gzip_itself_reads_a_compressed_body() -> None:
    body = BODY.render(Format.OPENMETRICS, compress=True)

    answer = subprocess.run(["gzip", "-dc"], input=body, capture_output=True, check=True)

    assert answer.stdout == BODY.render(Format.OPENMETRICS, compress=False)
    assert answer.stderr == b""
