"""Validation of Stat definitions and Stat rules.

Runs in the training process, when a Stat is constructed and when the Stat rules change. Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import pairwise
from math import isfinite
from typing import Any

from exporter.errors import DefinitionError
from exporter.recording.conversion import safe_repr
from exporter.recording.limits import (
    MAX_BUCKETS,
    MAX_HELP_CHARACTERS,
    MAX_LABEL_VALUE_CHARACTERS,
    MAX_STAT_LABELS,
    MAX_STAT_NAME_CHARACTERS,
)
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.recording.values import Aggregation, StatDefinition

UNITS = (
    *("seconds", "bytes", "ratio", "joules", "watts", "grams", "liters", "hertz", "celsius"),
    *("volts", "amperes", "meters", "flops", "tokens", "samples", "steps"),
)
"""Base units, and units of counts of a training job."""

MIN_WINDOW_SECONDS = 0.1
"""Shortest window that a definition may request."""
_MAX_WINDOW_SAMPLES = 1_000_000_000
"""Largest number of samples of a count window."""

DEFAULT_AGGREGATIONS = ("mean", "max", "p50", "p90", "p95", "p99")
DEFAULT_BUCKETS: Mapping[str | None, tuple[float, ...]] = {
    "seconds": (
        *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
        *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
    ),
    "ratio": (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0),
    "bytes": tuple(float(1 << power) for power in range(10, 41, 3)),
}
"""Default upper bounds of a histogram, by unit of the Stat."""
OTHER_BUCKETS = (0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1e3, 1e4, 1e5, 1e6)
"""Default upper bounds for another unit, and without a unit."""

_RESERVED_LABELS = ("instance", "job", "le", "quantile", "rank", "role", "run", "worker")
_NAME = re.compile(r"[a-zA-Z]\w*(\.\w+)*", re.ASCII)
_LABEL = re.compile(r"[a-zA-Z]\w*", re.ASCII)

StatRule = Mapping[str, object]
"""Stat rule: changes the definitions of the Stats whose names match a pattern, or disables these Stats.

The key `match` has the shell pattern. Further keys are any of `enabled`, `aggregations`, `window_seconds`, `window_samples` and
`buckets`. The section `recording` of the sidecar's configuration contains Stat rules, and `set_enabled` adds one.
"""


def check_definition(
    name: str, aggregations: Iterable[Aggregation | str] | None = None, **fields: Any
) -> StatDefinition:
    """Return the definition of a Stat from its arguments. Raises DefinitionError for an invalid argument."""
    with unreadable_values():
        return _check_definition(name, aggregations, **fields)


@contextmanager
def unreadable_values() -> Iterator[None]:
    """Convert the errors of values that raise on access, such as an unbound proxy, to DefinitionError."""
    try:
        yield
    except DefinitionError:
        raise
    except Exception as error:
        if is_from_signal_handler(error):
            raise
        text = f"an argument cannot be read: {safe_repr(error)}"
        raise DefinitionError(text, field="", found=None, allowed="values that can be read") from error


def _check_definition(
    name: str, aggregations: Iterable[Aggregation | str] | None, **fields: Any
) -> StatDefinition:
    """Check each argument, and the arguments that depend on others: window limits, buckets and `min_samples`."""
    is_valid: object = (
        isinstance(name, str) and len(name) <= MAX_STAT_NAME_CHARACTERS and _NAME.fullmatch(name)
    )
    allowed = "letters, digits, '_' and '.', starting with a letter: training.batch.latency"
    require(is_valid, "name", name, f"{allowed} (at most {MAX_STAT_NAME_CHARACTERS} characters)")
    members = _check_aggregations(DEFAULT_AGGREGATIONS if aggregations is None else aggregations)
    buckets, min_samples = fields.pop("buckets", None), fields.pop("min_samples", 1)
    checked_fields = {field: _CHECKS[field](value) for field, value in fields.items()}
    definition = StatDefinition(name, members, **checked_fields)
    is_valid = definition.window_seconds is not None or definition.window_samples is not None
    require(is_valid, "window_seconds", None, f"{MIN_WINDOW_SECONDS} or more where window_samples is None")
    is_valid = buckets is None or Aggregation.HISTOGRAM in members
    require(is_valid, "buckets", buckets, "None without Aggregation.HISTOGRAM")
    max_samples = definition.window_samples or _MAX_WINDOW_SAMPLES
    allowed = f"a whole number from 1 to {max_samples}"
    if max_samples < _MAX_WINDOW_SAMPLES:
        allowed += ", the window_samples"
    require(type(min_samples) is int and 1 <= min_samples <= max_samples, "min_samples", min_samples, allowed)
    bounds = _default_buckets(members, definition.unit) if buckets is None else check_buckets(buckets)
    return definition.replace(buckets=bounds, min_samples=min_samples)


def require(is_valid: object, field: str, value: object, allowed: str, subject: str = "") -> None:
    """Raise DefinitionError unless *is_valid*. *subject* replaces the field in the message."""
    if not is_valid:
        text = safe_repr(value)
        text = text if len(text) <= 80 else f"{text[:77]}..."
        raise DefinitionError(
            f"{subject or field} must be {allowed}, not {text}", field=field, found=value, allowed=allowed
        )


def check_buckets(buckets: Iterable[float]) -> tuple[float, ...]:
    """Return buckets as finite upper bounds in ascending order. Raises DefinitionError for invalid bounds."""
    try:
        bounds = tuple(float(bound) for bound in buckets)
    except (TypeError, ValueError, OverflowError):
        bounds = ()
    is_valid = all(map(isfinite, bounds)) and all(low < high for low, high in pairwise(bounds))
    allowed = f"1 to {MAX_BUCKETS} finite numbers, ascending, without +Inf"
    require(is_valid and 1 <= len(bounds) <= MAX_BUCKETS, "buckets", buckets, allowed)
    return bounds


def check_labels(labels: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """Return constant labels, sorted by name. Raises DefinitionError for invalid labels."""
    is_valid: object = labels is None or (isinstance(labels, Mapping) and len(labels) <= MAX_STAT_LABELS)
    require(is_valid, "labels", labels, f"a mapping of at most {MAX_STAT_LABELS} names to values")
    for name, value in (labels or {}).items():
        is_valid = isinstance(name, str) and len(name) <= MAX_STAT_NAME_CHARACTERS and _LABEL.fullmatch(name)
        require(is_valid, "labels", name, "a letter, then letters, digits or '_'", "a label's name")
        require(name not in _RESERVED_LABELS, "labels", name, f"none of {_RESERVED_LABELS}", "a label's name")
        is_valid = (
            isinstance(value, str) and 0 < len(value) <= MAX_LABEL_VALUE_CHARACTERS and value.isprintable()
        )
        allowed = f"printable text of 1 to {MAX_LABEL_VALUE_CHARACTERS} characters"
        require(is_valid, "labels", value, allowed, f"the value of label {name}")
    return tuple(sorted((labels or {}).items()))


def _check_aggregations(aggregations: Iterable[Aggregation | str]) -> frozenset[Aggregation]:
    """Return members or names of aggregations as members. Raises DefinitionError for other values and for a single text."""
    allowed = [member.value for member in Aggregation]
    is_valid = isinstance(aggregations, Iterable) and not isinstance(aggregations, str | Aggregation)
    require(is_valid, "aggregations", aggregations, "a collection such as {Aggregation.MEAN}")
    values = [item.value if isinstance(item, Aggregation) else item for item in aggregations]
    for value in values:
        require(value in allowed, "aggregations", value, f"some of {', '.join(allowed)}")
    return frozenset(map(Aggregation, values))


def _check_number(field: str, value: float, *, minimum: float) -> float:
    """Return a finite int or float of at least *minimum* as a float. Raises DefinitionError for other values."""
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else -1.0
    except OverflowError:
        number = -1.0
    is_valid = isfinite(number) and number >= minimum
    require(is_valid, field, value, f"a finite number of at least {minimum:g}")
    return number


def _check_window_seconds(seconds: float | None) -> float | None:
    if seconds is None:
        return None
    return _check_number("window_seconds", seconds, minimum=MIN_WINDOW_SECONDS)


def _check_window_samples(samples: int | None) -> int | None:
    is_valid = samples is None or (type(samples) is int and 1 <= samples <= _MAX_WINDOW_SAMPLES)
    require(is_valid, "window_samples", samples, f"a whole number from 1 to {_MAX_WINDOW_SAMPLES}, or None")
    return samples


def _check_unit(unit: str | None) -> str | None:
    allowed = f"None or a base unit (seconds for ms, ratio for %): {', '.join(UNITS)}"
    require(unit is None or unit in UNITS, "unit", unit, allowed)
    return unit


def _check_help(text: str) -> str:
    is_valid = isinstance(text, str) and len(text) <= MAX_HELP_CHARACTERS and text.isprintable()
    require(is_valid, "help", text, f"one printable line of at most {MAX_HELP_CHARACTERS} characters")
    return text


_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "aggregations": _check_aggregations,
    "buckets": check_buckets,
    "help": _check_help,
    "labels": check_labels,
    "stale_seconds": lambda value: _check_number("stale_seconds", value, minimum=1.0),
    "unit": _check_unit,
    "window_samples": _check_window_samples,
    "window_seconds": _check_window_seconds,
}
_RULE_FIELDS = ("aggregations", "buckets", "window_samples", "window_seconds")
"""Fields that a Stat rule may change, besides `enabled`."""


def _default_buckets(aggregations: frozenset[Aggregation], unit: str | None) -> tuple[float, ...]:
    return DEFAULT_BUCKETS.get(unit, OTHER_BUCKETS) if Aggregation.HISTOGRAM in aggregations else ()


# Stat rules ----------------------------------------------------------------------------------------------------


def check_rules(rules: Sequence[StatRule]) -> tuple[list[StatRule], list[str]]:
    """Return the valid rules with checked values, and a sentence for each invalid rule."""
    valid_rules: list[StatRule] = []
    problems: list[str] = []
    for number, rule in enumerate(rules, 1):
        try:
            checked_rule = {
                key: _CHECKS[key](value) if key in _RULE_FIELDS else value for key, value in rule.items()
            }
        except DefinitionError as error:
            problems.append(f"rule {number} for {rule.get('match')!r}: {error}")
            continue
        if isinstance(checked_rule.get("match"), str) and isinstance(checked_rule.get("enabled", True), bool):
            valid_rules.append(checked_rule)
        else:
            problems.append(f"rule {number}: 'match' must be a text, and 'enabled' must be true or false")
    return valid_rules, problems


def apply_rules(definition: StatDefinition, rules: Sequence[StatRule]) -> tuple[StatDefinition, bool]:
    """Return the definition after the matching rules are applied in order, and True if the Stat is enabled.

    Rules that together remove both limits of the window leave these limits unchanged. `min_samples` is lowered to the number of
    samples of a window. A histogram that a rule adds without buckets has the default buckets of the unit. The definition of a series without
    windows does not change.
    """
    changes: dict[str, object] = {}
    enabled = True
    for rule in rules:
        if fnmatchcase(definition.name, str(rule["match"])):
            changes.update({key: value for key, value in rule.items() if key in _RULE_FIELDS})
            enabled = bool(rule.get("enabled", enabled))
    if not changes or definition.kind != "stat":
        return definition, enabled
    new_definition = definition.replace(**changes)
    if new_definition.window_seconds is None and new_definition.window_samples is None:
        new_definition = new_definition.replace(
            window_seconds=definition.window_seconds, window_samples=definition.window_samples
        )
    if (
        new_definition.window_samples is not None
        and new_definition.window_samples < new_definition.min_samples
    ):
        new_definition = new_definition.replace(min_samples=new_definition.window_samples)
    if Aggregation.HISTOGRAM not in new_definition.aggregations or not new_definition.buckets:
        new_definition = new_definition.replace(
            buckets=_default_buckets(new_definition.aggregations, new_definition.unit)
        )
    return new_definition, enabled
