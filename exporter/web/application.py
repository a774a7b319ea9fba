"""What the web server asks of the rest of the sidecar: one seam, filled in by the composition root."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from exporter.exposition.negotiation import Format


@dataclass(frozen=True, slots=True)
class Document:
    """A page for people.

    Attributes:
        body: HTML.
        policy: The Content-Security-Policy that it is sent with.
    """

    body: bytes
    policy: str


class Application(Protocol):
    """The sidecar behind the web server.

    All but `not_ready` are called on worker threads, several at a time, and may take their time: a slow one
    costs its own answers (503) and nothing else.
    """

    def metrics(self, form: Format, names: frozenset[str]) -> bytes:
        """The page, of the families of these names alone unless there are none."""
        ...

    def not_ready(self) -> str | None:
        """Why a scrape would be wrong now; None when it would be right.

        Called on the server's loop at every scrape: it must answer from memory.
        """
        ...

    def landing(self) -> Document:
        """The status page, which needs nothing from elsewhere."""
        ...

    def reload(self) -> None:
        """Read the configuration again and use it.

        Raises:
            ConfigurationError: It is wrong; the old one stays in use.
        """
        ...

    def configuration(self) -> str:
        """The configuration in effect, secrets hidden."""
        ...
