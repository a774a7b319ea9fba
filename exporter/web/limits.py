"""Every limit of the web server, in one place, so that a test can shorten what it is not about.

All times are deadlines of a whole phase, never of one read: a peer that sends a byte a second gains nothing by it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What one peer, and all peers together, may cost."""

    head_seconds: float = 5.0  # TLS handshake and first head; the rest of a later head from its first byte on
    head_bytes: int = 16 * 1024
    head_lines: int = 64
    idle_seconds: float = 75.0  # from an answer to the first byte of the next head
    render_seconds: float = 9.5  # from the end of a head until its answer is made, passwords included
    scrape_timeout_offset_seconds: float = 0.5  # how much earlier than Prometheus gives up
    write_seconds: float = 10.0  # until the kernel has taken a whole answer
    stalled_seconds: float = 1.0  # in writing, before an answer may be given up for a newcomer
    farewell_seconds: float = 1.0  # for reading what a peer still sends after the last answer
    farewell_bytes: int = 4 * 1024 * 1024
    drain_seconds: float = 8.0  # for answers in the making when the server stops
    connections: int = 512  # fewer where the limit of open files is low
    spare_files: int = 64  # descriptors left to the rest of the process
    backlog: int = 1024
    accept_pause_seconds: float = 0.05  # after a failure to accept, so that it cannot spin
    file_check_seconds: float = 1.0  # how often web.config.yml and its files are looked at
    passwords_waiting: int = 256  # checks, of all peers
    passwords_waiting_per_peer: int = 64
    bytes_in_flight: int = 32 * 1024 * 1024  # bodies being sent, each once; beyond it the oldest writers end


DEFAULT_LIMITS = Limits()
"""What is used unless a test says otherwise."""
