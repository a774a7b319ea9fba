"""Pages: numbers of this machine that outlive the sidecar, which the ledger puts into its state files, one a page."""

from __future__ import annotations

from typing import Protocol

Rows = dict[tuple[str, ...], tuple[float | None, ...]]
"""Numbers by name. What a place in a row means is a contract: new ones are added at the end only."""


class Page(Protocol):
    """The rows of one subject; all of them are saved, or nothing."""

    def load(self) -> Rows | None:
        """Give what was last saved, empty when there is nothing; None while another sidecar keeps it.

        Raises:
            CollectError: `state`: it cannot be read now.
        """
        ...

    def save(self, rows: Rows) -> None:
        """Replace it; to be called after a `load` that gave rows, from one thread at a time.

        Raises:
            CollectError: `state`: what was saved before is still there.
        """
        ...

    def close(self) -> None:
        """Let another sidecar keep it."""
        ...


class Keeper(Protocol):
    """Where pages are."""

    def page(self, subject: str, name: str = "") -> Page:
        """Name a page of a collector, such as that of a run; nothing is touched yet."""
        ...


class Fleeting:
    """A keeper, and its empty pages, that end with the process: for a collector that stands on its own."""

    def page(self, subject: str, name: str = "") -> Page:
        """Give a page that is empty."""
        del subject, name
        return self

    def load(self) -> Rows:
        """Give nothing."""
        return {}

    def save(self, rows: Rows) -> None:
        """Keep nothing."""

    def close(self) -> None:
        """Do nothing."""
