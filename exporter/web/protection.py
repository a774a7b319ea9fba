"""The settings of `web.config.yml` that are in force, and taking over the file when it has changed.

Used in the sidecar. Loaded on the thread that starts the server, where every problem is an error (without
its protection nothing is served); looked at again before a connection or request is judged, at most once a
second, on a worker thread, because a file may lie on a share that hangs. A new version that cannot be taken
over leaves the old one in force, is counted, and is logged once.

A changed file never takes a protection away: TLS, passwords and the demand for client certificates stay until
a restart. An editor or a half-written file would otherwise open the server for a moment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.core import Metric

from exporter.errors import ConfigurationError, Problem
from exporter.web.auth import Check, Passwords, RateLimiter
from exporter.web.counts import RELOAD_ERRORS, RELOAD_SUCCESSFUL, RELOADS, number
from exporter.web.flights import Workers
from exporter.web.limits import Limits
from exporter.web.tls import ServerTls, files_of, make_tls
from exporter.web.webconfig import WebConfig, load_web_config

_PATIENCE_SECONDS = 0.5

Signature = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """What is in force for a connection or a request.

    Attributes:
        tls: None for plain HTTP.
        headers: Added to every answer.
        passwords: None when nobody has to log in.
        limiter: None without a limit.
    """

    tls: ServerTls | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    passwords: Passwords | None = None
    limiter: RateLimiter | None = None


_NO_SETTINGS = Settings()


@dataclass(frozen=True, slots=True)
class _Version:
    """One version of the file as it was read."""

    config: WebConfig
    settings: Settings
    files: tuple[Path, ...]
    signature: Signature


class Protection:
    """The settings in force.

    Args:
        path: The file; None for a server without any.
        limits: How often it is looked at, and what passwords may cost.
        log: Where changes are noted.

    Raises:
        ConfigurationError: It cannot be read, or has problems.
    """

    def __init__(self, path: Path | None, limits: Limits, log: logging.Logger) -> None:
        self._path = path
        self._limits = limits
        self._log = log
        self._password_worker = Workers("exporter-passwords", 1)
        self._file_worker = Workers("exporter-web-config", 1)
        self._check: asyncio.Future[_Version | None] | None = None
        self._next_check = 0.0
        self._patience_ends = 0.0
        self._complaint: tuple[Signature, str] | None = None
        self._reloads = 0
        self._errors = 0
        self._version = None if path is None else self._load(path, None)
        if self._version is not None and self._version.config.http_server_config.http2 and self.tls:
            log.info("HTTP/2 is not offered, clients are served with HTTP/1.1")

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted; never changes."""
        return self._version is not None and self._version.settings.tls is not None

    async def current(self) -> Settings:
        """The settings in force now; the file is looked at when that is due."""
        if self._version is None:
            return _NO_SETTINGS
        loop = asyncio.get_running_loop()
        if self._check is None and loop.time() >= self._next_check:
            version = self._version
            self._check = self._file_worker.submit(lambda: self._changed(version))
            self._check.add_done_callback(self._checked)
            self._patience_ends = loop.time() + _PATIENCE_SECONDS
        patience = self._patience_ends - loop.time()
        if self._check is not None and patience > 0:
            # A share that hangs delays requests by no more than this; the settings in force go on.
            await asyncio.wait([self._check], timeout=patience)
        return self._version.settings

    def stop(self) -> None:
        """Let the worker threads end."""
        self._password_worker.stop()
        self._file_worker.stop()

    def families(self) -> list[Metric]:
        """Reloads, where there is a file to reload."""
        if self._version is None:
            return []
        return [
            number(RELOADS, self._reloads),
            number(RELOAD_ERRORS, self._errors),
            number(RELOAD_SUCCESSFUL, 0 if self._complaint else 1),
        ]

    def _checked(self, done: asyncio.Future[_Version | None]) -> None:
        self._check = None
        self._next_check = done.get_loop().time() + self._limits.file_check_seconds
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            # Tried again at every check, since not every failure is in the files: it may be that none can
            # be opened just now. It is counted and logged once per change of the files or of the failure.
            complaint = () if self._version is None else _signature(self._version.files), str(error)
            if complaint != self._complaint:
                self._complaint = complaint
                self._errors += 1
                self._log.error("web configuration was not taken over, the old one is kept: %s", error)
            return
        version = done.result()
        if version is not None:
            self._version = version
            self._reloads += 1
            self._log.info("web configuration was taken over: %s", self._path)
        elif self._complaint:
            self._log.info("web configuration is again the one in force: %s", self._path)
        self._complaint = None

    def _changed(self, old: _Version) -> _Version | None:
        """The new version, or None when nothing has changed; on the worker thread."""
        if self._path is None or _signature(old.files) == old.signature:
            return None
        new = self._load(self._path, old)
        lost = _weaker(old.settings, new.settings)
        if lost:
            message = f"{lost} cannot be switched off while the server runs; restart it to do that"
            raise ConfigurationError([Problem(str(self._path), None, None, message)])
        return new

    def _load(self, path: Path, old: _Version | None) -> _Version:
        # Each taken before the file is read: what changes meanwhile is seen as a change next time.
        signature = _signature([path])
        config = load_web_config(path)
        files = [path]
        tls = None
        if config.tls_server_config is not None:
            files += files_of(config.tls_server_config, path.parent)
            signature = *signature, *_signature(files[1:])
            tls = make_tls(config.tls_server_config, path)
        passwords = None
        if config.basic_auth_users:
            check = _bcrypt(path)
            before = None if old is None else old.settings.passwords
            passwords = Passwords(config.basic_auth_users, check, self._password_worker, self._limits, before)
        limiter = None
        if config.rate_limit.interval:
            limiter = RateLimiter(config.rate_limit.interval, config.rate_limit.burst)
            if old is not None and old.config.rate_limit == config.rate_limit:
                limiter = old.settings.limiter  # a new certificate does not refill the bucket
        headers = config.http_server_config.headers.fields()
        return _Version(config, Settings(tls, headers, passwords, limiter), tuple(files), signature)


def _weaker(old: Settings, new: Settings) -> str:
    """What a new version would take away; "" for nothing."""
    if (old.tls is None) != (new.tls is None):
        return "TLS" if new.tls is None else "plain HTTP"
    if old.passwords is not None and new.passwords is None:
        return "basic_auth_users"
    if old.tls is not None and new.tls is not None:
        order = ("no", "if given", "always")
        if order.index(new.tls.verifies) < order.index(old.tls.verifies):
            return "the demand for client certificates"
        if old.tls.allowed_names and not new.tls.allowed_names:
            return "client_allowed_sans"
    return ""


def _signature(files: tuple[Path, ...] | list[Path]) -> Signature:
    return tuple(_stat(file) for file in files)


def _stat(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _bcrypt(path: Path) -> Check:
    """Give bcrypt's check of a password.

    Raises:
        ConfigurationError: The library is not installed.
    """
    try:
        from bcrypt import checkpw  # noqa: PLC0415 - an optional dependency, needed only with passwords
    except ImportError:
        message = "basic_auth_users needs the bcrypt package: pip install training-exporter[auth]"
        raise ConfigurationError([Problem(str(path), None, None, message)]) from None
    return checkpw
