"""Endpoints of the web server: metrics, documents, health, readiness and reload.

Rendering runs on worker threads; health and readiness are answered on the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import unquote_plus

from exporter.errors import ConfigurationError
from exporter.exposition.negotiation import Format, accepts_gzip, compress, negotiate
from exporter.web.http import READ_METHODS, TEXT, Request, Response, text_response
from exporter.web.workers import Workers

METRICS = "/metrics"
RETRY_SOON = {"Retry-After": "1"}
_MOST_NAMES = 100
_MOST_NAME_CHARACTERS = 200

Readiness = Callable[[], str | None]
"""Returns why the exporter is not ready; None if the exporter is ready. Called on the loop."""


class Endpoint(Protocol):
    """Path and handler."""

    @property
    def path(self) -> str:
        """The path, without a query."""

    @property
    def methods(self) -> tuple[str, ...]:
        """The allowed methods."""

    async def respond(self, request: Request, deadline: float) -> Response:
        """Return the response before a time of the loop's clock; LateError and BusyError become 503, all other exceptions 500."""

    def stop(self) -> None:
        """Let the endpoint's worker threads end."""


@dataclass(frozen=True, slots=True)
class Content:
    """Body and headers of a document."""

    body: bytes
    content_type: str = TEXT
    headers: Mapping[str, str] = field(default_factory=dict)


class DocumentEndpoint:
    """Document rendered on a worker thread for each request, such as the status page."""

    methods = READ_METHODS

    def __init__(self, path: str, make: Callable[[], Content]) -> None:
        self.path = path
        self._make = make
        self._workers = Workers("exporter-document", 2)

    async def respond(self, request: Request, deadline: float) -> Response:
        """Return the document, compressed if the client accepts that."""
        content = await self._workers.run(self.path, self._make, deadline)
        body, headers = content.body, dict(content.headers)
        if accepts_gzip(request.header("accept-encoding")):
            body, headers["Content-Encoding"] = compress(body), "gzip"
        return Response(200, body, content.content_type, headers)

    def stop(self) -> None:
        """Let the worker threads end."""
        self._workers.stop()


class MetricsEndpoint:
    """`/metrics`: `render` runs on a worker thread, for the families of `name[]` or for all."""

    methods = READ_METHODS

    def __init__(
        self, render: Callable[[Format, frozenset[str]], bytes], not_ready: Readiness = lambda: None
    ) -> None:
        self.path = METRICS
        self._render = render
        self._not_ready = not_ready
        # A hung render leaves a second thread; selections of families have a thread of their own.
        self._scrapes = Workers("exporter-render", 2)
        self._selections = Workers("exporter-select", max_waiting=16)

    async def respond(self, request: Request, deadline: float) -> Response:
        """Return the page in the negotiated format; 503 until the page is complete."""
        reason = self._not_ready()
        if reason is not None:
            return text_response(503, reason, RETRY_SOON)
        form = negotiate(request.header("accept"))
        packed = accepts_gzip(request.header("accept-encoding"))
        try:
            names = _names(request.query)
        except ValueError as error:
            return text_response(400, str(error))

        def make_page() -> tuple[bytes, bool]:
            body = self._render(form, names)
            found = not names or body not in (b"", b"# EOF\n")
            return compress(body) if packed else body, found

        workers = self._selections if names else self._scrapes
        body, found = await workers.run((form, names, packed), make_page, deadline)
        headers = {"Vary": "Accept, Accept-Encoding"}
        if packed:
            headers["Content-Encoding"] = "gzip"
        return Response(200, body, form.value, headers, scrape=request.method == "GET" and found)

    def stop(self) -> None:
        """Let the worker threads end."""
        self._scrapes.stop()
        self._selections.stop()


class HealthEndpoint:
    """`/-/healthy`: 200 as long as the server's loop runs."""

    path = "/-/healthy"
    methods = READ_METHODS

    async def respond(self, _request: Request, _deadline: float) -> Response:
        """Return 200."""
        return text_response(200, "healthy")

    def stop(self) -> None:
        """Do nothing: the endpoint has no threads."""


class ReadinessEndpoint:
    """`/-/ready`: 200, or 503 with the first reason that is not None."""

    path = "/-/ready"
    methods = READ_METHODS

    def __init__(self, *reasons: Readiness) -> None:
        self._reasons = reasons

    async def respond(self, _request: Request, _deadline: float) -> Response:
        """Return 200 or 503."""
        reason = next((text for each in self._reasons if (text := each()) is not None), None)
        return text_response(200, "ready") if reason is None else text_response(503, reason, RETRY_SOON)

    def stop(self) -> None:
        """Do nothing: the endpoint has no threads."""


class ReloadEndpoint:
    """`/-/reload`: `reload` applies the new configuration, or raises ConfigurationError without a change."""

    path = "/-/reload"
    methods = ("POST", "PUT")

    def __init__(self, reload: Callable[[], None], *, enabled: bool) -> None:
        self._reload = reload
        self._enabled = enabled
        self._workers = Workers("exporter-reload")

    async def respond(self, _: Request, deadline: float) -> Response:
        """Return 200 after a reload, 500 with the problems, or 403 if the endpoint is disabled."""
        if not self._enabled:
            return text_response(403, "reload over HTTP is disabled; start with --web.enable-lifecycle")
        try:
            # Not shared: a running reload may have read the file before this client wrote it.
            await self._workers.run(object(), self._reload, deadline)
        except ConfigurationError as error:
            return text_response(
                500, f"configuration not reloaded; the previous one stays in force:\n{error}"
            )
        return text_response(200, "reloaded")

    def stop(self) -> None:
        """Let the worker thread end."""
        self._workers.stop()


def _names(query: str) -> frozenset[str]:
    """Return the values of `name[]`, the parameter of the client libraries; raises ValueError for other parameters."""
    names = []
    for parameter in query.split("&", _MOST_NAMES + 1) if query else ():
        key, _, value = parameter.partition("=")
        if unquote_plus(key) != "name[]":
            shown = unquote_plus(key)[:_MOST_NAME_CHARACTERS]
            raise ValueError(f"unknown parameter {shown!r}; name[]=FAMILY selects a family")
        names.append(unquote_plus(value))
    if len(names) > _MOST_NAMES or any(len(name) > _MOST_NAME_CHARACTERS for name in names):
        raise ValueError(f"at most {_MOST_NAMES} name[], of {_MOST_NAME_CHARACTERS} characters each")
    return frozenset(name for name in names if name)
