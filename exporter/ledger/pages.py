"""Pages: the numbers that collectors keep, in state files of their own.

Runs in the sidecar; each page is used by one collector's thread. Rows of numbers come in and go out as JSON, so that a
person can read them: `[[["total", "0", "trainer"], [12.5, 0.75, null]], …]`. A page is kept per machine: on shared
storage every machine counts what is its own.
"""

from __future__ import annotations

from exporter.collectors.keeping import Rows
from exporter.errors import CollectError, StateError
from exporter.ledger import codec
from exporter.ledger.store import StateKey, StateStore


class Pages:
    """Makes pages; `exporter.collectors.keeping.Keeper`."""

    def __init__(self, state: StateStore) -> None:
        self._state = state

    def page(self, subject: str, name: str = "") -> StoredPage:
        """Name a page of a collector, and of a run where it has one for each; nothing is touched yet."""
        return StoredPage(self._state, ("page", name, subject, self._state.keeper))


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
            return self._state.load(self._key, lambda content: codec.loads(Rows, content)) or {}
        except StateError as error:
            raise CollectError(str(error), reason="state") from error

    def save(self, rows: Rows) -> None:
        """Replace it.

        Raises:
            CollectError: `state`: what was saved before is still there.
        """
        try:
            self._state.save(self._key, codec.dumps(rows))
        except StateError as error:
            raise CollectError(f"totals are withheld: {error}", reason="state") from error

    def close(self) -> None:
        """Let another sidecar keep it."""
        self._state.release(self._key)
