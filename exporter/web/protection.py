"""TLS, passwords and headers in force: `web.config.yml`, reloaded when the file or a certificate changes.

The files are checked before a connection or request is handled, at most once a second, on a worker thread. A version that
is invalid, or removes a protection, leaves the previous version in force.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from exporter.errors import ConfigurationError, Problem
from exporter.web.http import Limits
from exporter.web.webconfig import ServerTls, WebConfig, load_web_config, make_tls
from exporter.web.workers import LateError, Workers

_PATIENCE_SECONDS = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Signature:
    """Signature of a file, which changes with the content."""

    modified_ns: int
    inode: int
    size: int


Signatures = Mapping[Path, Signature | None]


@dataclass(frozen=True, slots=True)
class Protection:
    """Loaded version of the file."""

    config: WebConfig = field(default_factory=WebConfig)
    tls: ServerTls | None = None
    files: Signatures = field(default_factory=dict)  # taken before the files were read


class WebConfigFile:
    """The web configuration file; `failure` is the reason why the present version is not in force. Raises ConfigurationError."""

    def __init__(self, path: Path | None, limits: Limits) -> None:
        self.failure = ""
        self.path = path
        self._interval_seconds = limits.file_check_seconds
        self._next_check = 0.0
        self._workers = Workers("exporter-web-config")
        self._current = Protection() if path is None else load_protection(path)
        if self._current.config.http_server_config.http2 and self.tls:
            _log.info("HTTP/2 is not offered; clients are served with HTTP/1.1")

    @property
    def tls(self) -> bool:
        """True if connections are encrypted."""
        return self._current.tls is not None

    async def current(self) -> Protection:
        """Return the version in force, after a check of the file if that is due."""
        path = self.path
        if path is not None and time.monotonic() >= self._next_check:
            self._next_check = float(
                "inf"
            )  # a hung network share delays a single request, by at most the patience
            deadline = asyncio.get_running_loop().time() + _PATIENCE_SECONDS
            with contextlib.suppress(LateError):
                await self._workers.run(path, lambda: self._check_file(path), deadline)
        return self._current

    def stop(self) -> None:
        """Let the worker thread end."""
        self._workers.stop()

    def _check_file(self, path: Path) -> None:
        failure, old = "", self._current
        try:
            # A failed load is retried at each check, because not every failure is in the files.
            if _signatures(*old.files) != old.files:
                self._current = load_protection(path, old)
                _log.info("web configuration reloaded: %s", path)
        except Exception as error:  # noqa: BLE001 - on any error the old version stays in force
            failure = str(error)
        if failure and failure != self.failure:
            _log.error("web configuration not reloaded; the previous one stays in force: %s", failure)
        self.failure = failure
        self._next_check = time.monotonic() + self._interval_seconds


def load_protection(path: Path, old: Protection | None = None) -> Protection:
    """Load the file, certificates and keys; raises ConfigurationError.

    A version that removes a protection of `old` is refused.
    """
    # Each signature is computed before the file is read: the next check detects a change in between.
    signatures = _signatures(path)
    config = load_web_config(path)
    problem = ""
    if config.basic_auth_users and importlib.util.find_spec("bcrypt") is None:
        problem = "basic_auth_users needs the bcrypt package: pip install training-exporter[auth]"
    elif old is not None and (lost := _lost_protection(old.config, config)):
        problem = f"{lost} cannot be switched off while the server runs; restart the exporter to do that"
    if problem:
        raise ConfigurationError([Problem(str(path), None, None, problem)])
    tls = None
    if config.tls_server_config is not None:
        files = (path.parent / file for file in config.tls_server_config.files)
        signatures = {**signatures, **_signatures(*files)}
        tls = make_tls(config.tls_server_config, path)
    return Protection(config, tls, signatures)


def _lost_protection(old: WebConfig, new: WebConfig) -> str:
    """Name a protection that a new version, possibly half written, would remove; "" for none."""
    if old.basic_auth_users and not new.basic_auth_users:
        return "basic_auth_users"
    before, after = old.tls_server_config, new.tls_server_config
    if before is None:
        return ""
    if after is None:
        return "TLS"
    if after.verify_mode < before.verify_mode:
        return "the demand for client certificates"
    return "client_allowed_sans" if before.client_allowed_sans and not after.client_allowed_sans else ""


def _signatures(*files: Path) -> Signatures:
    signatures: dict[Path, Signature | None] = dict.fromkeys(files)
    for file in files:
        with contextlib.suppress(OSError):
            found = file.stat()
            signatures[file] = Signature(found.st_mtime_ns, found.st_ino, found.st_size)
    return signatures
