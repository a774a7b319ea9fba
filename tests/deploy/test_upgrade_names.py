"""Upgrade: names that the rules and dashboards of the previous release use are published, or listed as renamed.

tests/data/upgrade has these names: `families.txt` the metric names in the queries, `recorded.txt` the recording rules, and
`alerts.txt` the alerts, on which silences and routes of users depend.
"""

from __future__ import annotations

import re
from functools import cache

import pytest
import yaml
from places import PROJECT

UPGRADE_DATA = PROJECT / "tests/data/upgrade"
RULES = sorted((PROJECT / "deploy/prometheus/rules").glob("*.yml"))
SAMPLES = re.compile(r"_(bucket|count|sum)$")


def names(file_stem: str) -> list[str]:
    return (UPGRADE_DATA / f"{file_stem}.txt").read_text(encoding="utf-8").split()


@cache
def names_in_changelog() -> set[str]:
    """Return the former names in the section *Metric names* of the unreleased changes, and the removed names."""
    unreleased_changes = (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    section = unreleased_changes.partition("### Metric names")[2].partition("\n### ")[0]
    former_names = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    removed_names = section.partition("Removed:")[2].partition("\n\n")[0]
    return set(re.findall(r"`([A-Za-z_:0-9]+)(?=[`{*])", "\n".join([*former_names, removed_names])))


@cache
def published_names() -> set[str]:
    """Return the metric names in docs/METRICS.md."""
    return set(re.findall(r"`([a-z_0-9]+)`", (PROJECT / "docs/METRICS.md").read_text(encoding="utf-8")))


@cache
def rules(key: str) -> set[str]:
    """Return the names of the alerts (`alert`) or of the recording rules (`record`)."""
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]]
    return {rule[key] for group in groups for rule in group["rules"] if key in rule}


@pytest.mark.parametrize("name", names("families"))
def test_a_family_in_a_query_of_the_previous_release_is_published_or_listed_as_renamed(name: str) -> None:
    assert not {name, SAMPLES.sub("", name)}.isdisjoint(published_names() | names_in_changelog())


@pytest.mark.parametrize("name", names("recorded"))
def test_a_recording_rule_of_the_previous_release_exists_or_is_listed_as_renamed(name: str) -> None:
    assert name in rules("record") | names_in_changelog()


@pytest.mark.parametrize("name", names("alerts"))
def test_an_alert_of_the_previous_release_exists_or_is_listed_as_renamed(name: str) -> None:
    assert name in rules("alert") | names_in_changelog()
