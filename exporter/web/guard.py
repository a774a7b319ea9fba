"""Connection guard: the connections of a server by state, their limit, and the order of eviction."""

from __future__ import annotations

import enum
import resource
import time
from typing import Protocol

from exporter.web.http import Limits


class ConnectionState(enum.Enum):
    """Activity of a connection. The value is the label `state`."""

    INCOMPLETE = "incomplete"  # TLS handshake or head missing
    IDLE = "idle"  # between two requests, or closing
    RUNNING = "running"  # the response is being rendered
    WRITING = "writing"  # the response is being sent


class GuardedConnection(Protocol):
    """Interface of a connection that the guard may close."""

    state: ConnectionState | None
    body: bytes

    def evict(self) -> None:
        """Close the connection to make room."""


class ConnectionGuard:
    """Limit on the connections of a server and on the bytes of their responses.

    The server has no room for a new connection if the limit is reached or no file descriptor is free. The guard then closes one
    connection, the first of these that exists:

    1. of the stalled responses, the one whose peer has not read for the longest time;
    2. the oldest incomplete connection;
    3. the oldest idle connection.

    A response that is being rendered or read is not closed for a new connection. The incomplete connections of a flood are therefore
    closed before the connection of a scraper, which sends its request and reads the response at once.

    If the bodies of all responses together exceed `bytes_in_flight`, the guard closes writing connections until the bodies fit. It first
    closes those whose last progress is longest ago.
    """

    def __init__(self, limits: Limits) -> None:
        open_file_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        is_unlimited = open_file_limit == resource.RLIM_INFINITY
        descriptors = limits.connections if is_unlimited else max(16, open_file_limit - limits.spare_files)
        self.capacity = min(limits.connections, descriptors)
        self._limits = limits
        # A dict preserves the order of insertion: the first connection of a state has had no progress for the longest time.
        self._members: dict[ConnectionState, dict[GuardedConnection, float]] = {
            state: {} for state in ConnectionState
        }

    def members(self, *states: ConnectionState) -> list[GuardedConnection]:
        """Return the connections in these states (default: all). Thread-safe.

        In each state, the connection without progress for the longest time comes first.
        """
        return [member for state in states or ConnectionState for member in self._members[state].copy()]

    def make_room(self) -> bool:
        """Return True if a new connection fits, after an eviction if necessary."""
        return sum(map(len, self._members.values())) < self.capacity or self.evict_one()

    def set_state(self, member: GuardedConnection, state: ConnectionState | None) -> None:
        """Record a state of a connection, None if it is closed. The connection becomes the one with the latest progress."""
        if member.state is not None:
            del self._members[member.state][member]
        member.state, member.body = state, b""
        if state is not None:
            self._members[state][member] = time.monotonic()

    def begin_writing(self, member: GuardedConnection, body: bytes) -> None:
        """Record that a connection sends a response, and close the longest-waiting writers until the bodies fit."""
        self.set_state(member, ConnectionState.WRITING)
        member.body = body
        for longest_waiting in self.members(ConnectionState.WRITING):
            # A body sent by several connections is a shared object and counts once.
            bodies = {id(writer.body): len(writer.body) for writer in self._members[ConnectionState.WRITING]}
            if longest_waiting is member or sum(bodies.values()) <= self._limits.bytes_in_flight:
                return
            self._end(longest_waiting)

    def record_progress(self, member: GuardedConnection) -> None:
        """Record that the peer of a writing connection has read a part of the response."""
        writing = self._members[ConnectionState.WRITING]
        if writing.pop(member, None) is not None:
            writing[member] = time.monotonic()

    def evict_one(self) -> bool:
        """Close the connection that is first in the order of eviction.

        Returns False if there is none, because all responses are being rendered or read.
        """
        stalled_before = time.monotonic() - self._limits.stalled_seconds
        for state in (ConnectionState.WRITING, ConnectionState.INCOMPLETE, ConnectionState.IDLE):
            for member, progress_at in self._members[state].items():
                if state is ConnectionState.WRITING and progress_at > stalled_before:
                    break
                self._end(member)
                return True
        return False

    def _end(self, member: GuardedConnection) -> None:
        """Close a connection. Its room is free at once, before its task ends."""
        self.set_state(member, None)
        member.evict()
