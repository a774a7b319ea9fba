"""Router: authentication, the table of endpoints, and the deadline of each response.

As in exporter-toolkit, passwords protect every path.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Sequence

from exporter.web.endpoints import METRICS, RETRY_SOON, Endpoint
from exporter.web.http import Limits, Request, Response, text_response
from exporter.web.passwords import Passwords
from exporter.web.protection import Protection, WebConfigFile
from exporter.web.workers import BusyError, LateError

_log = logging.getLogger(__name__)


class Router:
    """Dispatcher of requests to endpoints."""

    def __init__(self, endpoints: Sequence[Endpoint], config_file: WebConfigFile, limits: Limits) -> None:
        self._endpoints = {endpoint.path: endpoint for endpoint in endpoints}
        self._config_file = config_file
        self._passwords = Passwords(limits)
        self._limits = limits
        self._failing_subjects: set[str] = set()  # paths, and `passwords`, whose last failure was logged

    async def respond(self, request: Request, peer: str) -> Response:
        """Return the response to a request. `peer` is the client's IP address. Never raises."""
        deadline = asyncio.get_running_loop().time() + self._budget_seconds(request)
        protection = await self._config_file.current()
        endpoint = self._endpoints.get(request.path)
        response = await self._refusal(protection, request, peer, deadline)
        if response is None:
            if endpoint is None:
                response = text_response(404, f"not found; the metrics are at {METRICS}")
            elif request.method not in endpoint.methods:
                allowed_methods = ", ".join(endpoint.methods)
                response = text_response(
                    405,
                    f"{request.method} is not allowed; allowed methods: {allowed_methods}",
                    {"Allow": allowed_methods},
                    close=True,
                )
            else:
                response = await self._respond(endpoint, request, deadline)
        headers = {**response.headers, **protection.config.http_server_config.headers.fields()}
        route = "other" if endpoint is None else endpoint.path
        return dataclasses.replace(response, headers=headers, route=route)

    def stop(self) -> None:
        """End the worker threads after their current work."""
        for endpoint in self._endpoints.values():
            endpoint.stop()
        self._passwords.stop()

    def _budget_seconds(self, request: Request) -> float:
        """Return the time limit of a response: below Prometheus' scrape timeout, so that Prometheus receives the error."""
        try:
            timeout = float(request.header("x-prometheus-scrape-timeout-seconds") or "nan")
        except ValueError:
            timeout = math.nan
        if not timeout > 0:  # absent or invalid
            return self._limits.render_seconds
        offset = min(self._limits.scrape_timeout_offset_seconds, timeout / 2)
        return min(self._limits.render_seconds, timeout - offset)

    async def _refusal(
        self, protection: Protection, request: Request, peer: str, deadline: float
    ) -> Response | None:
        """Return the response to an unauthenticated request, or None if the request is authenticated."""
        users = protection.config.basic_auth_users
        if not users:
            return None
        try:
            if await self._passwords.admits(users, request.header("authorization"), peer, deadline):
                return None
        except BusyError:
            return text_response(429, "too many passwords are being checked", RETRY_SOON)
        except LateError:
            return text_response(503, "the password check took too long", RETRY_SOON)
        except Exception as error:  # noqa: BLE001 - after an error of bcrypt the request is refused
            self._log_first_failure("passwords", error)
        return text_response(
            401, "unauthorized", {"WWW-Authenticate": 'Basic realm="exporter", charset="UTF-8"'}
        )

    async def _respond(self, endpoint: Endpoint, request: Request, deadline: float) -> Response:
        """Return the endpoint's response, or 503 or 500 for an exception. Never raises."""
        try:
            response = await endpoint.respond(request, deadline)
        except LateError:
            return text_response(503, "the response was not ready within the time limit", RETRY_SOON)
        except BusyError:
            return text_response(503, "too many requests are waiting", RETRY_SOON)
        except Exception as error:  # noqa: BLE001 - an internal error of the sidecar must not stop the server
            self._log_first_failure(request.path, error)
            return text_response(500, "internal error; see the exporter's log")
        self._failing_subjects.discard(request.path)
        return response

    def _log_first_failure(self, subject: str, error: Exception) -> None:
        """Log an error unless the previous call for the subject failed, too."""
        if subject not in self._failing_subjects:
            self._failing_subjects.add(subject)
            _log.error("internal error while responding to %s", subject, exc_info=error)
