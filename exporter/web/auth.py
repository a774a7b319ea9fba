"""Basic authentication against bcrypt hashes, and a limit on the rate of requests.

Used in the sidecar, on the web server's loop; bcrypt itself runs on one worker thread, never on the loop,
because one check takes 50 to 250 ms. What hostile passwords can cost is bounded: a verdict is remembered,
equal questions share one check, and only a few checks may wait, fewer still of one address. A password that
has been found right once is answered from memory, so a flood of wrong ones does not delay it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import math
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

from exporter.web.flights import Workers
from exporter.web.limits import Limits

MAX_PASSWORD_BYTES = 72
"""bcrypt looks at no more, and the library refuses longer ones."""

# exporter-toolkit's: nobody's password. Only the cost is replaced, by the highest of the configured ones.
_NOBODY = "$2y${cost:02d}$QOauhQNbBCuQDKes6eFzPeMqBSjb7Mr5DUmpZ/VcEd00UAV/LDeSi"

Check = Callable[[bytes, bytes], bool]


class BusyError(Exception):
    """Too many password checks are waiting; this one was not begun."""


class Passwords:
    """The users of one version of web.config.yml, and what has been found out about passwords under it.

    Args:
        users: bcrypt hash by name; at least one.
        check: bcrypt's comparison of a password with a hash.
        workers: Where it runs.
        limits: How much is remembered and how much may wait.
    """

    def __init__(self, users: Mapping[str, str], check: Check, workers: Workers, limits: Limits) -> None:
        self._hashes = {name.encode(): value.encode() for name, value in users.items()}
        # An unknown user costs as much as a known one, else the time of an answer would tell them apart.
        self._nobody = _NOBODY.format(cost=max(_cost(value) for value in users.values())).encode()
        self._check = check
        self._workers = workers
        self._limits = limits
        self._salt = os.urandom(32)
        # Apart from each other: a flood of wrong passwords must not push a right one out.
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._wrong: OrderedDict[bytes, None] = OrderedDict()
        self._waiting: dict[bytes, asyncio.Future[bool]] = {}
        self._waiting_of: Counter[str] = Counter()

    def judge(self, authorization: str | None, peer: str) -> bool | asyncio.Future[bool]:
        """Whether a request may pass, or the check that will tell.

        Args:
            authorization: The header field; None when it is missing.
            peer: The address of the client.

        Raises:
            BusyError: It would have to wait behind too many others.
        """
        credentials = _credentials(authorization)
        if credentials is None:
            return False
        user, password = credentials
        if len(password) > MAX_PASSWORD_BYTES or b"\0" in password:
            return False
        # The plain password is not kept in memory, and what is kept says nothing without the salt.
        words = len(user).to_bytes(4, "big") + user + password
        key = hashlib.blake2b(words, key=self._salt, digest_size=32).digest()
        for verdicts, verdict in ((self._right, True), (self._wrong, False)):
            if key in verdicts:
                verdicts.move_to_end(key)
                return verdict
        return self._waiting.get(key) or self._begin(key, user, password, peer)

    def _begin(self, key: bytes, user: bytes, password: bytes, peer: str) -> asyncio.Future[bool]:
        if len(self._waiting) >= self._limits.passwords_waiting:
            raise BusyError
        if self._waiting_of[peer] >= self._limits.passwords_waiting_per_peer:
            raise BusyError
        known = self._hashes.get(user)
        check, expected = self._check, known or self._nobody
        future = self._workers.submit(lambda: check(password, expected) and known is not None)
        self._waiting[key] = future
        self._waiting_of[peer] += 1
        future.add_done_callback(lambda done: self._finish(key, peer, done))
        return future

    def _finish(self, key: bytes, peer: str, done: asyncio.Future[bool]) -> None:
        del self._waiting[key]
        self._waiting_of[peer] -= 1
        if not self._waiting_of[peer]:
            del self._waiting_of[peer]
        if done.cancelled() or done.exception() is not None:
            return
        verdicts = self._right if done.result() else self._wrong
        verdicts[key] = None
        if len(verdicts) > self._limits.verdicts:
            verdicts.popitem(last=False)


class RateLimiter:
    """A token bucket over all requests, as in exporter-toolkit.

    Args:
        interval_seconds: One request more is allowed every so often.
        burst: How many may be saved up.
        clock: Monotonic seconds.
    """

    def __init__(
        self, interval_seconds: float, burst: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.interval_seconds = interval_seconds
        self.burst = burst
        self._clock = clock
        self._tokens = float(burst)
        self._filled = clock()

    @property
    def retry_after_seconds(self) -> int:
        """Whole seconds after which a refused client has a chance."""
        return max(1, math.ceil(self.interval_seconds))

    def allow(self) -> bool:
        """Take one token; False when there is none."""
        now = self._clock()
        self._tokens = min(float(self.burst), self._tokens + (now - self._filled) / self.interval_seconds)
        self._filled = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


def _cost(value: str) -> int:
    return int(value.split("$")[2])


def _credentials(authorization: str | None) -> tuple[bytes, bytes] | None:
    """User and password of `Basic …`; None when it is something else."""
    scheme, _, encoded = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return None
    return (user, password) if colon else None
