"""Options that all collectors share. A collector with more options defines a subclass in its own module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any

from exporter.config.options import Duration, Glob, Notation, Range, format_duration, option

Interval = Annotated[Duration, Range(0.1, 86400)]
_IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_]*"
ClassName = Annotated[
    str,
    Notation(
        "a class such as my_package.queue:QueueCollector", rf"^{_IDENTIFIER}(\.{_IDENTIFIER})*:{_IDENTIFIER}$"
    ),
]
Patterns = tuple[Glob, ...]

INTERVAL_HELP = "Time from the start of one collection to the start of the next."
DEADLINE_HELP = "A collection that takes longer counts as failed; other collectors do not wait longer for it."


@dataclass(frozen=True, slots=True)
class CollectorOptions:
    """Options of a collector of local files."""

    enabled: bool = option(True, "Run this collector.")
    interval: Interval = option(10.0, INTERVAL_HELP)
    deadline: Interval = option(8.0, DEADLINE_HELP)

    @property
    def effective_deadline(self) -> float:
        """Deadline in seconds, but at most the interval."""
        return min(self.deadline, self.interval)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield a problem if a configured deadline is longer than the interval. A default is shortened instead."""
        default_deadline = next(entry.default for entry in fields(self) if entry.name == "deadline")
        if self.deadline != default_deadline and self.deadline > self.interval:
            message = (
                f"{format_duration(self.deadline)} is above the interval {format_duration(self.interval)}"
            )
            yield "deadline", message

    def own_options(self) -> dict[str, Any]:
        """Return the options that not all collectors share, as keyword arguments of the collector's factory."""
        common_names = {entry.name for entry in fields(CollectorOptions)}
        return {
            entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name not in common_names
        }


@dataclass(frozen=True, slots=True)
class FrequentOptions(CollectorOptions):
    """Options of a collector of energy, or of the resource use by which energy is divided among runs."""

    interval: Interval = option(5.0, INTERVAL_HELP)
    deadline: Interval = option(4.0, DEADLINE_HELP)


@dataclass(frozen=True, slots=True)
class SlowOptions(CollectorOptions):
    """Options of a collector of slow sources, such as network filesystems."""

    interval: Interval = option(15.0, INTERVAL_HELP)
    deadline: Interval = option(10.0, DEADLINE_HELP)


@dataclass(frozen=True, slots=True)
class RareOptions(CollectorOptions):
    """Options of a collector of values that rarely change."""

    interval: Interval = option(60.0, INTERVAL_HELP)
    deadline: Interval = option(20.0, DEADLINE_HELP)


@dataclass(frozen=True, slots=True)
class ExtraOptions(SlowOptions):
    """Options of third-party collectors."""

    classes: tuple[ClassName, ...] = option(
        (), "Collector classes as prometheus_client defines them, module:Class."
    )
