"""Every limit of the web server, in one place, so that a test can shorten what it is not about.

Used in the sidecar. Pure values.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What one peer, and all peers together, may cost.

    All times are deadlines of a whole phase, never of one read: a peer that sends a byte a second gains
    nothing by it.

    Attributes:
        head_seconds: TLS handshake and first head together; the rest of a later head from its first byte on.
        idle_seconds: From an answer to the first byte of the next head.
        render_seconds: From the end of a head to the end of its answer's making, passwords included.
        scrape_timeout_offset_seconds: How much earlier than Prometheus gives up the answer is given.
        write_seconds: Until the kernel has taken a whole answer.
        stalled_seconds: How long an answer must have been in writing before it may be given up for a
            newcomer, should everything else be in use.
        farewell_seconds: For reading what a peer still sends after the last answer.
        farewell_bytes: Likewise, in bytes.
        drain_seconds: For answers in the making when the server stops.
        head_bytes: Request line and header fields.
        head_lines: Likewise, in lines.
        connections: At most; fewer where the limit of open files is low.
        spare_files: Descriptors left to the rest of the process under that limit.
        backlog: Connections that the kernel keeps ready for us.
        accept_pause_seconds: Rest after a failure to accept, so that it cannot spin; a tenth of it where room
            could be made.
        file_check_seconds: How often at most web.config.yml and its files are looked at.
        passwords_waiting: Password checks in progress or waiting, of all peers.
        passwords_waiting_per_peer: Likewise, of one address.
        bytes_in_flight: Bodies that are being sent, each counted once; beyond it the oldest writers end.
        verdicts: Remembered password checks, of right and of wrong ones each.
    """

    head_seconds: float = 5.0
    idle_seconds: float = 75.0
    render_seconds: float = 9.5
    scrape_timeout_offset_seconds: float = 0.5
    write_seconds: float = 10.0
    stalled_seconds: float = 1.0
    farewell_seconds: float = 1.0
    farewell_bytes: int = 4 * 1024 * 1024
    drain_seconds: float = 8.0
    head_bytes: int = 16 * 1024
    head_lines: int = 64
    connections: int = 512
    spare_files: int = 64
    backlog: int = 1024
    accept_pause_seconds: float = 0.05
    file_check_seconds: float = 1.0
    passwords_waiting: int = 256
    passwords_waiting_per_peer: int = 64
    bytes_in_flight: int = 32 * 1024 * 1024
    verdicts: int = 256


DEFAULT_LIMITS = Limits()
"""What is used unless a test says otherwise."""
