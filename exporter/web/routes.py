"""From a request to its answer: who may ask, which paths there are, and what each of them says.

Used in the sidecar, on the web server's loop; what may take time runs on worker threads (`flights`). Every
answer is made before its deadline or is a 503. Health is answered on the loop, so that it stays alive
whatever the rest of the sidecar does. As in exporter-toolkit the rate limit and passwords stand before every
path, health included.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol
from urllib.parse import unquote_plus

from exporter.errors import ConfigurationError, Problem
from exporter.exposition.negotiation import Format, accepts_gzip, compress, negotiate
from exporter.web.counts import Counts
from exporter.web.flights import BusyError, Flights, LateError, Workers, result_by
from exporter.web.http import Answer, Request
from exporter.web.limits import Limits
from exporter.web.protection import Protection, Settings

HEALTHY, READY, RELOAD, CONFIG, LANDING = "/-/healthy", "/-/ready", "/-/reload", "/config", "/"

_READ = ("GET", "HEAD")
_HTML = "text/html; charset=utf-8"
_LATER = {"Retry-After": "1"}
_MOST_NAMES = 100
_MOST_NAME_CHARACTERS = 200

Handler = Callable[[Request, float], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Document:
    """A page for people.

    Attributes:
        body: HTML.
        policy: The Content-Security-Policy that it is sent with.
    """

    body: bytes
    policy: str


class Application(Protocol):
    """The sidecar behind the web server.

    All but `not_ready` are called on worker threads, several at a time, and may take their time: a slow one
    costs its own answers (503) and nothing else.
    """

    def metrics(self, form: Format, names: frozenset[str]) -> bytes:
        """The page, of the families of these names alone unless there are none."""
        ...

    def not_ready(self) -> str | None:
        """Why a scrape would be wrong now; None when it would be right.

        Called on the server's loop at every scrape: it must answer from memory.
        """
        ...

    def landing(self) -> Document:
        """The status page, which needs nothing from elsewhere."""
        ...

    def reload(self) -> None:
        """Read the configuration again and use it.

        Raises:
            ConfigurationError: It is wrong; the old one stays in use.
        """
        ...

    def configuration(self) -> str:
        """The configuration in effect, secrets hidden."""
        ...


@dataclass(frozen=True, slots=True)
class Route:
    """A path.

    Attributes:
        path: Exact.
        methods: What may be done with it.
        handler: Gives the answer, until a time of the loop's clock.
    """

    path: str
    methods: tuple[str, ...]
    handler: Handler


class Routes:
    """All answers of the server.

    Args:
        application: What they are made from.
        lacks: What the exporter is still without, though a scrape is right; asked for `/-/ready` on the loop.
        protection: The settings in force.
        counts: Where renders are counted.
        limits: How long an answer may take.
        telemetry_path: Where the metrics are; "/" has them in place of the status page.
        enable_lifecycle: Whether the reload path may be used.
        log: Where a failing page is noted, once until it works again.

    Raises:
        ConfigurationError: `telemetry_path` cannot be used.
    """

    def __init__(
        self,
        application: Application,
        *,
        lacks: Callable[[], str | None],
        protection: Protection,
        counts: Counts,
        limits: Limits,
        telemetry_path: str,
        enable_lifecycle: bool,
        log: logging.Logger,
    ) -> None:
        self._application = application
        self._lacks = lacks
        self._protection = protection
        self._counts = counts
        self._limits = limits
        self._lifecycle = enable_lifecycle
        self._telemetry_path = telemetry_path
        self._log = log
        self._failing: set[str] = set()
        # Two threads for the metrics alone: neither a hung status page nor a hung reload takes one away.
        self._renderers = Workers("exporter-render", 2)
        self._clerks = Workers("exporter-pages", 2)
        self._selectors = Workers("exporter-select", 1, max_waiting=16)
        # A scraper always sends the same headers; one of 16 KiB at most, so the memory is bounded.
        self._negotiate = lru_cache(maxsize=64)(negotiate)
        self._accepts_gzip = lru_cache(maxsize=64)(accepts_gzip)
        self._scrapes = Flights(self._renderers, counts)
        self._pages = Flights(self._clerks, counts)
        self._selections = Flights(self._selectors, counts)
        routes = [
            Route(LANDING, _READ, self._landing),
            Route(HEALTHY, _READ, self._healthy),
            Route(READY, _READ, self._ready),
            Route(RELOAD, ("POST", "PUT"), self._reload),
            Route(CONFIG, _READ, self._configuration),
        ]
        _check_path(telemetry_path, [route.path for route in routes])
        routes.append(Route(telemetry_path, _READ, self._metrics))
        self._routes: Mapping[str, Route] = {route.path: route for route in routes}

    async def answer(self, request: Request, peer: str) -> Answer:
        """The answer to a request, whatever happens.

        Args:
            request: As read.
            peer: The client's address.
        """
        deadline = asyncio.get_running_loop().time() + self._budget(request)
        settings = await self._protection.current()
        route = self._routes.get(request.path)
        label = "other" if route is None else route.path
        refusal = await self._admit(settings, request, peer, deadline)
        if refusal is not None:
            answer = refusal
        elif route is None:
            answer = _text(404, f"nothing here; the metrics are at {self._telemetry_path}")
        elif request.method not in route.methods:
            allowed = ", ".join(route.methods)
            answer = _text(405, f"allowed here: {allowed}", {"Allow": allowed}, close=True)
        else:
            answer = await self._handle(route, request, deadline)
        if answer.route == label and not settings.headers:
            return answer
        headers = {**answer.headers, **settings.headers}
        return dataclasses.replace(answer, headers=headers, route=label)

    def stop(self) -> None:
        """Let the worker threads end."""
        self._renderers.stop()
        self._clerks.stop()
        self._selectors.stop()

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

    async def _admit(self, settings: Settings, request: Request, peer: str, deadline: float) -> Answer | None:
        """The refusal; None when the request may pass."""
        if settings.limiter is not None and not settings.limiter.allow():
            later = {"Retry-After": str(settings.limiter.retry_after_seconds)}
            return _text(429, "too many requests", later)
        if settings.passwords is None:
            return None
        try:
            verdict = settings.passwords.judge(request.header("authorization"), peer)
            passes = verdict if isinstance(verdict, bool) else await result_by(verdict, deadline)
        except BusyError:
            return _text(429, "too many passwords are being checked", _LATER)
        except LateError:
            return self._late("checking the password")
        except Exception as error:  # noqa: BLE001 - bcrypt's own; what it cannot check does not pass
            self._complain("passwords", error)
            passes = False
        if passes:
            return None
        return _text(401, "unauthorized", {"WWW-Authenticate": 'Basic realm="exporter", charset="UTF-8"'})

    async def _handle(self, route: Route, request: Request, deadline: float) -> Answer:
        try:
            answer = await route.handler(request, deadline)
        except LateError:
            return self._late("making this page")
        except BusyError:
            return _text(503, "too many pages are waiting to be made", _LATER)
        except Exception as error:  # noqa: BLE001 - the sidecar's parts; the server outlives their defects
            self._complain(route.path, error)
            return _text(500, "this page could not be made; the exporter's log says why")
        self._failing.discard(route.path)
        return answer

    def _complain(self, subject: str, error: Exception) -> None:
        if subject not in self._failing:
            self._failing.add(subject)
            self._log.error("%s could not be answered", subject, exc_info=error)

    def _late(self, what: str) -> Answer:
        self._counts.render_timeouts += 1
        return _text(503, f"{what} took too long", _LATER)

    async def _metrics(self, request: Request, deadline: float) -> Answer:
        reason = self._application.not_ready()
        if reason is not None:
            return _text(503, reason, _LATER)
        form = self._negotiate(request.header("accept"))
        packed = self._accepts_gzip(request.header("accept-encoding"))
        try:
            names = _names(request.query)
        except ValueError as error:
            return _text(400, str(error))
        # Who asks for a part takes no renderer from those who want the whole.
        flights = self._selections if names else self._scrapes
        work = partial(self._page, form, names, packed=packed)
        body, empty = await result_by(flights.join((form, names, packed), work), deadline)
        headers = {"Vary": "Accept, Accept-Encoding"}
        if packed:
            headers["Content-Encoding"] = "gzip"
        scrape, route = request.method == "GET" and not empty, self._telemetry_path
        return Answer(200, body, form.content_type, headers, route=route, scrape=scrape)

    def _page(self, form: Format, names: frozenset[str], *, packed: bool) -> tuple[bytes, bool]:
        """The body, and whether nothing was found under the names that were asked for."""
        body = self._application.metrics(form, names)
        empty = bool(names) and body in (b"", b"# EOF\n")
        return compress(body) if packed else body, empty

    async def _landing(self, request: Request, deadline: float) -> Answer:
        del request
        made = await result_by(self._pages.join(LANDING, self._application.landing), deadline)
        headers = {"Content-Security-Policy": made.policy, "Cache-Control": "no-store"}
        return Answer(200, made.body, _HTML, headers)

    async def _configuration(self, request: Request, deadline: float) -> Answer:
        del request
        text = await result_by(self._pages.join(CONFIG, self._application.configuration), deadline)
        return Answer(200, text.encode("utf-8", "replace"))

    async def _healthy(self, request: Request, deadline: float) -> Answer:
        del request, deadline
        return _text(200, "healthy")

    async def _ready(self, request: Request, deadline: float) -> Answer:
        del request, deadline
        reason = self._application.not_ready() or self._lacks()
        return _text(200, "ready") if reason is None else _text(503, reason, _LATER)

    async def _reload(self, request: Request, deadline: float) -> Answer:
        del request
        if not self._lifecycle:
            return _text(403, "reloading over HTTP is switched off; start with --web.enable-lifecycle")
        running = self._pages.under_way(RELOAD)
        if running is not None:
            # It may have read the file before the caller wrote it: the caller's turn comes after it.
            await asyncio.wait([running], timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
        try:
            await result_by(self._pages.join(RELOAD, self._application.reload), deadline)
        except ConfigurationError as error:
            return _text(500, f"the configuration was not reloaded, the old one is kept:\n{error}")
        return _text(200, "reloaded")


def _names(query: str) -> frozenset[str]:
    """The values of `name[]`, as client libraries take them.

    Raises:
        ValueError: There is something else, or too much; the message is for the client.
    """
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


def _check_path(path: str, taken: list[str]) -> None:
    """Refuse a telemetry path that could not be asked for.

    Raises:
        ConfigurationError: It is no path, or another page's.
    """
    if path.startswith("/") and path.isascii() and path.isprintable() and not set(path) & set("?#% "):
        if path == LANDING or path not in taken:
            return
        message = f"{path!r} is another page's path"
    else:
        message = f"{path!r} is no path; expected one like /metrics"
    raise ConfigurationError([Problem("--web.telemetry-path", None, None, message)])
