"""Connection guard: the connections of a server by state, their limit, and the order of eviction."""

from __future__ import annotations

import enum
import resource
import time
from typing import Protocol

from exporter.web.http import Limits


class ConnectionState(enum.Enum):
    """Activity of a connection; the value is the label `state`."""

    INCOMPLETE = "incomplete"  # TLS handshake or head missing
    IDLE = "idle"  # between two requests, or closing
    RUNNING = "running"  # the response is being rendered
    WRITING = "writing"


class Guarded(Protocol):
    """Interface of a guarded connection."""

    state: ConnectionState | None
    body: bytes

    def evict(self) -> None:
        """Close the connection to make room."""


class ConnectionGuard:
    """Limit on the connections of a server.

    If the limit is reached, the guard evicts the stalled response whose peer has not read for the longest time; without one,
    the oldest incomplete connection; without one, the oldest idle connection. It never evicts a response that is being rendered
    or read. A flood of connections therefore evicts only its own connections: a scraper sends its request and reads the response
    at once.
    """

    def __init__(self, limits: Limits) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        is_unlimited = files == resource.RLIM_INFINITY
        descriptors = limits.connections if is_unlimited else max(16, files - limits.spare_files)
        self.capacity = min(limits.connections, descriptors)
        self._limits = limits
        # A dict preserves the order of insertion: the first connection of a state is the oldest.
        self._members: dict[ConnectionState, dict[Guarded, float]] = {state: {} for state in ConnectionState}

    def members(self, *states: ConnectionState) -> list[Guarded]:
        """Return the connections in these states (default: all), the oldest of each state first. Thread-safe."""
        return [member for state in states or ConnectionState for member in self._members[state].copy()]

    def make_room(self) -> bool:
        """Return True if a new connection fits, after an eviction if necessary."""
        return sum(map(len, self._members.values())) < self.capacity or self.evict()

    def move(self, member: Guarded, state: ConnectionState | None) -> None:
        """Record the new state of a connection; None means closed."""
        if member.state is not None:
            del self._members[member.state][member]
        member.state, member.body = state, b""
        if state is not None:
            self._members[state][member] = time.monotonic()

    def begin_writing(self, member: Guarded, body: bytes) -> None:
        """Record that a connection sends a response, and evict the oldest writers until the bodies fit."""
        self.move(member, ConnectionState.WRITING)
        member.body = body
        for oldest in self.members(ConnectionState.WRITING):
            # A body sent by several connections is a shared object and counts once.
            bodies = {id(writer.body): len(writer.body) for writer in self._members[ConnectionState.WRITING]}
            if oldest is member or sum(bodies.values()) <= self._limits.bytes_in_flight:
                return
            self._end(oldest)

    def progress(self, member: Guarded) -> None:
        """Record that the peer of a writing connection has read a part of the response."""
        writing = self._members[ConnectionState.WRITING]
        if writing.pop(member, None) is not None:
            writing[member] = time.monotonic()

    def evict(self) -> bool:
        """Close the connection with the lowest priority; returns False if all responses are being rendered or read."""
        stalled_before = time.monotonic() - self._limits.stalled_seconds
        for state in (ConnectionState.WRITING, ConnectionState.INCOMPLETE, ConnectionState.IDLE):
            for member, progress_at in self._members[state].items():
                if state is ConnectionState.WRITING and progress_at > stalled_before:
                    break
                self._end(member)
                return True
        return False

    def _end(self, member: Guarded) -> None:
        self.move(member, None)
        member.evict()
