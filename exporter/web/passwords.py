"""HTTP basic authentication: bcrypt checks on worker threads, with a cache of correct passwords."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections import Counter, OrderedDict
from collections.abc import Mapping

from exporter.web.http import Limits
from exporter.web.workers import BusyError, Workers

MAX_PASSWORD_BYTES = 72
"""bcrypt ignores further bytes, and the library refuses longer passwords."""

# A hash of exporter-toolkit that no password matches, with the highest configured cost.
_UNKNOWN_USER_HASH = "$2y${cost:02d}$QOauhQNbBCuQDKes6eFzPeMqBSjb7Mr5DUmpZ/VcEd00UAV/LDeSi"


class Passwords:
    """Password checks with a cache of correct passwords, which is valid until the user's hash changes.

    Equal requests share a check. The number of waiting checks is limited, in total and per address. Addresses that have sent a
    correct password have a separate thread, so that password guesses of other addresses never delay their checks.
    """

    def __init__(self, limits: Limits) -> None:
        self._unknown_peers = Workers("exporter-passwords", max_waiting=limits.passwords_waiting)
        self._known_peers = Workers("exporter-logins", max_waiting=limits.passwords_waiting)
        self._logged_in: OrderedDict[str, None] = OrderedDict()  # addresses, the latest last
        self._max_logged_in = limits.passwords_waiting
        self._max_waiting_per_peer = limits.passwords_waiting_per_peer
        self._waiting_per_peer: Counter[str] = Counter()
        self._salt = os.urandom(32)
        self._correct: set[bytes] = set()

    async def admits(
        self, users: Mapping[str, str], authorization: str | None, peer: str, deadline: float
    ) -> bool:
        """Return True if the header field has a correct password; `deadline` is a time of the loop's clock.

        Raises BusyError if too many checks are queued, and LateError.
        """
        user, password = _credentials(authorization)
        if not password or len(password) > MAX_PASSWORD_BYTES or b"\0" in password:
            return False
        user_hash = users.get(user)
        # A check takes as long for unknown as for valid users; otherwise the response time would reveal valid users.
        highest_cost = max(int(value.split("$")[2]) for value in users.values())
        expected = user_hash or _UNKNOWN_USER_HASH.format(cost=highest_cost)
        # The plain password is not stored in memory, and the key is useless without the salt.
        credentials = f"{user}\0{expected}\0".encode() + password
        key = hashlib.blake2b(credentials, key=self._salt, digest_size=32).digest()
        if key in self._correct:
            self._remember_peer(peer)
            return True
        if self._waiting_per_peer[peer] >= self._max_waiting_per_peer:
            raise BusyError
        self._waiting_per_peer[peer] += 1
        try:
            workers = self._known_peers if peer in self._logged_in else self._unknown_peers
            correct = await workers.run(key, lambda: _check(password, expected), deadline)
        finally:
            self._waiting_per_peer[peer] -= 1
            self._waiting_per_peer += Counter()  # drops the zero counts
        if user_hash is None or not correct:
            return False
        self._correct.add(key)
        self._remember_peer(peer)
        return True

    def _remember_peer(self, peer: str) -> None:
        self._logged_in[peer] = None
        self._logged_in.move_to_end(peer)
        if len(self._logged_in) > self._max_logged_in:
            self._logged_in.popitem(last=False)

    def stop(self) -> None:
        """End the worker threads after their current work."""
        self._unknown_peers.stop()
        self._known_peers.stop()


def _check(password: bytes, expected: str) -> bool:
    from bcrypt import checkpw  # noqa: PLC0415 - an optional dependency, needed only with passwords

    return checkpw(password, expected.encode())


def _credentials(authorization: str | None) -> tuple[str, bytes]:
    """Return user and password of a `Basic` Authorization header, or empty texts for other schemes."""
    scheme, _, encoded_credentials = (authorization or "").partition(" ")
    try:
        user, _, password = base64.b64decode(encoded_credentials, validate=True).partition(b":")
        return (user.decode(), password) if scheme.lower() == "basic" else ("", b"")
    except (binascii.Error, ValueError):
        return "", b""
