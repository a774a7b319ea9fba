"""Upgrade: names that the rules and dashboards of the previous release use are published, or listed as renamed.

tests/data/upgrade has these names: `families.txt` the metric names in the queries, `recorded.txt` the recording rules, and
`alerts.txt` the alerts, on which silences and routes of users depend.
"""

from __future__ import annotations

import re

from places import PROJECT
from rules_support import RULES, load_yaml

UPGRADE_DATA = PROJECT / "tests/data/upgrade"
SAMPLE_SUFFIX = re.compile(r"_(bucket|count|sum)$")


def names_of_previous_release(file_stem: str) -> list[str]:
    names = (UPGRADE_DATA / f"{file_stem}.txt").read_text(encoding="utf-8").split()
    assert names
    return names


def names_in_changelog() -> set[str]:
    """Return the former names in the section *Metric names* of the unreleased changes, and the removed names."""
    unreleased_changes = (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    section = unreleased_changes.partition("### Metric names")[2].partition("\n### ")[0]
    former_names = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    removed_names = section.partition("Removed:")[2].partition("\n\n")[0]
    return set(re.findall(r"`([A-Za-z_:0-9]+)(?=[`{*])", "\n".join([*former_names, removed_names])))


def published_names() -> set[str]:
    """Return the metric names in docs/METRICS.md."""
    return set(re.findall(r"`([a-z_0-9]+)`", (PROJECT / "docs/METRICS.md").read_text(encoding="utf-8")))


def rule_names(key: str) -> set[str]:
    """Return the names of the alerts (`alert`) or of the recording rules (`record`)."""
    groups = [group for path in RULES for group in load_yaml(path)["groups"]]
    return {rule[key] for group in groups for rule in group["rules"] if key in rule}


def test_the_families_in_queries_of_the_previous_release_are_published_or_listed_as_renamed() -> None:
    known_names = published_names() | names_in_changelog()

    families = names_of_previous_release("families")
    assert [name for name in families if not {name, SAMPLE_SUFFIX.sub("", name)} & known_names] == []


def test_the_recording_rules_of_the_previous_release_exist_or_are_listed_as_renamed() -> None:
    former_records = set(names_of_previous_release("recorded"))
    assert former_records - rule_names("record") - names_in_changelog() == set()


def test_the_alerts_of_the_previous_release_exist_or_are_listed_as_renamed() -> None:
    former_alerts = set(names_of_previous_release("alerts"))
    assert former_alerts - rule_names("alert") - names_in_changelog() == set()
