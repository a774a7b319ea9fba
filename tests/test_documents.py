"""Names in the documents exist: families, labels, recording rules, flags, options and environment variables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from places import PROJECT
from rules_support import rules

DOCUMENTS = [
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "deploy/README.md"),
    *sorted(f"docs/{path.name}" for path in (PROJECT / "docs").glob("*.md")),
]
FAMILY = re.compile(r"((?:training|gpu|host|cgroup|exporter|process)_[a-z0-9_]+[a-z0-9])(?:\{([^}]*)\})?")
OTHER_NAMES = {
    *("exporter_auto", "training_exporter"),  # modules
    *("training_iteration", "training_loop"),  # functions
    *("training_metrics_update", "training_single_iteration"),  # events of one-logger
    *("gpu_memory", "gpu_time", "process_memory"),  # a reason, a file and a collector
    *("gpu_lost", "process_not_listed"),  # reasons
    "training_batch_latency_seconds",  # the example of a Stat
}
"""Names in backticks that have the prefix of a family and are no family."""
SAMPLE_SUFFIXES = {"histogram": ("_bucket", "_count", "_sum"), "summary": ("_count", "_sum")}
RULE = re.compile(r"\b[a-z_]+:[a-z_]+:\w+")
"""Name of a recording rule: level, metric and operation."""


def texts_in_backticks(document: str) -> list[str]:
    """Return the texts in backticks, without the blocks of code."""
    markdown = (PROJECT / document).read_text(encoding="utf-8")
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", markdown, flags=re.DOTALL))


def labels_by_name() -> dict[str, set[str]]:
    """Return the labels of each family and sample of docs/METRICS.md."""
    table_row = re.compile(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", re.MULTILINE)
    labels: dict[str, set[str]] = {}
    for name, metric_type, labels_cell in table_row.findall(
        (PROJECT / "docs/METRICS.md").read_text(encoding="utf-8")
    ):
        labels[name] = set(re.findall(r"`(\w+)`", labels_cell))
        for suffix in SAMPLE_SUFFIXES.get(metric_type, ()):
            labels[name + suffix] = labels[name] | {"le"}
    return labels


def source_text() -> str:
    """Return the source of the package and of the entry points."""
    paths = [*(PROJECT / "exporter").rglob("*.py"), PROJECT / "exporter_auto.py"]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def option_keys(schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of the configuration."""
    for name, subschema in schema.get("properties", {}).items():
        yield f"{prefix}{name}"
        yield from option_keys(subschema, f"{prefix}{name}.")


LABELS, SOURCE = labels_by_name(), source_text()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_families_and_labels_in_a_document_exist(document: str) -> None:
    matches = [match for text in texts_in_backticks(document) if (match := FAMILY.fullmatch(text))]
    families = [(match[1], match[2] or "") for match in matches if match[1] not in OTHER_NAMES]
    selected_labels = [
        (name, label)
        for name, selector in families
        for label in re.findall(r"(\w+)(?==|!=|,|\s|$)", re.sub(r'"[^"]*"', "", selector))
    ]

    assert [name for name, _ in families if name not in LABELS] == []
    assert [(name, label) for name, label in selected_labels if label not in LABELS[name]] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_recording_rules_in_a_document_exist(document: str) -> None:
    rule_names = {rule.name for rule in rules() if not rule.is_alert}

    assert [
        name for text in texts_in_backticks(document) for name in RULE.findall(text) if name not in rule_names
    ] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_flags_and_environment_variables_in_a_document_exist(document: str) -> None:
    texts = texts_in_backticks(document)
    flags = [flag for text in texts for flag in re.findall(r"--[a-z]+\.[a-z.\-]*[a-z]", text)]
    variables = [name for text in texts for name in re.findall(r"\bEXPORTER_[A-Z_]+[A-Z]", text)]

    assert [flag for flag in flags if f'"{flag}"' not in SOURCE] == []
    assert [name for name in variables if name not in SOURCE] == []


# ARCHITECTURE.md has modules whose names look like options.
@pytest.mark.parametrize("document", sorted({*DOCUMENTS} - {"ARCHITECTURE.md"}))
def test_options_in_a_document_exist(document: str) -> None:
    schema = json.loads((PROJECT / "config.schema.json").read_text(encoding="utf-8"))
    keys = set(option_keys(schema))
    sections = "|".join({key.partition(".")[0] for key in keys})
    options = [
        text for text in texts_in_backticks(document) if re.fullmatch(rf"({sections})\.(?!py$)[a-z_.]+", text)
    ]

    assert [key for key in options if key not in keys] == []
