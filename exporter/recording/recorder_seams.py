"""What the recorder works with: where recordings go, and the events and the training recorded beside the Stats.

Used in the training process. The recorder knows none of them: they are loaded later, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from exporter.recording.overrides import Rule
from exporter.recording.values import NO_EVENTS, EventsReading, Recording, StatReading, TrainingReading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Sink(Protocol):
        """Where recordings go; a new one for each process."""

        @property
        def problem(self) -> str | None:
            """Why the last recording did not arrive, None when it did."""
            ...

        @property
        def notice(self) -> str | None:
            """What the job's operator should know."""
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

    class Training(Protocol):
        """What the recorder asks of the recording of training."""

        def in_use(self) -> bool:
            """Whether anything was told."""
            ...

        def drain(self, give_way: Callable[[], None]) -> None:
            """Interpret what was told up to now, and give way between two pieces."""
            ...

        def tick(self, give_way: Callable[[], None]) -> None:
            """Do the same where much is waiting."""
            ...

        def series(self) -> Sequence[StatReading]:
            """Read its families."""
            ...

        def reading(self) -> TrainingReading | None:
            """Tell what the families do not."""
            ...

        def settle(self) -> None:
            """Count what may still be corrected."""
            ...

        def collect(self) -> None:
            """Take the values of the calling thread's tensors that have arrived."""
            ...

        def flush(self, timeout_seconds: float) -> bool:
            """Give exporters time to take what was recorded."""
            ...

        def close(self) -> None:
            """Give exporters a bounded time to end."""
            ...

        def reset(self) -> None:
            """Count from zero."""
            ...

        def after_fork(self) -> None:
            """In a forked child: forget what the parent recorded."""
            ...


class NoTraining:
    """Stands for the recording of training in a process that does not use it: it is not loaded."""

    def in_use(self) -> bool:
        """It is not."""
        return False

    def drain(self, give_way: Callable[[], None]) -> None:
        """There is nothing to interpret."""

    tick = drain

    def series(self) -> Sequence[StatReading]:
        """There are no families."""
        return ()

    def reading(self) -> TrainingReading | None:
        """There is nothing to tell."""
        return None

    def flush(self, timeout_seconds: float) -> bool:
        """Nobody waits for anything."""
        return timeout_seconds >= 0

    def settle(self) -> None:
        """There is nothing to count."""

    collect = close = reset = after_fork = settle


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
