"""Checking what a Stat is asked to be: one clear error, before anything is recorded.

Used in the training process, at construction. Pure functions, standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import isfinite

from exporter.errors import DefinitionError
from exporter.recording.values import Aggregation, StatDefinition

UNITS = (
    "seconds",
    "bytes",
    "ratio",
    "joules",
    "watts",
    "grams",
    "liters",
    "hertz",
    "celsius",
    "volts",
    "amperes",
    "meters",
    "flops",
    "tokens",
    "samples",
    "steps",
)
"""Base units and the nouns that a training job counts; a number without unit has none."""

_INSTEAD = {
    word: unit
    for unit, words in {
        "seconds": "s sec second ms milliseconds us microseconds ns nanoseconds minutes hours",
        "bytes": "b byte kb kib mb mib gb gib",
        "ratio": "% percent pct",
        "hertz": "mhz hz",
        "watts": "mw w",
        "joules": "kwh j mj",
        "grams": "kg",
    }.items()
    for word in words.split()
}

SHORTEST_WINDOW_SECONDS = 0.1
LONGEST_NAME = 200
LONGEST_LABEL_VALUE = 256
LONGEST_HELP = 500
MOST_LABELS = 16
MOST_BUCKETS = 200

DEFAULT_AGGREGATIONS = frozenset(
    {Aggregation.MEAN, Aggregation.MAX, Aggregation.P50, Aggregation.P90, Aggregation.P95, Aggregation.P99}
)

STEP_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
DEFAULT_BUCKETS: Mapping[str | None, tuple[float, ...]] = {
    "seconds": STEP_BUCKETS,
    "ratio": (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0),
    "bytes": tuple(float(1 << power) for power in range(10, 41, 3)),
}
OTHER_BUCKETS = (0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1e3, 1e4, 1e5, 1e6)

_TAKEN_LABELS = frozenset({"run", "rank", "worker", "role", "le", "quantile", "job", "instance"})
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_WORD = _LETTERS | frozenset("0123456789_")


def check_definition(
    name: str,
    aggregations: Iterable[Aggregation | str] | None = None,
    *,
    window_seconds: float | None = 60.0,
    window_samples: int | None = None,
    unit: str | None = None,
    help: str = "",
    labels: Mapping[str, str] | None = None,
    buckets: Iterable[float] | None = None,
    stale_seconds: float = 300.0,
    min_samples: int = 1,
) -> StatDefinition:
    """Make a definition, or say what is wrong with it.

    Raises:
        DefinitionError: Naming the value and the allowed ones.
    """
    wanted = DEFAULT_AGGREGATIONS if aggregations is None else check_aggregations(aggregations)
    seconds = check_window_seconds(window_seconds)
    samples = check_window_samples(window_samples)
    if seconds is None and samples is None:
        raise DefinitionError(
            "a Stat needs window_seconds, window_samples or both, not None for both",
            field="window_seconds",
            found=None,
            allowed=f"at least {SHORTEST_WINDOW_SECONDS} seconds, or at least 1 sample",
        )
    checked_unit = _check_unit(unit)
    if buckets is None:
        bounds = DEFAULT_BUCKETS.get(checked_unit, OTHER_BUCKETS) if Aggregation.HISTOGRAM in wanted else ()
    elif Aggregation.HISTOGRAM not in wanted:
        raise DefinitionError(
            "buckets are given, but Aggregation.HISTOGRAM is not among the aggregations",
            field="buckets",
            found=buckets,
            allowed="buckets only with HISTOGRAM",
        )
    else:
        bounds = check_buckets(buckets)
    return StatDefinition(
        name=_check_name(name),
        aggregations=wanted,
        window_seconds=seconds,
        window_samples=samples,
        unit=checked_unit,
        help=_check_help(help),
        labels=_check_labels(labels),
        buckets=bounds,
        stale_seconds=_check_number("stale_seconds", stale_seconds, at_least=1.0),
        min_samples=_check_min_samples(min_samples, samples),
    )


def check_aggregations(aggregations: Iterable[Aggregation | str]) -> frozenset[Aggregation]:
    """Take members of Aggregation or their lower-case values.

    Raises:
        DefinitionError: One of them is neither, or it is no collection.
    """
    allowed = [member.value for member in Aggregation]
    if isinstance(aggregations, str | Aggregation) or not isinstance(aggregations, Iterable):
        raise DefinitionError(
            f"aggregations must be a collection such as {{Aggregation.MEAN}}, not {aggregations!r}",
            field="aggregations",
            found=aggregations,
            allowed=allowed,
        )
    found = set()
    for each in aggregations:
        value = each.value if isinstance(each, Aggregation) else each
        if value not in allowed:
            raise DefinitionError(
                f"unknown aggregation {each!r}{_near(value, allowed)}; allowed: {', '.join(allowed)}",
                field="aggregations",
                found=each,
                allowed=allowed,
            )
        found.add(Aggregation(value))
    return frozenset(found)


def check_window_seconds(seconds: float | None) -> float | None:
    """Take a length of at least a tenth of a second, or None.

    Raises:
        DefinitionError: It is neither.
    """
    if seconds is None:
        return None
    return _check_number("window_seconds", seconds, at_least=SHORTEST_WINDOW_SECONDS)


def check_window_samples(samples: int | None) -> int | None:
    """Take a whole number of at least 1, or None.

    Raises:
        DefinitionError: It is neither.
    """
    if samples is None or (type(samples) is int and 1 <= samples <= 1_000_000_000):
        return samples
    raise DefinitionError(
        f"window_samples must be a whole number from 1 to 1000000000, not {samples!r}",
        field="window_samples",
        found=samples,
        allowed="1 to 1000000000, or None",
    )


def _check_min_samples(least: int, window_samples: int | None) -> int:
    most = 1_000_000_000 if window_samples is None else window_samples
    if type(least) is int and 1 <= least <= most:
        return least
    why = "" if window_samples is None else ", the window_samples,"
    raise DefinitionError(
        f"min_samples must be a whole number from 1 to {most}{why} not {least!r}",
        field="min_samples",
        found=least,
        allowed=f"1 to {most}",
    )


def check_buckets(buckets: Iterable[float]) -> tuple[float, ...]:
    """Take finite upper bounds in ascending order; `+Inf` is added at exposition.

    Raises:
        DefinitionError: They are not.
    """
    allowed = f"1 to {MOST_BUCKETS} finite numbers, ascending, without +Inf"
    try:
        bounds = tuple(float(bound) for bound in buckets)
        good = all(map(isfinite, bounds))
    except (TypeError, ValueError, OverflowError):
        bounds, good = (), False
    ascending = all(low < high for low, high in pairwise(bounds))
    if not (good and ascending and 1 <= len(bounds) <= MOST_BUCKETS):
        raise DefinitionError(
            f"buckets must be {allowed}, not {buckets!r}", field="buckets", found=buckets, allowed=allowed
        )
    return bounds


def _check_name(name: str) -> str:
    allowed = "letters, digits, '_' and '.', starting with a letter: training.batch.latency"
    words = name.split(".") if isinstance(name, str) else []
    if (
        not words
        or not all(words)
        or len(name) > LONGEST_NAME
        or name[0] not in _LETTERS
        or not _WORD.issuperset("".join(words))
    ):
        raise DefinitionError(
            f"a Stat's name must be {allowed} (at most {LONGEST_NAME} characters), not {_shown(name)}",
            field="name",
            found=name,
            allowed=allowed,
        )
    return name


def _check_unit(unit: str | None) -> str | None:
    if unit is None or unit in UNITS:
        return unit
    instead = _INSTEAD.get(unit.lower()) if isinstance(unit, str) else None
    hint = f"; record {instead} instead" if instead else _near(unit, UNITS)
    raise DefinitionError(
        f"unknown unit {_shown(unit)}{hint}; allowed: None, {', '.join(UNITS)}",
        field="unit",
        found=unit,
        allowed=UNITS,
    )


def _check_help(text: str) -> str:
    if isinstance(text, str) and len(text) <= LONGEST_HELP and text.isprintable():
        return text
    raise DefinitionError(
        f"help must be one printable line of at most {LONGEST_HELP} characters, not {_shown(text)}",
        field="help",
        found=text,
        allowed="one printable line",
    )


def _check_labels(labels: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    if labels is None:
        return ()
    if not isinstance(labels, Mapping) or len(labels) > MOST_LABELS:
        raise DefinitionError(
            f"labels must be a mapping of at most {MOST_LABELS} names to values, not {_shown(labels)}",
            field="labels",
            found=labels,
            allowed=f"at most {MOST_LABELS}",
        )
    for name, value in labels.items():
        check_label(name, value)
    return tuple(sorted(labels.items()))


def check_label(name: str, value: str) -> None:
    """Accept a constant label.

    Raises:
        DefinitionError: The name or the value is not fit for one.
    """
    allowed = "a letter, then letters, digits or '_'"
    if not isinstance(name, str) or not name or name[0] not in _LETTERS or not _WORD.issuperset(name):
        raise DefinitionError(
            f"a label's name must be {allowed}, not {_shown(name)}",
            field="labels",
            found=name,
            allowed=allowed,
        )
    if name in _TAKEN_LABELS or len(name) > LONGEST_NAME:
        taken = ", ".join(sorted(_TAKEN_LABELS))
        raise DefinitionError(
            f"the label name {_shown(name)} is taken; not allowed are: {taken}",
            field="labels",
            found=name,
            allowed=f"not one of {taken}",
        )
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_LABEL_VALUE or not value.isprintable():
        raise DefinitionError(
            f"the value of label {name} must be printable text of 1 to {LONGEST_LABEL_VALUE} characters, not {_shown(value)}",
            field="labels",
            found=value,
            allowed=f"text of 1 to {LONGEST_LABEL_VALUE} characters",
        )


def _check_number(field: str, value: float, *, at_least: float) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        number = float(value) if good else 0.0
    except OverflowError:
        number = 0.0
    if good and isfinite(number) and number >= at_least:
        return number
    raise DefinitionError(
        f"{field} must be a finite number of at least {at_least:g}, not {_shown(value)}",
        field=field,
        found=value,
        allowed=f"at least {at_least:g}",
    )


def _near(value: object, allowed: Iterable[str]) -> str:
    from difflib import get_close_matches  # noqa: PLC0415  # only errors need it

    near = get_close_matches(str(value).lower(), list(allowed), 1, 0.6)
    return f", did you mean {near[0]!r}?" if near else ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
