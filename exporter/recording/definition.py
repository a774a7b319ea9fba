"""Checking what a Stat is asked to be, by the code or by the configuration: one clear error, before anything is recorded.

Used in the training process, at construction and when the configuration's rules change. Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from math import isfinite

from exporter.errors import DefinitionError
from exporter.recording.values import Aggregation, StatDefinition

_UNITS = "seconds bytes ratio joules watts grams liters hertz celsius volts amperes meters flops tokens samples steps"
UNITS = tuple(_UNITS.split())
"""Base units and the nouns that a training job counts; a number without unit has none."""

SHORTEST_WINDOW_SECONDS = 0.1
LONGEST_NAME = 200
LONGEST_LABEL_VALUE = 256
LONGEST_HELP = 500
MOST_LABELS = 16
MOST_BUCKETS = 200
_MOST_SAMPLES = 1_000_000_000

DEFAULT_AGGREGATIONS = frozenset(map(Aggregation, ("mean", "max", "p50", "p90", "p95", "p99")))
_STEP_BUCKETS = "0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10 30 60 300"
DEFAULT_BUCKETS: Mapping[str | None, tuple[float, ...]] = {
    "seconds": tuple(map(float, _STEP_BUCKETS.split())),
    "ratio": (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0),
    "bytes": tuple(float(1 << power) for power in range(10, 41, 3)),
}
OTHER_BUCKETS = (0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1e3, 1e4, 1e5, 1e6)

_TAKEN_LABELS = frozenset({"run", "rank", "worker", "role", "le", "quantile", "job", "instance"})
_NAME = re.compile(r"[a-zA-Z]\w*(\.\w+)*", re.ASCII)
_LABEL = re.compile(r"[a-zA-Z]\w*", re.ASCII)

Rule = Mapping[str, object]
"""`match`, a shell pattern of names, and any of `enabled`, `aggregations`, `window_seconds`, `window_samples`, `buckets`."""


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
    """Make a definition, or raise a DefinitionError that names the value and the allowed ones."""
    good: object = isinstance(name, str) and len(name) <= LONGEST_NAME and _NAME.fullmatch(name)
    allowed = "letters, digits, '_' and '.', starting with a letter: training.batch.latency"
    require(good, "name", name, f"{allowed} (at most {LONGEST_NAME} characters)")
    wanted = DEFAULT_AGGREGATIONS if aggregations is None else check_aggregations(aggregations)
    seconds, samples = check_window_seconds(window_seconds), check_window_samples(window_samples)
    if seconds is None and samples is None:
        allowed = f"at least {SHORTEST_WINDOW_SECONDS} seconds, or at least 1 sample"
        told = "a Stat needs window_seconds, window_samples or both, not None for both"
        raise DefinitionError(told, field="window_seconds", found=None, allowed=allowed)
    if unit is not None and unit not in UNITS:
        told = f"unit must be a base unit (seconds for ms, ratio for %) or None, not {_shown(unit)}; known: "
        raise DefinitionError(told + ", ".join(UNITS), field="unit", found=unit, allowed=UNITS)
    if buckets is not None and Aggregation.HISTOGRAM not in wanted:
        told = "buckets are given, but Aggregation.HISTOGRAM is not among the aggregations"
        raise DefinitionError(told, field="buckets", found=buckets, allowed="buckets only with HISTOGRAM")
    good = isinstance(help, str) and len(help) <= LONGEST_HELP and help.isprintable()
    require(good, "help", help, f"one printable line of at most {LONGEST_HELP} characters")
    most = samples or _MOST_SAMPLES
    allowed = f"a whole number from 1 to {most}" + (", the window_samples" if samples else "")
    require(type(min_samples) is int and 1 <= min_samples <= most, "min_samples", min_samples, allowed)
    return StatDefinition(
        name=name,
        aggregations=wanted,
        window_seconds=seconds,
        window_samples=samples,
        unit=unit,
        help=help,
        labels=_check_labels(labels),
        buckets=_default_buckets(wanted, unit) if buckets is None else check_buckets(buckets),
        stale_seconds=_check_number("stale_seconds", stale_seconds, at_least=1.0),
        min_samples=min_samples,
    )


def check_aggregations(aggregations: Iterable[Aggregation | str]) -> frozenset[Aggregation]:
    """Take a collection of members of Aggregation or their lower-case values, else raise DefinitionError."""
    allowed = [member.value for member in Aggregation]
    good = isinstance(aggregations, Iterable) and not isinstance(aggregations, str | Aggregation)
    require(good, "aggregations", aggregations, "a collection such as {Aggregation.MEAN}")
    found = set()
    for each in aggregations:
        value = each.value if isinstance(each, Aggregation) else each
        if value not in allowed:
            told = f"unknown aggregation {each!r}; allowed: {', '.join(allowed)}"
            raise DefinitionError(told, field="aggregations", found=each, allowed=allowed)
        found.add(Aggregation(value))
    return frozenset(found)


def check_window_seconds(seconds: float | None) -> float | None:
    """Take a length of at least a tenth of a second, or None, else raise DefinitionError."""
    if seconds is None:
        return None
    return _check_number("window_seconds", seconds, at_least=SHORTEST_WINDOW_SECONDS)


def check_window_samples(samples: int | None) -> int | None:
    """Take a whole number of at least 1, or None, else raise DefinitionError."""
    good = samples is None or (type(samples) is int and 1 <= samples <= _MOST_SAMPLES)
    require(good, "window_samples", samples, f"a whole number from 1 to {_MOST_SAMPLES}, or None")
    return samples


def check_buckets(buckets: Iterable[float]) -> tuple[float, ...]:
    """Take finite upper bounds in ascending order, without `+Inf`, else raise DefinitionError."""
    try:
        bounds = tuple(float(bound) for bound in buckets)
    except (TypeError, ValueError, OverflowError):
        bounds = ()
    good = all(map(isfinite, bounds)) and all(low < high for low, high in pairwise(bounds))
    allowed = f"1 to {MOST_BUCKETS} finite numbers, ascending, without +Inf"
    require(good and 1 <= len(bounds) <= MOST_BUCKETS, "buckets", buckets, allowed)
    return bounds


def check_label(name: str, value: str) -> None:
    """Accept a constant label, else raise DefinitionError."""
    good: object = isinstance(name, str) and len(name) <= LONGEST_NAME and _LABEL.fullmatch(name)
    require(good, "labels", name, "a letter, then letters, digits or '_'", "a label's name")
    if name in _TAKEN_LABELS:
        taken = ", ".join(sorted(_TAKEN_LABELS))
        told = f"the label name {name!r} is taken; not allowed are: {taken}"
        raise DefinitionError(told, field="labels", found=name, allowed=f"not one of {taken}")
    good = isinstance(value, str) and 0 < len(value) <= LONGEST_LABEL_VALUE and value.isprintable()
    allowed = f"printable text of 1 to {LONGEST_LABEL_VALUE} characters"
    require(good, "labels", value, allowed, f"the value of label {name}")


# Rules of the configuration ------------------------------------------------------------------------------------

_RULE_CHECKS: Mapping[str, Callable[..., object]] = {
    "aggregations": check_aggregations,
    "buckets": check_buckets,
    "window_samples": check_window_samples,
    "window_seconds": check_window_seconds,
}


def check_rules(rules: Sequence[Rule]) -> tuple[list[Rule], list[str]]:
    """Keep the rules that make sense, with checked values, and tell what is wrong with the others."""
    good: list[Rule] = []
    wrong: list[str] = []
    for number, rule in enumerate(rules, 1):
        try:
            checked = {
                key: _RULE_CHECKS[key](value) if key in _RULE_CHECKS else value for key, value in rule.items()
            }
        except DefinitionError as error:
            wrong.append(f"rule {number} for {rule.get('match')!r}: {error}")
            continue
        if isinstance(checked.get("match"), str) and isinstance(checked.get("enabled", True), bool):
            good.append(checked)
        else:
            wrong.append(f"rule {number}: needs a text 'match', and 'enabled' must be true or false")
    return good, wrong


def apply_rules(definition: StatDefinition, rules: Sequence[Rule]) -> tuple[StatDefinition, bool]:
    """Change a definition by every rule that matches its name, the later rule winning; also whether it is enabled."""
    changes: dict[str, object] = {}
    enabled = True
    for rule in rules:
        if fnmatchcase(definition.name, str(rule["match"])):
            changes.update({key: value for key, value in rule.items() if key in _RULE_CHECKS})
            enabled = bool(rule.get("enabled", enabled))
    if not changes or definition.kind != "stat":
        return definition, enabled
    changed = definition.replace(**changes)
    if changed.window_seconds is None and changed.window_samples is None:
        before = definition.window_seconds, definition.window_samples
        changed = changed.replace(window_seconds=before[0], window_samples=before[1])
    if changed.window_samples is not None and changed.window_samples < changed.min_samples:
        changed = changed.replace(min_samples=changed.window_samples)
    if Aggregation.HISTOGRAM not in changed.aggregations or not changed.buckets:
        changed = changed.replace(buckets=_default_buckets(changed.aggregations, changed.unit))
    return changed, enabled


def require(good: object, field: str, found: object, allowed: str, what: str = "") -> None:
    """Raise DefinitionError unless a value is good."""
    if not good:
        told = f"{what or field} must be {allowed}, not {_shown(found)}"
        raise DefinitionError(told, field=field, found=found, allowed=allowed)


def _default_buckets(aggregations: frozenset[Aggregation], unit: str | None) -> tuple[float, ...]:
    return DEFAULT_BUCKETS.get(unit, OTHER_BUCKETS) if Aggregation.HISTOGRAM in aggregations else ()


def _check_labels(labels: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    good = labels is None or (isinstance(labels, Mapping) and len(labels) <= MOST_LABELS)
    require(good, "labels", labels, f"a mapping of at most {MOST_LABELS} names to values")
    for name, value in (labels or {}).items():
        check_label(name, value)
    return tuple(sorted((labels or {}).items()))


def _check_number(field: str, value: float, *, at_least: float) -> float:
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else -1.0
    except OverflowError:
        number = -1.0
    good = isfinite(number) and number >= at_least
    require(good, field, value, f"a finite number of at least {at_least:g}")
    return number


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
