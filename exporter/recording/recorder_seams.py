"""What the recorder works with: where recordings go, and the events that are recorded beside the Stats.

Used in the training process. The recorder knows neither the feed nor the event log, which are loaded later or never.
"""

from __future__ import annotations

from collections.abc import Sequence

from exporter.recording.overrides import Rule
from exporter.recording.values import NO_EVENTS, EventsReading, Recording

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Sink(Protocol):
        """Where recordings go; a new one for each process."""

        @property
        def problem(self) -> str | None:
            """Why the last recording did not arrive, None when it did."""
            ...

        def publish(self, recording: Recording) -> bool:
            """Take one recording; never raises, says whether it arrived."""
            ...

        def close(self) -> None:
            """Nothing more will come; never raises."""
            ...

    class Events(Protocol):
        """What the recorder asks of the event log."""

        def in_use(self) -> bool:
            """Whether anything was logged or registered."""
            ...

        def reading(self) -> EventsReading:
            """Tell all."""
            ...

        def override(self, rules: Sequence[Rule]) -> list[str]:
            """Put rules in force; gives what is wrong with them."""
            ...

        def tick(self) -> None:
            """Do what is due."""
            ...

        def flush(self, timeout_seconds: float) -> bool:
            """Give handlers time to take what was logged."""
            ...

        def close(self) -> None:
            """Give handlers a bounded time to end."""
            ...

        def reset(self) -> None:
            """Count from zero."""
            ...

        def renew(self) -> None:
            """Ask anew who this process is."""
            ...

        def after_fork(self) -> None:
            """In a forked child: forget what the parent recorded."""
            ...


class NoEvents:
    """Stands for the event log in a process that logs nothing: loading it is a fifth of what `import exporter` costs.

    Attributes:
        rules: What an event log that is loaded later has to obey.
    """

    def __init__(self) -> None:
        self.rules: Sequence[Rule] = ()

    def in_use(self) -> bool:
        """It is not."""
        return False

    def reading(self) -> EventsReading:
        """There is nothing to tell."""
        return NO_EVENTS

    def override(self, rules: Sequence[Rule]) -> list[str]:
        """Keep them for later."""
        self.rules = rules
        return []

    def flush(self, timeout_seconds: float) -> bool:
        """Nobody waits for anything."""
        return timeout_seconds >= 0

    def tick(self) -> None:
        """Nothing is due."""

    close = reset = renew = after_fork = tick
