"""Public event API: `log`, `enabled`, `limit`, and the registration of handlers.

`log` and `enabled` never raise. The other functions raise for invalid arguments.
"""

from __future__ import annotations

from typing import Any

from exporter.errors import DefinitionError
from exporter.recording.conversion import safe_repr, to_name
from exporter.recording.identity import clean_text
from exporter.recording.recorder import RECORDER

__all__ = ["Namespace", "enabled", "limit", "log", "namespace", "recent", "register", "unregister"]

MAX_NAMESPACE_CHARACTERS = 100
"""Maximum length of the name of a namespace."""

EVENTS = RECORDER.events
"""Event log of this process."""

log = EVENTS.log
enabled = EVENTS.enabled
register = EVENTS.register
unregister = EVENTS.unregister
limit = EVENTS.limit
recent = EVENTS.recent


class Namespace:
    """Events of a library, whose types are prefixed with the name of the library, so that they differ from other libraries' types."""

    def __init__(self, name: str) -> None:
        self.name = name

    def log(self, type: str, message: str | None = None, **arguments: Any) -> None:
        """Log an event of this namespace, with the arguments of `exporter.log`."""
        log(f"{self.name}.{to_name(type)}", message, **arguments)

    def enabled(self, type: str, severity: str = "info") -> bool:
        """Return True if an event of this type would be recorded."""
        return enabled(f"{self.name}.{to_name(type)}", severity)

    def __repr__(self) -> str:
        return f"<Namespace {self.name!r}>"


def namespace(name: str) -> Namespace:
    """Return the namespace of a library. Raises DefinitionError for an invalid name."""
    if (
        not isinstance(name, str)
        or not name
        or clean_text(name) != name
        or len(name) > MAX_NAMESPACE_CHARACTERS
    ):
        allowed = f"printable text of 1 to {MAX_NAMESPACE_CHARACTERS} characters"
        message = f"name must be {allowed}, not {safe_repr(name)}"
        raise DefinitionError(message, field="name", found=name, allowed=allowed)
    return Namespace(name)
