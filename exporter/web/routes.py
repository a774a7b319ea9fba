"""From a request to its answer: who may ask, which paths there are, and what each of them says.

What may take time runs on worker threads; every answer is made before its deadline or is a 503. Health is answered on
the loop. As in exporter-toolkit passwords stand before every path.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote_plus

from exporter.errors import ConfigurationError
from exporter.exposition.negotiation import Format, accepts_gzip, compress, negotiate
from exporter.web.http import Answer, Limits, Request
from exporter.web.protection import Passwords, Protection, WebConfigFile
from exporter.web.workers import BusyError, LateError, Workers

_log = logging.getLogger(__name__)

METRICS = "/metrics"
_READ = ("GET", "HEAD")
_HTML = "text/html; charset=utf-8"
_LATER = {"Retry-After": "1"}
_MOST_NAMES = 100
_MOST_NAME_CHARACTERS = 200

Handler = Callable[[Request, float], Awaitable[Answer]]
"""Gives the answer, until a time of the loop's clock."""


@dataclass(frozen=True, slots=True)
class Document:
    """A page for people: HTML, and the Content-Security-Policy that it is sent with."""

    body: bytes
    policy: str


class Application(Protocol):
    """The sidecar behind the web server; all but `not_ready` are called on worker threads, several at a time."""

    def metrics(self, form: Format, names: frozenset[str]) -> bytes:
        """The page, of the families of these names alone unless there are none."""

    def not_ready(self) -> str | None:
        """Why a scrape would be wrong now, None when it would be right; asked on the loop at every scrape."""

    def landing(self) -> Document:
        """The status page, which needs nothing from elsewhere."""

    def reload(self) -> None:
        """Read the configuration again and use it; raises ConfigurationError, and the old one stays."""

    def configuration(self) -> str:
        """The configuration in effect, secrets hidden."""


class Routes:
    """All answers of the server; `lacks` says what the exporter is still without, though a scrape is right."""

    def __init__(
        self,
        application: Application,
        config: WebConfigFile,
        limits: Limits,
        lacks: Callable[[], str | None],
        lifecycle: bool,
    ) -> None:
        self._application = application
        self._lacks = lacks
        self._config = config
        self._passwords = Passwords(limits)
        self._limits = limits
        self._lifecycle = lifecycle
        self._failing: set[str] = set()
        # Two threads for the metrics alone: neither a hung status page nor a hung reload takes one away.
        self._scrapes = Workers("exporter-render", 2)
        self._selections = Workers("exporter-select", max_waiting=16)
        self._pages = Workers("exporter-pages", 2)
        self._reloads = Workers("exporter-reload")
        self._routes: dict[str, tuple[tuple[str, ...], Handler]] = {
            "/": (_READ, self._landing),
            METRICS: (_READ, self._metrics),
            "/-/healthy": (_READ, self._healthy),
            "/-/ready": (_READ, self._ready),
            "/-/reload": (("POST", "PUT"), self._reload),
            "/config": (_READ, self._configuration),
        }

    async def answer(self, request: Request, peer: str) -> Answer:
        """The answer to a request of this address, whatever happens."""
        deadline = asyncio.get_running_loop().time() + self._budget(request)
        protection = await self._config.current()
        methods, handler = self._routes.get(request.path, (None, None))
        answer = await self._refusal(protection, request, peer, deadline)
        if answer is None:
            if methods is None or handler is None:
                answer = _text(404, f"nothing here; the metrics are at {METRICS}")
            elif request.method not in methods:
                allowed = ", ".join(methods)
                answer = _text(405, f"allowed here: {allowed}", {"Allow": allowed}, close=True)
            else:
                answer = await self._handle(handler, request, deadline)
        headers = {**answer.headers, **protection.config.http_server_config.headers.fields()}
        return dataclasses.replace(answer, headers=headers, route=request.path if methods else "other")

    def stop(self) -> None:
        """Let the worker threads end."""
        for each in (self._scrapes, self._selections, self._pages, self._reloads, self._passwords):
            each.stop()

    def _budget(self, request: Request) -> float:
        """How many seconds an answer may take: less than Prometheus waits, so that it learns the reason."""
        try:
            patience = float(request.header("x-prometheus-scrape-timeout-seconds") or "nan")
        except ValueError:
            patience = math.nan
        if not patience > 0:  # absent, no number, or nonsense
            return self._limits.render_seconds
        offset = min(self._limits.scrape_timeout_offset_seconds, patience / 2)
        return min(self._limits.render_seconds, patience - offset)

    async def _refusal(
        self, protection: Protection, request: Request, peer: str, deadline: float
    ) -> Answer | None:
        """What is said to somebody who may not ask; None when the request may pass."""
        users = protection.config.basic_auth_users
        if not users:
            return None
        try:
            if await self._passwords.admits(users, request.header("authorization"), peer, deadline):
                return None
        except BusyError:
            return _text(429, "too many passwords are being checked", _LATER)
        except LateError:
            return _text(503, "checking the password took too long", _LATER)
        except Exception as error:  # noqa: BLE001 - bcrypt's own; what it cannot check does not pass
            self._complain("passwords", error)
        return _text(401, "unauthorized", {"WWW-Authenticate": 'Basic realm="exporter", charset="UTF-8"'})

    async def _handle(self, handler: Handler, request: Request, deadline: float) -> Answer:
        try:
            answer = await handler(request, deadline)
        except LateError:
            return _text(503, "making this page took too long", _LATER)
        except BusyError:
            return _text(503, "too many pages are waiting to be made", _LATER)
        except Exception as error:  # noqa: BLE001 - the sidecar's parts; the server outlives their defects
            self._complain(request.path, error)
            return _text(500, "this page could not be made; the exporter's log says why")
        self._failing.discard(request.path)
        return answer

    def _complain(self, subject: str, error: Exception) -> None:
        if subject not in self._failing:
            self._failing.add(subject)
            _log.error("%s could not be answered", subject, exc_info=error)

    async def _metrics(self, request: Request, deadline: float) -> Answer:
        reason = self._application.not_ready()
        if reason is not None:
            return _text(503, reason, _LATER)
        form = negotiate(request.header("accept"))
        packed = accepts_gzip(request.header("accept-encoding"))
        try:
            names = _names(request.query)
        except ValueError as error:
            return _text(400, str(error))

        def page() -> tuple[bytes, bool]:
            body = self._application.metrics(form, names)
            found = not names or body not in (b"", b"# EOF\n")
            return compress(body) if packed else body, found

        # Who asks for a part takes no renderer from those who want the whole.
        workers = self._selections if names else self._scrapes
        body, found = await workers.run((form, names, packed), page, deadline)
        headers = {"Vary": "Accept, Accept-Encoding", **({"Content-Encoding": "gzip"} if packed else {})}
        return Answer(200, body, form.value, headers, scrape=request.method == "GET" and found)

    async def _landing(self, request: Request, deadline: float) -> Answer:
        made = await self._pages.run("landing", self._application.landing, deadline)
        headers = {"Content-Security-Policy": made.policy, "Cache-Control": "no-store"}
        body = made.body
        if accepts_gzip(request.header("accept-encoding")):
            body, headers["Content-Encoding"] = compress(body), "gzip"
        return Answer(200, body, _HTML, headers)

    async def _configuration(self, _: Request, deadline: float) -> Answer:
        text = await self._pages.run("configuration", self._application.configuration, deadline)
        return Answer(200, text.encode("utf-8", "replace"))

    async def _healthy(self, _request: Request, _deadline: float) -> Answer:
        return _text(200, "healthy")

    async def _ready(self, _request: Request, _deadline: float) -> Answer:
        reason = self._application.not_ready() or self._lacks()
        return _text(200, "ready") if reason is None else _text(503, reason, _LATER)

    async def _reload(self, _: Request, deadline: float) -> Answer:
        if not self._lifecycle:
            return _text(403, "reloading over HTTP is switched off; start with --web.enable-lifecycle")
        try:
            # Not shared: one that runs may have read the file before this caller wrote it.
            await self._reloads.run(object(), self._application.reload, deadline)
        except ConfigurationError as error:
            return _text(500, f"the configuration was not reloaded, the old one is kept:\n{error}")
        return _text(200, "reloaded")


def _names(query: str) -> frozenset[str]:
    """The values of `name[]`, as client libraries take them; raises ValueError, for the client, where there is more."""
    names = []
    for field in query.split("&", _MOST_NAMES + 1) if query else ():
        key, _, value = field.partition("=")
        if unquote_plus(key) != "name[]":
            shown = unquote_plus(key)[:_MOST_NAME_CHARACTERS]
            raise ValueError(f"there is no parameter {shown!r}; name[]=FAMILY shows this family alone")
        names.append(unquote_plus(value))
    if len(names) > _MOST_NAMES or any(len(name) > _MOST_NAME_CHARACTERS for name in names):
        raise ValueError(f"at most {_MOST_NAMES} name[], of {_MOST_NAME_CHARACTERS} characters each")
    return frozenset(name for name in names if name)


def _text(
    status: int, message: str, headers: Mapping[str, str] | None = None, *, close: bool = False
) -> Answer:
    body = f"{message}\n".encode("utf-8", "replace")
    return Answer(status, body, headers=headers or {}, close=close)
