"""Who may come in: what `web.config.yml` asks for, in force, and the check of passwords.

The file is looked at again before a connection or request is judged, at most once a second, on a worker thread. A version
that cannot be taken over, or takes a protection away, leaves the old one in force.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import importlib.util
import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from exporter.errors import ConfigurationError, Problem
from exporter.web.http import Limits
from exporter.web.webconfig import ServerTls, WebConfig, load_web_config, make_tls
from exporter.web.workers import BusyError, LateError, Workers

_PATIENCE_SECONDS = 0.5

MAX_PASSWORD_BYTES = 72
"""bcrypt looks at no more, and the library refuses longer ones."""

# exporter-toolkit's: nobody's password. Only the cost is replaced, by the highest of the configured ones.
_NOBODY = "$2y${cost:02d}$QOauhQNbBCuQDKes6eFzPeMqBSjb7Mr5DUmpZ/VcEd00UAV/LDeSi"

_log = logging.getLogger(__name__)

Signatures = Mapping[Path, tuple[int, int, int] | None]


class Passwords:
    """Checks passwords, and remembers those that were right for as long as the user's hash is the same.

    Equal questions share one check, and only so many may wait, of one address fewer. Addresses that have logged in before
    have a thread of their own: however many strangers guess, a login of theirs waits for none of them.
    """

    def __init__(self, limits: Limits) -> None:
        self._strangers = Workers("exporter-passwords", max_waiting=limits.passwords_waiting)
        self._regulars = Workers("exporter-logins", max_waiting=limits.passwords_waiting)
        self._logged_in: OrderedDict[str, None] = OrderedDict()  # addresses, the latest last
        self._most_logged_in = limits.passwords_waiting
        self._most_of_peer = limits.passwords_waiting_per_peer
        self._asking: Counter[str] = Counter()
        self._salt = os.urandom(32)
        self._right: set[bytes] = set()

    async def admits(
        self, users: Mapping[str, str], authorization: str | None, peer: str, deadline: float
    ) -> bool:
        """Whether a request of this address may pass, with this header field, by a time of the loop's clock.

        Raises BusyError behind too many others, and LateError.
        """
        user, password = _credentials(authorization)
        if not password or len(password) > MAX_PASSWORD_BYTES or b"\0" in password:
            return False
        known = users.get(user)
        # An unknown user costs as much as a known one, else the time of an answer would tell them apart.
        expected = known or _NOBODY.format(cost=max(int(value.split("$")[2]) for value in users.values()))
        # The plain password is not kept in memory, and what is kept says nothing without the salt.
        words = f"{user}\0{expected}\0".encode() + password
        key = hashlib.blake2b(words, key=self._salt, digest_size=32).digest()
        if key in self._right:
            self._welcome(peer)
            return True
        if self._asking[peer] >= self._most_of_peer:
            raise BusyError
        self._asking[peer] += 1
        try:
            workers = self._regulars if peer in self._logged_in else self._strangers
            right = await workers.run(key, lambda: _check(password, expected), deadline)
        finally:
            self._asking[peer] -= 1
            self._asking += Counter()  # without those at zero
        if known is None or not right:
            return False
        self._right.add(key)
        self._welcome(peer)
        return True

    def _welcome(self, peer: str) -> None:
        self._logged_in[peer] = None
        self._logged_in.move_to_end(peer)
        if len(self._logged_in) > self._most_logged_in:
            self._logged_in.popitem(last=False)

    def stop(self) -> None:
        """Let the worker threads end."""
        self._strangers.stop()
        self._regulars.stop()


@dataclass(frozen=True, slots=True)
class Protection:
    """One version of the file, ready for use."""

    config: WebConfig = field(default_factory=WebConfig)
    tls: ServerTls | None = None
    files: Signatures = field(default_factory=dict)  # what was read, as it looked before that


class WebConfigFile:
    """The file, looked at when it is due; `failure` says why its present version is not in force. Raises ConfigurationError."""

    def __init__(self, path: Path | None, limits: Limits) -> None:
        self.failure = ""
        self.path = path
        self._interval_seconds = limits.file_check_seconds
        self._next_check = 0.0
        self._workers = Workers("exporter-web-config")
        self._current = Protection() if path is None else _load(path, Protection())
        if self._current.config.http_server_config.http2 and self.tls:
            _log.info("HTTP/2 is not offered, clients are served with HTTP/1.1")

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return self._current.tls is not None

    async def current(self) -> Protection:
        """What is in force now; the file is looked at when that is due."""
        path = self.path
        if path is not None and time.monotonic() >= self._next_check:
            self._next_check = float("inf")  # a share that hangs delays one request, and by no more than this
            deadline = asyncio.get_running_loop().time() + _PATIENCE_SECONDS
            with contextlib.suppress(LateError):
                await self._workers.run(path, lambda: self._look(path), deadline)
        return self._current

    def stop(self) -> None:
        """Let the worker thread end."""
        self._workers.stop()

    def _look(self, path: Path) -> None:
        failure, old = "", self._current
        try:
            # What fails is tried again at every look, since not every failure is in the files.
            if _signatures(*old.files) != old.files:
                self._current = _load(path, old)
                _log.info("web configuration was taken over: %s", path)
        except Exception as error:  # noqa: BLE001 - whatever it is, the old one stays in force
            failure = str(error)
        if failure and failure != self.failure:
            _log.error("web configuration was not taken over, the old one is kept: %s", failure)
        self.failure = failure
        self._next_check = time.monotonic() + self._interval_seconds


def _load(path: Path, old: Protection) -> Protection:
    # Each signature is taken before the file is read: what changes meanwhile is seen as a change next time.
    signatures = _signatures(path)
    config = load_web_config(path)
    problem = ""
    if config.basic_auth_users and importlib.util.find_spec("bcrypt") is None:
        problem = "basic_auth_users needs the bcrypt package: pip install training-exporter[auth]"
    elif lost := _lost(old.config, config):
        problem = f"{lost} cannot be switched off while the server runs; restart it to do that"
    if problem:
        raise ConfigurationError([Problem(str(path), None, None, problem)])
    tls = None
    if config.tls_server_config is not None:
        files = (path.parent / file for file in config.tls_server_config.files)
        signatures = {**signatures, **_signatures(*files)}
        tls = make_tls(config.tls_server_config, path)
    return Protection(config, tls, signatures)


def _lost(old: WebConfig, new: WebConfig) -> str:
    """What a new version, perhaps half written, would take away; "" for nothing."""
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
    signatures: dict[Path, tuple[int, int, int] | None] = dict.fromkeys(files)
    for file in files:
        with contextlib.suppress(OSError):
            found = file.stat()
            signatures[file] = found.st_mtime_ns, found.st_ino, found.st_size
    return signatures


def _check(password: bytes, expected: str) -> bool:
    from bcrypt import checkpw  # noqa: PLC0415 - an optional dependency, needed only with passwords

    return checkpw(password, expected.encode())


def _credentials(authorization: str | None) -> tuple[str, bytes]:
    """User and password of `Basic …`; empty when it is something else."""
    scheme, _, encoded = (authorization or "").partition(" ")
    try:
        user, _, password = base64.b64decode(encoded, validate=True).partition(b":")
        return (user.decode(), password) if scheme.lower() == "basic" else ("", b"")
    except (binascii.Error, ValueError):
        return "", b""
