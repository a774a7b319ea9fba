"""Basic authentication against bcrypt hashes, and a limit on the rate of requests.

Used in the sidecar, on the web server's loop; bcrypt itself runs on one worker thread, never on the loop,
because one check takes 50 to 250 ms. What hostile passwords can cost is bounded: a verdict is remembered, equal
questions share one check, and only so many checks may wait, of one address fewer. A password that has been found right
once is answered from memory, so a flood of wrong ones does not delay it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import math
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, cast

from exporter.web.flights import BusyError, Job, Workers
from exporter.web.limits import Limits

MAX_PASSWORD_BYTES = 72
"""bcrypt looks at no more, and the library refuses longer ones."""

# exporter-toolkit's: nobody's password. Only the cost is replaced, by the highest of the configured ones.
_NOBODY = "$2y${cost:02d}$QOauhQNbBCuQDKes6eFzPeMqBSjb7Mr5DUmpZ/VcEd00UAV/LDeSi"

Check = Callable[[bytes, bytes], bool]
K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class Memory:
    """What has been found out, to be taken over by the next version of the file.

    Attributes:
        hashes: By user.
        salt: Of the keys under which passwords are remembered.
        right: User by key. Apart from the wrong ones: a flood of those must not push a right one out.
        wrong: Likewise.
        peers: Addresses that logged in.
    """

    hashes: Mapping[bytes, bytes]
    salt: bytes = field(default_factory=lambda: os.urandom(32))
    right: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict)
    wrong: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict)
    peers: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def take_over(self, before: Memory) -> None:
        """Keep the verdicts about users whose hash is the same; called while the one before is still in use."""
        self.salt, self.peers = before.salt, before.peers.copy()
        for mine, theirs in ((self.right, before.right), (self.wrong, before.wrong)):
            for key, user in theirs.copy().items():
                if self.hashes.get(user) == before.hashes.get(user):
                    mine[key] = user


class Passwords:
    """The users of one version of web.config.yml, and what has been found out about passwords under it.

    Checks are made one at a time, in turn by address, so that who guesses from one address delays another by no more
    than a check. Addresses that logged in before go first. What nobody waits for any more is not checked.

    Args:
        users: bcrypt hash by name; at least one.
        check: bcrypt's comparison of a password with a hash.
        workers: Where it runs.
        limits: How much is remembered and how much may wait.
        before: The version before: its verdicts stay for users whose hash is the same.

    Attributes:
        memory: What has been found out.
    """

    def __init__(
        self,
        users: Mapping[str, str],
        check: Check,
        workers: Workers,
        limits: Limits,
        before: Passwords | None = None,
    ) -> None:
        self.memory = Memory({name.encode(): value.encode() for name, value in users.items()})
        if before is not None:
            self.memory.take_over(before.memory)
        # An unknown user costs as much as a known one, else the time of an answer would tell them apart.
        self._nobody = _NOBODY.format(cost=max(_cost(value) for value in users.values())).encode()
        self._check = check
        self._workers = workers
        self._limits = limits
        self._waiting: dict[bytes, Job[bool]] = {}
        self._queues: OrderedDict[str, deque[Job[bool]]] = OrderedDict()  # by address, in turn
        self._current: Job[bool] | None = None

    def judge(self, authorization: str | None, peer: str) -> bool | Job[bool]:
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
        key = hashlib.blake2b(words, key=self.memory.salt, digest_size=32).digest()
        if key in self.memory.right:
            self.memory.right.move_to_end(key)
            self._remember(self.memory.peers, peer, None)
            return True
        if key in self.memory.wrong:
            self.memory.wrong.move_to_end(key)
            return False
        return self._waiting.get(key) or self._enqueue(key, user, password, peer)

    def _enqueue(self, key: bytes, user: bytes, password: bytes, peer: str) -> Job[bool]:
        limits, queue = self._limits, self._queues.get(peer, ())
        full = len(self._waiting) >= limits.passwords_waiting and peer not in self.memory.peers
        if full or len(queue) >= limits.passwords_waiting_per_peer:
            raise BusyError
        known = self.memory.hashes.get(user)
        check, expected = self._check, known or self._nobody
        job = Job(lambda: check(password, expected) and known is not None)
        self._waiting[key] = job
        self._queues.setdefault(peer, deque()).append(job)
        job.add_done_callback(lambda done: self._finish(key, user, peer, done))
        self._next()
        return job

    def _next(self) -> None:
        """Begin the next check: of an address that logged in before, else of the one whose turn it is."""
        while self._current is None and self._queues:
            peer = next(
                (each for each in self.memory.peers if each in self._queues), next(iter(self._queues))
            )
            queue = self._queues.pop(peer)
            job = queue.popleft()
            if queue:
                self._queues[peer] = queue  # behind the others
            if not job.cancelled():
                self._current = job
                self._workers.put(job)

    def _finish(self, key: bytes, user: bytes, peer: str, done: asyncio.Future[bool]) -> None:
        del self._waiting[key]
        queue = self._queues.get(peer)
        if queue is not None and done in queue:
            queue.remove(cast("Job[bool]", done))
            if not queue:
                del self._queues[peer]
        if done is self._current:
            self._current = None
            self._next()
        if done.cancelled() or done.exception() is not None:
            return
        if done.result():
            self._remember(self.memory.peers, peer, None)
        self._remember(self.memory.right if done.result() else self.memory.wrong, key, user)

    def _remember(self, memory: OrderedDict[K, V], key: K, value: V) -> None:
        memory[key] = value
        memory.move_to_end(key)
        if len(memory) > self._limits.verdicts:
            memory.popitem(last=False)


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
        user, colon, password = base64.b64decode(encoded, validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return None
    return (user, password) if colon else None
