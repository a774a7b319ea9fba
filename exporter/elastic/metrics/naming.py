"""From torchelastic's (group, name) to a Stat's name and unit; pure functions, no state.

Used in the training process and in torchrun's agent. Any two values come in, hostile ones included; what goes out
is fit for a Stat or None.
"""

from __future__ import annotations

from dataclasses import dataclass

from exporter.recording.identity import clean_text

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
