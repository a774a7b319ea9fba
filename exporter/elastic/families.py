"""Families of torchelastic's metrics: from (group, name) to a Stat, its unit where Prometheus wants it.

Used in the training process and in torchrun's agent, on the thread that emits. A pair (group, name) is looked up once and
is from then on a function that takes values; it never raises and takes no lock. What is refused is counted by reason in
`training_elastic_refused_total`. The Stats are drained by the recording thread, and what holds for them when a process
dies holds here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from exporter.elastic.agent import GROUP, PLATFORM, Record
from exporter.errors import DefinitionError
from exporter.recording.identity import clean_text
from exporter.recording.notices import tell_once
from exporter.recording.stat import Stat, metric
from exporter.recording.values import Aggregation

LONGEST = 150
"""Characters of a Stat's name made here: its families append to it."""

_WORD = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
_UNITS: dict[str, tuple[str, float, float]] = {
    word: (unit, times, per)
    for words, unit, times, per in (
        ("ms msec msecs millis milliseconds", "seconds", 1, 1e3),
        ("us usec usecs micros microseconds", "seconds", 1, 1e6),
        ("ns nsec nsecs nanos nanoseconds", "seconds", 1, 1e9),
        ("s sec secs second seconds", "seconds", 1, 1),
        ("minutes", "seconds", 60, 1),
        ("hours", "seconds", 3600, 1),
        ("bytes", "bytes", 1, 1),
        ("kib", "bytes", 1 << 10, 1),
        ("mib", "bytes", 1 << 20, 1),
        ("gib", "bytes", 1 << 30, 1),
        ("ratio", "ratio", 1, 1),
        ("percent pct", "ratio", 1, 100),
    )
    for word in words.split()
}
"""The last word of a metric's name, when it is a unit: the base unit, and what its values are multiplied and
divided by. Words of two meanings (`min`, `mb`) are no units."""


@dataclass(frozen=True, slots=True)
class MetricName:
    """What a pair becomes.

    Attributes:
        stat: The Stat's name, the unit not in it.
        unit: A base unit, None for a plain number.
        times: Values are multiplied by this,
        per: then divided by this, to be in the unit.
    """

    stat: str
    unit: str | None
    times: float = 1
    per: float = 1

    @property
    def family(self) -> str:
        """The name of its main family; pairs that share it cannot be told apart."""
        return self.stat.replace(".", "_") + (f"_{self.unit}" if self.unit else "")


def metric_name(group: object, name: object) -> MetricName | None:
    """Name the Stat of a pair: `<group>.<name>`, the unit moved to where Prometheus wants it.

    Returns:
        None when nothing is left that could be a name, or it is too long.
    """
    if any(isinstance(text, str) and len(text) > LONGEST for text in (group, name)):
        return None
    words = [*_words(group), *_words(name)]
    unit, times, per = None, 1.0, 1.0
    if words:
        head, separator, last = words[-1].rpartition("_")
        if last.lower() in _UNITS and (head or (not separator and len(words) > 1)):
            unit, times, per = _UNITS[last.lower()]
            words[-1:] = [head] if head else []
    stat = ".".join(words)
    if not any(character in _WORD for character in stat) or len(stat) > LONGEST:
        return None
    if not stat[0].isalpha():
        stat = f"elastic.{stat}"
    return MetricName(stat, unit, times, per)


def _words(text: object) -> list[str]:
    """Split at the dots; what is neither a letter nor a digit becomes an underscore."""
    shown = "" if text is None else text_of(text)
    folded = "".join([character if character in _WORD or character == "." else "_" for character in shown])
    return [word for word in folded.split(".") if word]


def text_of(value: object) -> str:
    """Show a group or a name, whatever it is, in bounded printable text; runs none of its code."""
    if isinstance(value, str):
        return clean_text(str.__str__(value))
    return str(value) if type(value) in {int, float, bool} else type(value).__name__


# Stats ---------------------------------------------------------------------------------------------------------

MOST_NAMES = 1000
"""Pairs of one process; what comes beyond them is refused and counted. Names made of steps or of hosts run away."""
MOST_REFUSED = 1000
"""Refused pairs that are remembered, so that they need not be looked at again."""

_NUMBER = frozenset({Aggregation.VALUE, Aggregation.MEAN, Aggregation.MAX})
_DURATION = frozenset({Aggregation.HISTOGRAM, Aggregation.MEAN, Aggregation.MAX})


class MetricStats:
    """The Stats behind the pairs of one process."""

    def __init__(self) -> None:
        self._owners: dict[str, tuple[object, object]] = {}
        self._accepted: dict[tuple[object, object], Record] = {}
        self._refused: dict[tuple[object, object], Record] = {}

    def accepted(self, group: object, name: object) -> Record | None:
        """Give the function that takes the values of a pair, None where the pair is refused; never raises."""
        try:
            pair = (group, name)
            record = self._accepted.get(pair)
            if record is None and pair not in self._refused:
                self._look_at(pair)
                record = self._accepted.get(pair)
        except Exception:  # noqa: BLE001  # their own __hash__, __eq__ and the like
            return None
        return record

    def record(self, group: object, name: object, value: object) -> None:
        """Take one value; never raises."""
        record = self.accepted(group, name)
        if record is not None:
            record(value)
            return
        try:
            self._refused.get((group, name), refuse("too_many"))(value)
        except Exception:  # noqa: BLE001  # as above
            refuse("name")(value)

    def _look_at(self, pair: tuple[object, object]) -> None:
        """Accept or refuse a new pair; two threads may do so at once, and come to the same end."""
        platform = PLATFORM.recorder(pair[1]) if pair[0] == GROUP else None
        if platform is not None:
            self._accepted[pair] = platform
            return
        named = metric_name(*pair)
        if named is None:
            reason = "name"
        elif len(self._owners) >= MOST_NAMES and named.family not in self._owners:
            reason = "too_many"
        elif self._owners.setdefault(named.family, pair) != pair:
            reason = "collision"
            _tell(pair, f"another pair is the family {named.family} already; choose other names")
        else:
            try:
                self._accepted[pair] = _recorder(named, pair)
            except DefinitionError as error:
                reason = "definition"
                _tell(pair, str(error))
            else:
                return
        # Only of a bounded size and number: a name may be of any length.
        if named is not None and len(self._refused) < MOST_REFUSED:
            self._refused[pair] = refuse(reason)


def _recorder(named: MetricName, pair: tuple[object, object]) -> Record:
    group, name = map(text_of, pair)
    stat = Stat(
        named.stat,
        _DURATION if named.unit == "seconds" else _NUMBER,
        unit=named.unit,
        help=f"Metric {name} of torchelastic's group {group}.",
    )
    add, add_tensor, times, per = stat.add, stat.add_tensor, named.times, named.per

    def record_other(value: object) -> None:
        """Take what is neither int nor float; the Stat counts what is no number."""
        torch = sys.modules.get("torch")
        try:
            if per != 1 or times != 1:
                value = value * times / per  # type: ignore[operator]  # what cannot is left as it is
        except Exception:  # noqa: BLE001, S110  # any object's own arithmetic
            pass
        if torch is not None and isinstance(value, torch.Tensor):
            add_tensor(value)
        else:
            add(value)  # type: ignore[arg-type]  # as above

    def record(value: object) -> None:
        kind = type(value)
        if kind is int or kind is float:
            add(value)  # type: ignore[arg-type]  # mypy does not narrow by a type in a variable
        else:
            record_other(value)

    def record_scaled(value: object) -> None:
        kind = type(value)
        if kind is int or kind is float:
            try:
                add(value * times / per)  # type: ignore[operator]  # as above
            except OverflowError:  # such an int is beyond floating point; the Stat counts it
                add(value)  # type: ignore[arg-type]  # as above
        else:
            record_other(value)

    return record if times == 1 and per == 1 else record_scaled


def _tell(pair: tuple[object, object], why: str) -> None:
    group, name = map(text_of, pair)
    tell_once(f"elastic {group} {name}", f"the metric {name} of group {group} is not recorded: {why}")


STATS = MetricStats()
"""Those of this process; a forked child goes on with the same Stats, which begin at zero there."""


# Refusals ------------------------------------------------------------------------------------------------------

_REFUSE: dict[str, Callable[[object], None]] = {}


def refuse(reason: str) -> Callable[[object], None]:
    """Give the function that takes values which are not recorded, and counts them."""
    found = _REFUSE.get(reason)
    if found is None:
        found = _REFUSE[reason] = _counting(reason)
    return found


def _counting(reason: str) -> Callable[[object], None]:
    try:
        add = metric("counter", "training.elastic.refused", labels={"reason": reason})
    except DefinitionError:  # a defect of ours, which must not reach the job
        return lambda value: None  # noqa: ARG005  # it takes what it is given
    return lambda value: add(1)  # noqa: ARG005  # likewise
