"""Options of background collectors; a collector with options of its own has a subclass beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any

from exporter.config.options import Duration, Glob, Notation, Range, format_duration, option

Interval = Annotated[Duration, Range(0.1, 86400)]
_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
ClassName = Annotated[
    str, Notation("a class such as my_package.queue:QueueCollector", rf"^{_WORD}(\.{_WORD})*:{_WORD}$")
]
Patterns = tuple[Glob, ...]

INTERVAL = "Time from the start of one collection to the start of the next."
DEADLINE = "A collection that takes longer has failed. Nothing else waits for it."


@dataclass(frozen=True, slots=True)
class CollectorOptions:
    """Options of a collector of local files."""

    enabled: bool = option(True, "Run this collector.")
    interval: Interval = option(10.0, INTERVAL)
    deadline: Interval = option(8.0, DEADLINE)

    @property
    def effective_deadline(self) -> float:
        """Deadline in seconds, but at most the interval."""
        return min(self.deadline, self.interval)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Report a chosen deadline that is longer than the interval."""
        default = next(option.default for option in fields(self) if option.name == "deadline")
        if self.interval < self.deadline != default:
            message = (
                f"{format_duration(self.deadline)} is above the interval {format_duration(self.interval)}"
            )
            yield "deadline", message

    def own_options(self) -> dict[str, Any]:
        """Return the arguments of the collector's factory: the options that not every collector has."""
        common = {option.name for option in fields(CollectorOptions)}
        return {
            option.name: getattr(self, option.name) for option in fields(self) if option.name not in common
        }


@dataclass(frozen=True, slots=True)
class FrequentOptions(CollectorOptions):
    """Options of a collector of energy registers, which wrap, or of the use by which the energy is divided."""

    interval: Interval = option(5.0, INTERVAL)
    deadline: Interval = option(4.0, DEADLINE)


@dataclass(frozen=True, slots=True)
class SlowOptions(CollectorOptions):
    """Options of a collector of filesystems, which may wait for a server, and of other slow sources."""

    interval: Interval = option(15.0, INTERVAL)
    deadline: Interval = option(10.0, DEADLINE)


@dataclass(frozen=True, slots=True)
class RareOptions(CollectorOptions):
    """Options of a collector of values that hardly change."""

    interval: Interval = option(60.0, INTERVAL)
    deadline: Interval = option(20.0, DEADLINE)


@dataclass(frozen=True, slots=True)
class ExtraOptions(SlowOptions):
    """Options of third-party collectors."""

    classes: tuple[ClassName, ...] = option(
        (), "Collector classes as prometheus_client defines them, module:Class."
    )
