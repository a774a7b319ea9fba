"""Servers in this process and in a child process, requests, crowds of clients and certificates, for the tests of the web server."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import trustme
from places import PROJECT, TESTS
from typing_extensions import Self
from waiting import WAIT_LIMIT_SECONDS

from exporter.web.endpoints import Endpoint, HealthEndpoint, MetricsEndpoint
from exporter.web.server import Server


@contextlib.contextmanager
def serving(*endpoints: Endpoint, **options: Any) -> Iterator[Server]:
    """Run a server in this process, by default on a free port of 127.0.0.1, until the end of the `with` block.

    Without *endpoints*, the server serves `/metrics` (one sample) and `/-/healthy`. *options* are arguments of `Server`.
    """
    all_endpoints = endpoints or (MetricsEndpoint(lambda _format, _names: b"up 1\n"), HealthEndpoint())
    server = Server(all_endpoints, **{"listen": ["127.0.0.1:0"], **options})
    server.start()
    try:
        yield server
    finally:
        server.stop()


def port_of(server: Server | ServerProcess) -> int:
    return int(server.urls[0].rpartition(":")[2])


class ServerProcess:
    """Web server in a child process, whose `/metrics` has synthetic series. *options* are options of `web_child.py`."""

    def __init__(self, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(TESTS / "web_child.py"), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=PROJECT,
            # All threads share one arena of malloc, as in the sidecar.
            env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        )
        self.urls: list[str] = self._read()["urls"]
        self.port = port_of(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def pid(self) -> int:
        return self._process.pid

    def measure(self) -> dict[str, Any]:
        """Return the samples that the server exports about itself, and the resources of the server process."""
        return self.send_command("measure")

    def send_command(self, line: str) -> dict[str, Any]:
        """Send a command of `web_child.py`, and return samples and resources as `measure` does, taken after the command."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._read()

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self) -> tuple[int, str]:
        """Wait for the process to exit and return its exit status and log."""
        _, log = self._process.communicate(timeout=WAIT_LIMIT_SECONDS)
        return self._process.returncode, log

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(self._process.communicate()[1])
        response: dict[str, Any] = json.loads(line)
        return response


@dataclass
class Response:
    """HTTP response with the duration of the request."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float


def send_request(
    port: int,
    path: str = "/metrics",
    *,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    tls_context: ssl.SSLContext | None = None,
    timeout: float = WAIT_LIMIT_SECONDS,
) -> Response:
    """Send a request to 127.0.0.1 on a new connection and return the response. With *tls_context*, the connection uses TLS."""
    start = time.monotonic()
    client: http.client.HTTPConnection
    if tls_context is None:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    else:
        client = http.client.HTTPSConnection("127.0.0.1", port, timeout=timeout, context=tls_context)
    with contextlib.closing(client):
        client.request(method, path, headers=headers or {})
        client_response = client.getresponse()
        body = client_response.read()
        response_headers = {name.lower(): value for name, value in client_response.getheaders()}
        return Response(client_response.status, response_headers, body, time.monotonic() - start)


def scrape_repeatedly(port: int, count: int = 3, tls_context: ssl.SSLContext | None = None) -> list[Response]:
    """Scrape *count* times and return the responses. Each scrape must succeed."""
    responses = [send_request(port, tls_context=tls_context) for _ in range(count)]
    assert [response.status for response in responses] == [200] * count
    return responses


def exchange(port: int, payload: bytes, *, timeout: float = WAIT_LIMIT_SECONDS) -> bytes:
    """Send bytes on a new connection and return all bytes that the server sends until it closes or resets the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
        # The server may answer and close the connection before it has read the payload.
        with contextlib.suppress(OSError):
            connection.sendall(payload)
        return read_to_end(connection)


def read_to_end(connection: socket.socket) -> bytes:
    """Return all bytes that a connection receives until the peer closes or resets it."""
    received_bytes = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            received_bytes += chunk
    return received_bytes


def read_response(connection: socket.socket) -> tuple[int, bytes]:
    """Return status and body of the next response on a connection."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, response.read()


class ClientCrowd:
    """Many connections to 127.0.0.1, on each of which the constructor tries to send *request*.

    A connection that fails stays in `connections`. As a context manager, the crowd closes its connections on exit.
    """

    def __init__(
        self,
        port: int,
        count: int,
        request: bytes = b"",
        *,
        receive_buffer_bytes: int = 0,
        tls_context: ssl.SSLContext | None = None,
    ) -> None:
        # A crowd has up to 1,000 connections, and the usual soft limit is 1,024 descriptors. The limit is raised for the whole
        # test process, and stays raised. If the hard limit is below 4,096, the soft limit stays as it is.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard == resource.RLIM_INFINITY or hard >= 4096:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
        self.connections: list[socket.socket] = []
        for _ in range(count):
            connection = socket.socket()
            if receive_buffer_bytes:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
            connection.settimeout(WAIT_LIMIT_SECONDS)
            # While a test attacks the server, the server may close any connection.
            with contextlib.suppress(OSError):
                connection.connect(("127.0.0.1", port))
                if tls_context is not None:
                    connection = tls_context.wrap_socket(connection, server_hostname="127.0.0.1")
                connection.sendall(request)
            self.connections.append(connection)

    def trickle(self, payload: bytes, interval_seconds: float) -> None:
        """Send a byte of *payload* on each connection per interval."""
        for index in range(len(payload)):
            for connection in self.connections:
                with contextlib.suppress(OSError):
                    connection.send(payload[index : index + 1])
            time.sleep(interval_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self.connections:
            connection.close()


class CertificateAuthority:
    """Certificate authority that writes the certificates of the server to a directory and returns TLS contexts for clients."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ca = trustme.CA()
        self.ca.cert_pem.write_to_path(str(directory / "ca.pem"))
        self.issue_server_certificate()

    def issue_server_certificate(self, name: str = "127.0.0.1") -> bytes:
        """Replace the certificate and key of the server, valid for *name* and localhost, and return the certificate in DER form."""
        certificate = self.ca.issue_cert(name, "localhost")
        certificate.private_key_pem.write_to_path(str(self.directory / "key.pem"))
        certificate.cert_chain_pems[0].write_to_path(str(self.directory / "cert.pem"))
        return ssl.PEM_cert_to_DER_cert(certificate.cert_chain_pems[0].bytes().decode())

    def write_web_config(self, extra_yaml: str = "") -> Path:
        """Write a web.config.yml that names the certificate and key of the server, with *extra_yaml*, and return its path."""
        path = self.directory / "web.config.yml"
        path.write_text("tls_server_config:\n  cert_file: cert.pem\n  key_file: key.pem\n" + extra_yaml)
        return path

    def client_context(self, *names: str) -> ssl.SSLContext:
        """Return the TLS context of a client. With *names*, the client has a certificate for these names."""
        context = ssl.create_default_context(cafile=str(self.directory / "ca.pem"))
        if names:
            self.ca.issue_cert(*names).configure_cert(context)
        return context
