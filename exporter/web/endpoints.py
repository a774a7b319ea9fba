"""Endpoints of the web server: metrics, documents, health, readiness and reload.

Worker threads render pages; the event loop responds to health and readiness checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol
from urllib.parse import unquote_plus

from exporter.errors import ConfigurationError
from exporter.exposition.compression import compress
from exporter.exposition.negotiation import Format, accepts_gzip, negotiate
from exporter.web.http import PLAIN_TEXT, READ_METHODS, Request, Response, text_response
from exporter.web.workers import Workers

METRICS = "/metrics"
RETRY_SOON = {"Retry-After": "1"}
"""Header fields that request a retry after a second."""
_MAX_NAME_PARAMETERS = 100
"""Maximum number of `name[]` parameters of a request."""
_MAX_FAMILY_NAME_CHARACTERS = 200
"""Maximum length of the value of `name[]`."""

Readiness = Callable[[], str | None]
"""Function that returns the reason why the exporter is not ready, or None. Called on the event loop."""


class Endpoint(Protocol):
    """Path with its allowed methods and its handler."""

    @property
    def path(self) -> str:
        """Path without a query."""

    @property
    def methods(self) -> tuple[str, ...]:
        """Allowed methods."""

    async def respond(self, request: Request, deadline: float) -> Response:
        """Return the response. `deadline` is a time of the event loop's clock.

        The router responds to LateError and BusyError with 503, and to all other exceptions with 500.
        """

    def stop(self) -> None:
        """End the worker threads after their current work."""


@dataclass(frozen=True, slots=True)
class Content:
    """Body and headers of a document."""

    body: bytes
    content_type: str = PLAIN_TEXT
    headers: Mapping[str, str] = field(default_factory=dict)


class DocumentEndpoint:
    """Document rendered on a worker thread for each request, such as the status page."""

    methods = READ_METHODS

    def __init__(self, path: str, render: Callable[[], Content]) -> None:
        self.path = path
        self._render = render
        self._workers = Workers("exporter-document", 2)

    async def respond(self, request: Request, deadline: float) -> Response:
        """Return the document, compressed if the client accepts gzip."""
        use_gzip = accepts_gzip(request.header("accept-encoding"))

        def render_document() -> Content:
            content = self._render()
            return replace(content, body=compress(content.body)) if use_gzip else content

        content = await self._workers.run((self.path, use_gzip), render_document, deadline)
        headers = dict(content.headers)
        if use_gzip:
            headers["Content-Encoding"] = "gzip"
        return Response(200, content.body, content.content_type, headers)

    def stop(self) -> None:
        """End the worker threads after their current work."""
        self._workers.stop()


class MetricsEndpoint:
    """`/metrics`: renders all families, or the families of the `name[]` parameters, on a worker thread.

    Args:
        render: Function that returns the families with these names, or all families without names.
        not_ready: Function that returns the reason for status 503, or None.
        render_gzip: Function that returns all families, compressed with gzip. By default, the result of `render` is compressed.
    """

    methods = READ_METHODS

    def __init__(
        self,
        render: Callable[[Format, frozenset[str]], bytes],
        not_ready: Readiness = lambda: None,
        *,
        render_gzip: Callable[[Format], bytes] | None = None,
    ) -> None:
        self.path = METRICS
        self._render = render
        self._render_gzip = render_gzip or (lambda body_format: compress(render(body_format, frozenset())))
        self._not_ready = not_ready
        # A second thread serves scrapes while the first hangs; selections of families have a separate thread.
        self._scrapes = Workers("exporter-render", 2)
        self._selections = Workers("exporter-select", max_waiting=16)

    async def respond(self, request: Request, deadline: float) -> Response:
        """Return the page in the negotiated format, 503 while the exporter is not ready, or 400 for an invalid query."""
        reason = self._not_ready()
        if reason is not None:
            return text_response(503, reason, RETRY_SOON)
        body_format = negotiate(request.header("accept"))
        use_gzip = accepts_gzip(request.header("accept-encoding"))
        try:
            names = _family_names(request.query)
        except ValueError as error:
            return text_response(400, str(error))

        def render_page() -> tuple[bytes, bool]:
            if use_gzip and not names:
                return self._render_gzip(body_format), True
            body = self._render(body_format, names)
            has_families = not names or body not in (b"", b"# EOF\n")
            return compress(body) if use_gzip else body, has_families

        workers = self._selections if names else self._scrapes
        body, has_families = await workers.run((body_format, names, use_gzip), render_page, deadline)
        headers = {"Vary": "Accept, Accept-Encoding"}
        if use_gzip:
            headers["Content-Encoding"] = "gzip"
        return Response(
            200, body, body_format.value, headers, is_scrape=request.method == "GET" and has_families
        )

    def stop(self) -> None:
        """End the worker threads after their current work."""
        self._scrapes.stop()
        self._selections.stop()


class HealthEndpoint:
    """`/-/healthy`: 200 while the server's event loop runs."""

    path = "/-/healthy"
    methods = READ_METHODS

    async def respond(self, _request: Request, _deadline: float) -> Response:
        """Return 200. The response itself shows that the event loop runs."""
        return text_response(200, "healthy")

    def stop(self) -> None:
        """Do nothing: the endpoint has no threads."""


class ReadinessEndpoint:
    """`/-/ready`: 200, or 503 with the first reason why the exporter is not ready."""

    path = "/-/ready"
    methods = READ_METHODS

    def __init__(self, *reasons: Readiness) -> None:
        self._reasons = reasons

    async def respond(self, _request: Request, _deadline: float) -> Response:
        """Return 200 if there is no reason against readiness, otherwise 503."""
        reason = next((text for get_reason in self._reasons if (text := get_reason()) is not None), None)
        return text_response(200, "ready") if reason is None else text_response(503, reason, RETRY_SOON)

    def stop(self) -> None:
        """Do nothing: the endpoint has no threads."""


class ReloadEndpoint:
    """`/-/reload`: applies a changed configuration. `reload` raises ConfigurationError for an invalid configuration."""

    path = "/-/reload"
    methods = ("POST", "PUT")

    def __init__(self, reload: Callable[[], None], *, enabled: bool) -> None:
        self._reload = reload
        self._is_enabled = enabled
        self._workers = Workers("exporter-reload")

    async def respond(self, _: Request, deadline: float) -> Response:
        """Return 200 after a reload, 500 with the problems, or 403 if the endpoint is disabled."""
        if not self._is_enabled:
            return text_response(403, "reload over HTTP is disabled; start with --web.enable-lifecycle")
        try:
            # A unique key: a running reload may have read the file before this client wrote it.
            await self._workers.run(object(), self._reload, deadline)
        except ConfigurationError as error:
            return text_response(
                500, f"configuration not reloaded; the previous one stays in force:\n{error}"
            )
        return text_response(200, "reloaded")

    def stop(self) -> None:
        """End the worker thread after its current work."""
        self._workers.stop()


def _family_names(query: str) -> frozenset[str]:
    """Return the values of `name[]`, the parameter of the client libraries. Raises ValueError for other parameters."""
    names = []
    parameters = [parameter for parameter in query.split("&") if parameter]  # as in `name[]=x&`
    for parameter in parameters[: _MAX_NAME_PARAMETERS + 1]:
        key, _, value = parameter.partition("=")
        if unquote_plus(key) != "name[]":
            parameter_name = unquote_plus(key)[:_MAX_FAMILY_NAME_CHARACTERS]
            raise ValueError(f"unknown parameter {parameter_name!r}; name[]=FAMILY selects a family")
        names.append(unquote_plus(value))
    if len(names) > _MAX_NAME_PARAMETERS or any(len(name) > _MAX_FAMILY_NAME_CHARACTERS for name in names):
        raise ValueError(
            f"at most {_MAX_NAME_PARAMETERS} name[] parameters of at most {_MAX_FAMILY_NAME_CHARACTERS} characters are allowed"
        )
    return frozenset(name for name in names if name)
