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
"""Longest password that is checked. bcrypt ignores further bytes, and its library refuses longer passwords."""

MAX_KNOWN_PEERS = 256
"""Maximum number of addresses that count as known."""

# The hash with which exporter-toolkit checks the passwords of unknown users; the cost is filled in.
_UNKNOWN_USER_HASH = "$2y${cost:02d}$QOauhQNbBCuQDKes6eFzPeMqBSjb7Mr5DUmpZ/VcEd00UAV/LDeSi"


class Passwords:
    """Password checks with a cache of correct passwords. A cached password is valid until the user's hash changes.

    Equal requests share a check. The number of waiting checks is limited, in total and per address. An address that has sent a correct
    password is known. The checks of known addresses have a separate thread, so that they do not wait for the checks of an attacker's
    guesses.
    """

    def __init__(self, limits: Limits) -> None:
        self._unknown_peer_workers = Workers("exporter-passwords", max_waiting=limits.passwords_waiting)
        self._known_peer_workers = Workers("exporter-logins", max_waiting=limits.passwords_waiting)
        self._known_peers: OrderedDict[str, None] = OrderedDict()  # the latest login last
        self._max_waiting_per_peer = limits.passwords_waiting_per_peer
        self._waiting_per_peer: Counter[str] = Counter()
        self._salt = os.urandom(32)
        self._correct_keys: set[bytes] = set()

    async def admits(
        self, users: Mapping[str, str], authorization: str | None, peer: str, deadline: float
    ) -> bool:
        """Return True if the header field has a correct password. `deadline` is a time of the loop's clock.

        Raises BusyError if too many checks are queued, and LateError if the check is not finished at the deadline.
        """
        user, password = _credentials(authorization)
        if not password or len(password) > MAX_PASSWORD_BYTES or b"\0" in password:
            return False
        user_hash = users.get(user)
        # An unknown user is checked, too: the response time would otherwise reveal which users exist.
        highest_cost = max(int(value.split("$")[2]) for value in users.values())
        expected_hash = user_hash or _UNKNOWN_USER_HASH.format(cost=highest_cost)
        # The cache does not hold plain passwords, and a key is useless without the salt.
        credentials = f"{user}\0{expected_hash}\0".encode() + password
        key = hashlib.blake2b(credentials, key=self._salt, digest_size=32).digest()
        if key in self._correct_keys:
            self._remember_peer(peer)
            return True
        if self._waiting_per_peer[peer] >= self._max_waiting_per_peer:
            raise BusyError
        self._waiting_per_peer[peer] += 1
        try:
            is_known = peer in self._known_peers
            workers = self._known_peer_workers if is_known else self._unknown_peer_workers
            is_correct = await workers.run(key, lambda: _check(password, expected_hash), deadline)
        finally:
            self._waiting_per_peer[peer] -= 1
            self._waiting_per_peer += Counter()  # drops the zero counts
        if user_hash is None or not is_correct:
            return False
        self._correct_keys.add(key)
        self._remember_peer(peer)
        return True

    def _remember_peer(self, peer: str) -> None:
        """Make an address the latest known address, and drop the oldest one above `MAX_KNOWN_PEERS`."""
        self._known_peers[peer] = None
        self._known_peers.move_to_end(peer)
        if len(self._known_peers) > MAX_KNOWN_PEERS:
            self._known_peers.popitem(last=False)

    def stop(self) -> None:
        """End the worker threads after their current work."""
        self._unknown_peer_workers.stop()
        self._known_peer_workers.stop()


def _check(password: bytes, expected_hash: str) -> bool:
    """Return True if a password has a bcrypt hash. A check takes about 0.07 s at cost 10, and each further cost doubles the time."""
    from bcrypt import checkpw  # noqa: PLC0415 - an optional dependency, needed only with passwords

    return checkpw(password, expected_hash.encode())


def _credentials(authorization: str | None) -> tuple[str, bytes]:
    """Return user and password of a `Basic` Authorization header. Both are empty for a missing, invalid or different header."""
    scheme, _, encoded_credentials = (authorization or "").partition(" ")
    try:
        user, _, password = base64.b64decode(encoded_credentials, validate=True).partition(b":")
        return (user.decode(), password) if scheme.lower() == "basic" else ("", b"")
    except (binascii.Error, ValueError):
        return "", b""
