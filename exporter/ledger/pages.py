"""Pages: the numbers that collectors keep, in state files of their own.

Runs in the sidecar; each page is used by one collector's thread, and the store sees to it that they do not meet.
Rows of numbers come in and go out as JSON lines, so that a person can read them:

    [["total", "0", "trainer"], [12.5, 0.75, null]]

A page is kept per machine: its name in the store ends with the sidecar's, so that on shared storage every
machine counts what is its own. What the ledger promises for ranks holds here too: a file is replaced as a
whole, one sidecar at a time keeps it, and a damaged one is moved aside, never read as zero in silence.
"""

from __future__ import annotations

import json

from exporter.collectors.keeping import Rows
from exporter.errors import CollectError, StateError
from exporter.ledger import stored
from exporter.ledger.state import StateKey, StateStore

_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Pages:
    """Makes pages; `exporter.collectors.keeping.Keeper`.

    Args:
        state: Where they are stored.
    """

    def __init__(self, state: StateStore) -> None:
        self._state = state

    def page(self, subject: str, name: str = "") -> StoredPage:
        """Name a page; nothing is touched yet."""
        # Five parts: keys of four are those of ranks.
        return StoredPage(self._state, ("page", subject, name, self._state.keeper, ""))


class StoredPage:
    """One state file; `exporter.collectors.keeping.Page`."""

    def __init__(self, state: StateStore, key: StateKey) -> None:
        self._state = state
        self._key = key

    def load(self) -> Rows | None:
        """Claim the page and read it; None while another sidecar keeps it.

        Raises:
            CollectError: `state`: it cannot be read now.
        """
        try:
            if not self._state.claim(self._key):
                return None
            return self._state.load(self._key, decode_rows) or {}
        except StateError as error:
            raise CollectError(str(error), reason="state") from error

    def save(self, rows: Rows) -> None:
        """Replace it.

        Raises:
            CollectError: `state`: what was saved before is still there.
        """
        try:
            self._state.save(self._key, encode_rows(rows))
        except StateError as error:
            raise CollectError(f"totals are withheld: {error}", reason="state") from error

    def close(self) -> None:
        """Let another sidecar keep it."""
        self._state.release(self._key)


def encode_rows(rows: Rows) -> bytes:
    """Write rows, one a line."""
    return "".join(f"{_dumps([name, values])}\n" for name, values in rows.items()).encode("ascii")


def decode_rows(content: bytes) -> Rows:
    """Read them back.

    Raises:
        ValueError: It is not what `encode_rows` writes.
    """
    rows: Rows = {}
    try:
        for line in content.splitlines():
            name, values = json.loads(line)
            rows[tuple(stored.text(part) for part in name)] = tuple(
                None if value is None else stored.number(value) for value in values
            )
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return rows
