"""Families of torchelastic's metrics: from (group, name) to a Stat with a base unit.

Runs on the thread that emits a value. A pair of group and name is resolved to a function that records values, at its first value.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import NamedTuple

from exporter.elastic.agent import AGENT_METRICS, GROUP, RecordValue
from exporter.errors import DefinitionError
from exporter.recording.conversion import class_name
from exporter.recording.identity import clean_text
from exporter.recording.notices import log_once
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.recording.stat import Stat, create_series
from exporter.recording.value_class import Value, value_class
from exporter.recording.values import Aggregation

MAX_METRIC_NAME_CHARACTERS = 150
"""Maximum length of the name of a Stat, to which families append suffixes."""
MAX_METRICS = 1000
"""Maximum number of pairs. Further pairs, such as names with step numbers, are refused, and their values are counted."""

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
_UNITS: dict[str, tuple[str, float]] = {
    **dict.fromkeys(["ms", "msec", "msecs", "millis", "milliseconds"], ("seconds", 1e-3)),
    **dict.fromkeys(["us", "usec", "usecs", "micros", "microseconds"], ("seconds", 1e-6)),
    **dict.fromkeys(["ns", "nsec", "nsecs", "nanos", "nanoseconds"], ("seconds", 1e-9)),
    **dict.fromkeys(["s", "sec", "secs", "second", "seconds"], ("seconds", 1.0)),
    "minutes": ("seconds", 60.0),
    "hours": ("seconds", 3600.0),
    "bytes": ("bytes", 1.0),
    "kib": ("bytes", 2.0**10),
    "mib": ("bytes", 2.0**20),
    "gib": ("bytes", 2.0**30),
    "ratio": ("ratio", 1.0),
    **dict.fromkeys(["percent", "pct"], ("ratio", 1e-2)),
}
"""Base unit and factor by the suffix of a metric's name. Ambiguous suffixes (`min`, `mb`) are not units."""


class StatName(NamedTuple):
    """Name and unit of the Stat of a (group, name) pair."""

    stat: str  # name of the Stat, without unit
    unit: str | None  # base unit; None for a plain number
    factor: float = 1.0  # from the metric's unit to the base unit

    @property
    def family(self) -> tuple[str, str | None]:
        """Key of the family, which several pairs may share."""
        return self.stat.replace(".", "_"), self.unit


def find_stat_name(group: object, name: object) -> StatName | None:
    """Return the name of a pair's Stat, or None if no valid name remains or the name is too long."""
    if any(isinstance(text, str) and len(text) > MAX_METRIC_NAME_CHARACTERS for text in (group, name)):
        return None
    parts = [*_name_parts(group), *_name_parts(name)]
    unit, factor = None, 1.0
    if parts:
        head, separator, suffix = parts[-1].rpartition("_")
        if suffix.lower() in _UNITS and (head or (not separator and len(parts) > 1)):
            unit, factor = _UNITS[suffix.lower()]
            parts[-1:] = [head] if head else []
    stat = ".".join(parts)
    if unit is None and stat.replace(".", "_").endswith(("_total", "_bucket")):  # suffixes of Prometheus
        stat = f"{stat}_value"
    if not any(character in _NAME_CHARACTERS for character in stat) or len(stat) > MAX_METRIC_NAME_CHARACTERS:
        return None
    return StatName(stat if stat[0].isalpha() else f"elastic.{stat}", unit, factor)


def _name_parts(text: object) -> list[str]:
    """Return the parts of a text between dots. Characters other than letters and digits become underscores."""
    raw_text = "" if text is None else text_of(text)
    cleaned_text = "".join(
        [character if character in _NAME_CHARACTERS or character == "." else "_" for character in raw_text]
    )
    return [part for part in cleaned_text.split(".") if part]


def text_of(value: object) -> str:
    """Return a group or a name as printable text of bounded length, without running code of the object."""
    if isinstance(value, str):
        return clean_text(str.__str__(value))
    return str(value) if type(value) in {int, float, bool} else class_name(value)


# Stats ---------------------------------------------------------------------------------------------------------

Pair = tuple[object, object]
"""Group and name of a metric."""
_NUMBER_AGGREGATIONS = frozenset({Aggregation.VALUE, Aggregation.MEAN, Aggregation.MAX})
_DURATION_AGGREGATIONS = frozenset({Aggregation.HISTOGRAM, Aggregation.MEAN, Aggregation.MAX})


class MetricStats:
    """Stats of the (group, name) pairs of a process."""

    def __init__(self) -> None:
        self._records: dict[Pair, RecordValue] = {}
        self._families: dict[tuple[str, str | None], _Family] = {}

    def record(self, group: object, name: object, value: object) -> None:
        """Record a value. Never raises."""
        try:
            pair = (group, name)
            (self._records.get(pair) or self._resolve(pair))(value)
        except Exception as error:  # an unhashable group or name
            if is_from_signal_handler(error):
                raise
            refusal_recorder("name")(value)

    def _resolve(self, pair: Pair) -> RecordValue:
        """Return the function that records or refuses the values of a new pair. Later calls for the pair record in the same Stat."""
        group, name = pair
        record = AGENT_METRICS.recorder(name) if group == GROUP else None
        if record is None:
            if len(self._records) >= MAX_METRICS:
                return refusal_recorder("too_many")
            stat_name = find_stat_name(group, name)
            if stat_name is None:
                return refusal_recorder("name")  # not stored, because the name may be of any length
            try:
                record = self._recorder(stat_name, pair)
            except DefinitionError as error:
                # The family belongs to the exporter or to another Stat.
                message = f"the metric {text_of(name)} of group {text_of(group)} is not recorded"
                log_once(message, f"{message}: {error}")
                record = refusal_recorder("collision")
        self._records[pair] = record
        return record

    def _recorder(self, stat_name: StatName, pair: Pair) -> RecordValue:
        """Return the function that records the values of a pair. The second and later pairs of a family get labels."""
        group, name = map(text_of, pair)
        is_duration = stat_name.unit == "seconds"
        aggregations = _DURATION_AGGREGATIONS if is_duration else _NUMBER_AGGREGATIONS
        family = self._families.get(stat_name.family)
        if family is None:
            text = f"Metric {name} of torchelastic's group {group}."
            stat = Stat(stat_name.stat, aggregations, unit=stat_name.unit, help=text)
            self._families[stat_name.family] = _Family(stat, {(group, name): stat})
        elif (group, name) in family.stats:  # a concurrent call has created the Stat
            stat = family.stats[group, name]
        else:
            definition, labels = family.first_stat.definition, {"metric_group": group or "none"}
            if any(other_group == group for other_group, _ in tuple(family.stats)):
                labels["metric_name"] = name or "none"
            stat = family.stats[group, name] = Stat(
                definition.name, aggregations, unit=stat_name.unit, help=definition.help, labels=labels
            )
        return _recorder_of(stat, stat_name.factor)


@value_class
class _Family(Value):
    """Family with the Stats of the pairs that share it. The Stat of the first pair has no labels."""

    first_stat: Stat
    stats: dict[tuple[str, str], Stat]  # by group and name as text


def _recorder_of(stat: Stat, factor: float) -> RecordValue:
    """Return the function that records values, multiplied by *factor*, in a Stat."""
    add = stat.add

    def record(value: object) -> None:
        value_type = type(value)
        try:  # `suppress` would take a third of the time of a value
            value = value * factor  # type: ignore[operator]
        except Exception as error:  # a value that is not a number, which the Stat counts
            if is_from_signal_handler(error):
                raise
        torch = None if value_type is float or value_type is int else sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            stat.add_tensor(value)
        else:
            add(value)  # type: ignore[arg-type]  # the Stat counts values that are not numbers

    return record


STATS = MetricStats()
"""Stats of torchelastic's metrics in this process. A forked child has the same Stats, which count from zero."""


@cache
def refusal_recorder(reason: str) -> RecordValue:
    """Return the function that counts a refused value, or an exception of a handler, in `training_elastic_refused_total`."""
    add = create_series("counter", "training.elastic.refused", labels={"reason": reason})
    return lambda _value: add(1)
