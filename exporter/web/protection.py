"""TLS, password and header settings in force, reloaded when `web.config.yml` or a certificate changes.

Before a connection or request is handled, a worker thread checks the files, at most once per second by default. If a new version
is invalid or removes a protection, the previous version stays in force.
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

_RELOAD_TIMEOUT_SECONDS = 0.5
"""Maximum time for which a connection or request waits for the check of the files."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Signature:
    """File metadata that changes with the content."""

    modified_ns: int
    inode: int
    size: int


Signatures = Mapping[Path, Signature | None]
"""Signature by file; None for a file that cannot be read."""


@dataclass(frozen=True, slots=True)
class Protection:
    """Loaded version of the web configuration."""

    config: WebConfig = field(default_factory=WebConfig)
    tls: ServerTls | None = None
    signatures: Signatures = field(default_factory=dict)  # of the files, computed before the files were read


class WebConfigFile:
    """Web configuration file, with the version in force.

    `failure` is the reason why the file's current version is not in force, or "". Raises ConfigurationError if the first
    version is invalid.
    """

    def __init__(self, path: Path | None, limits: Limits) -> None:
        self.failure = ""
        self.path = path
        self._interval_seconds = limits.file_check_seconds
        self._next_check = 0.0
        self._workers = Workers("exporter-web-config")
        self._current = Protection() if path is None else load_protection(path)
        if self._current.config.http_server_config.http2 and self.uses_tls:
            _log.info("HTTP/2 is not offered; clients are served with HTTP/1.1")

    @property
    def uses_tls(self) -> bool:
        """True if connections are encrypted."""
        return self._current.tls is not None

    async def current(self) -> Protection:
        """Return the version in force, after a check of the files if a check is due."""
        path = self.path
        if path is not None and time.monotonic() >= self._next_check:
            # No further check until this one ends: a hung file system delays a single request, by at most the timeout.
            self._next_check = float("inf")
            deadline = asyncio.get_running_loop().time() + _RELOAD_TIMEOUT_SECONDS
            try:
                await self._workers.run(path, lambda: self._check_file(path), deadline)
            except LateError:
                pass  # the check continues on its thread
            except RuntimeError as error:  # no thread can be started
                self._finish_check(f"{path} cannot be checked: {error}")
        return self._current

    def stop(self) -> None:
        """End the worker thread after its current work."""
        self._workers.stop()

    def _check_file(self, path: Path) -> None:
        """Load the file if it or a file that it names has changed, on the worker thread. Never raises."""
        failure, previous = "", self._current
        try:
            # A failed load is retried at each check, because not every failure is in the files.
            if _signatures(*previous.signatures) != previous.signatures:
                self._current = load_protection(path, previous)
                _log.info("web configuration reloaded: %s", path)
        except Exception as error:  # noqa: BLE001 - the previous version stays in force after any error
            failure = str(error)
        self._finish_check(failure)

    def _finish_check(self, failure: str) -> None:
        """Record and log the result of a check, "" for a success, and schedule the next check."""
        if failure and failure != self.failure:
            _log.error("web configuration not reloaded; the previous one stays in force: %s", failure)
        self.failure = failure
        self._next_check = time.monotonic() + self._interval_seconds


def load_protection(path: Path, previous: Protection | None = None) -> Protection:
    """Load the file, certificates and keys. Raises ConfigurationError.

    A version that removes a protection of `previous` is refused.
    """
    # Each signature is computed before the file is read: the next check detects a change in between.
    signatures = _signatures(path)
    config = load_web_config(path)
    problem = ""
    if config.basic_auth_users and importlib.util.find_spec("bcrypt") is None:
        problem = "basic_auth_users needs the bcrypt package: pip install bcrypt"
    elif previous is not None and (protection := _removed_protection(previous.config, config)):
        problem = (
            f"{protection} cannot be switched off while the server runs; restart the exporter to do that"
        )
    if problem:
        raise ConfigurationError([Problem(str(path), None, None, problem)])
    tls = None
    if config.tls_server_config is not None:
        files = (path.parent / file for file in config.tls_server_config.files)
        signatures = {**signatures, **_signatures(*files)}
        tls = make_tls(config.tls_server_config, path)
    return Protection(config, tls, signatures)


def _removed_protection(old: WebConfig, new: WebConfig) -> str:
    """Return the name of a protection that a new version would remove, or "". A half-written file may be such a version."""
    if old.basic_auth_users and not new.basic_auth_users:
        return "basic_auth_users"
    old_tls, new_tls = old.tls_server_config, new.tls_server_config
    if old_tls is None:
        return ""
    if new_tls is None:
        return "TLS"
    if new_tls.verify_mode < old_tls.verify_mode:
        return "the verification of client certificates"
    return "client_allowed_sans" if old_tls.client_allowed_sans and not new_tls.client_allowed_sans else ""


def _signatures(*files: Path) -> Signatures:
    """Return the signatures of files; None for a file that cannot be read."""
    signatures: dict[Path, Signature | None] = dict.fromkeys(files)
    for file in files:
        with contextlib.suppress(OSError):
            status = file.stat()
            signatures[file] = Signature(status.st_mtime_ns, status.st_ino, status.st_size)
    return signatures
