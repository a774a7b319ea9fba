"""Overrides: other aggregations, windows and buckets for a Stat without touching the code.

Used in the training process. The rules come from the sidecar's configuration, through a file in the feed
directory; a rule that makes no sense is left out and told, never raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from exporter.errors import DefinitionError
from exporter.recording.definition import (
    DEFAULT_BUCKETS,
    OTHER_BUCKETS,
    check_aggregations,
    check_buckets,
    check_window_samples,
    check_window_seconds,
)
from exporter.recording.values import Aggregation, StatDefinition

Rule = Mapping[str, object]

_CHECKS: Mapping[str, Callable[..., object]] = {
    "aggregations": check_aggregations,
    "buckets": check_buckets,
    "window_samples": check_window_samples,
    "window_seconds": check_window_seconds,
}


def check_rules(rules: Sequence[Rule]) -> tuple[list[Rule], list[str]]:
    """Keep the rules that make sense.

    Returns:
        The good ones with checked values, and what is wrong with the others.
    """
    good: list[Rule] = []
    wrong: list[str] = []
    for number, rule in enumerate(rules, 1):
        try:
            checked = {key: _CHECKS[key](value) if key in _CHECKS else value for key, value in rule.items()}
        except DefinitionError as error:
            wrong.append(f"rule {number} for {rule.get('match')!r}: {error}")
            continue
        if isinstance(checked.get("match"), str) and isinstance(checked.get("enabled", True), bool):
            good.append(checked)
        else:
            wrong.append(f"rule {number}: needs a text 'match', and 'enabled' must be true or false")
    return good, wrong


def apply_rules(definition: StatDefinition, rules: Sequence[Rule]) -> tuple[StatDefinition, bool]:
    """Change a definition by every rule that matches its name, the later rule winning.

    Returns:
        The definition to use, and whether the Stat is enabled.
    """
    changes: dict[str, object] = {}
    enabled = True
    for rule in rules:
        if fnmatchcase(definition.name, str(rule["match"])):
            changes.update({key: value for key, value in rule.items() if key in _CHECKS})
            enabled = bool(rule.get("enabled", enabled))
    if not changes or definition.kind != "stat":
        return definition, enabled
    changed = definition.replace(**changes)
    if changed.window_seconds is None and changed.window_samples is None:
        changed = changed.replace(
            window_seconds=definition.window_seconds, window_samples=definition.window_samples
        )
    if changed.window_samples is not None and changed.window_samples < changed.min_samples:
        changed = changed.replace(min_samples=changed.window_samples)
    if Aggregation.HISTOGRAM not in changed.aggregations:
        changed = changed.replace(buckets=())
    elif not changed.buckets:
        changed = changed.replace(buckets=DEFAULT_BUCKETS.get(changed.unit, OTHER_BUCKETS))
    return changed, enabled
