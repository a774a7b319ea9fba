"""Writes rules/ from templates/ and thresholds.yaml, and the table of alerts in docs/runbook.md.

    python deploy/prometheus/render.py                                          # `make rules`
    python deploy/prometheus/render.py --check                                  # exit status 1 when they differ
    python deploy/prometheus/render.py --thresholds mine.yaml --output DIRECTORY
    python deploy/prometheus/render.py --format=prometheusrule --output DIRECTORY   # for the Prometheus operator

A template is a rule file of Prometheus in which `${TrainingHang.for}` stands for the entry `for` under
`TrainingHang`. Text is put in place of text, so that a template reads as what it becomes, with its comments.
Why not rules that compare with a series of thresholds: a `for`, a window and a label pattern cannot be series,
and an alert whose threshold has no sample is silent.

Needs PyYAML. A thresholds file of one's own holds only what differs; what it names must exist.
"""
# ruff: noqa: INP001, T201 - a script beside what it writes, not a package

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TEMPLATES = HERE / "templates"
RULES = HERE / "rules"
THRESHOLDS = HERE / "thresholds.yaml"
RUNBOOK = ROOT / "docs/runbook.md"

PLACE = re.compile(r"\$\{(\w+)\.(\w+)\}")
NOTICE = "# Made from templates/{name} and thresholds.yaml by render.py; do not edit.\n"
TABLE_BEGIN = "<!-- alerts: written by deploy/prometheus/render.py -->\n"
TABLE_END = "<!-- end of alerts -->\n"

Thresholds = dict[str, dict[str, Any]]


class RenderError(Exception):
    """A threshold that nobody knows, is missing or of no use; the message says which and where."""


def thresholds(overrides: Sequence[Path] = ()) -> Thresholds:
    """Read the thresholds, and put one's own in the place of ours; the last file wins.

    Raises:
        RenderError: A file is not YAML of the right shape, or names what is not in thresholds.yaml.
    """
    known = _read(THRESHOLDS)
    for path in overrides:
        for group, entries in _read(path).items():
            for name, value in entries.items():
                if name not in known.get(group, {}):
                    near = difflib.get_close_matches(
                        f"{group}.{name}", [f"{one}.{two}" for one, all_ in known.items() for two in all_], 1
                    )
                    hint = f"; did you mean {near[0]}?" if near else ""
                    raise RenderError(f"{path}: there is no threshold {group}.{name}{hint}")
                known[group][name] = value
    return known


def _read(path: Path) -> Thresholds:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise RenderError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise RenderError(f"{path}: expected a mapping of alerts to their thresholds")
    for group, entries in found.items():
        if not isinstance(entries, dict):
            raise RenderError(f"{path}: {group}: expected a mapping, found {entries!r}")
        for name, value in entries.items():
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise RenderError(f"{path}: {group}.{name}: expected a number or a text, found {value!r}")
    return found


def render(values: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Make every rule file, by its name.

    Raises:
        RenderError: A template asks for what is not there, or a threshold is not used by any.
    """
    used: set[tuple[str, str]] = set()
    files = {}
    for template in sorted(TEMPLATES.glob("*.yml")):

        def value(place: re.Match[str], template: Path = template) -> str:
            group, name = place.groups()
            used.add((group, name))
            try:
                return str(values[group][name])
            except KeyError:
                raise RenderError(f"{template.name}: {place[0]} is not in thresholds.yaml") from None

        files[template.name] = NOTICE.format(name=template.name) + PLACE.sub(
            value, template.read_text(encoding="utf-8")
        )
    unused = {(group, name) for group, entries in values.items() for name in entries} - used
    if unused:
        names = ", ".join(sorted(".".join(pair) for pair in unused))
        raise RenderError(f"thresholds.yaml: no template uses {names}")
    return files


def resource(files: Mapping[str, str]) -> str:
    """Put all groups into one PrometheusRule of the Prometheus operator."""
    groups = [group for text in files.values() for group in yaml.safe_load(text)["groups"]]
    metadata = {"name": "training-exporter", "labels": {"app.kubernetes.io/name": "training-exporter"}}
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": metadata,
        "spec": {"groups": groups},
    }
    return yaml.safe_dump(document, sort_keys=False, width=1000, allow_unicode=True)


def table(files: Mapping[str, str]) -> str:
    """Write the alerts as a table of Markdown, in the order of the files."""
    lines = [
        "| alert | severity | for | fires when |",
        "|---|---|---|---|",
    ]
    seen = set()
    for text in files.values():
        for group in yaml.safe_load(text)["groups"]:
            for rule in group["rules"]:
                name = rule.get("alert")
                if name is None or name in seen:
                    continue
                seen.add(name)
                condition = rule["annotations"]["condition"].replace("|", "\\|")  # else a new cell
                lines.append(
                    f"| [{name}](#{name.lower()}) | {rule['labels']['severity']} | {rule.get('for', 'at once')} "
                    f"| {condition} |"
                )
    return "\n".join([*lines, ""])


def with_table(document: str, new: str) -> str:
    """Put the table between its marks.

    Raises:
        RenderError: The document lacks the marks.
    """
    before, begin, rest = document.partition(TABLE_BEGIN)
    _, end, after = rest.partition(TABLE_END)
    if not (begin and end):
        raise RenderError(f"{RUNBOOK}: the marks of the table are missing")
    return before + begin + "\n" + new + "\n" + end + after


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or only compare them."""
    parser = argparse.ArgumentParser(description="Write Prometheus rules from templates and thresholds.")
    parser.add_argument("--thresholds", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--output", type=Path, metavar="DIRECTORY", help="not beside the templates")
    parser.add_argument("--format", choices=["rules", "prometheusrule"], default="rules")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(arguments)
    if options.format != "rules" and not options.output:
        parser.error("--format=prometheusrule needs --output: it is not kept here")
    try:
        files = render(thresholds(options.thresholds))
        if options.format == "prometheusrule":
            files = {"prometheusrule.yaml": resource(files)}
        wanted = {(options.output or RULES) / name: text for name, text in files.items()}
        if not options.thresholds and not options.output:
            wanted[RUNBOOK] = with_table(RUNBOOK.read_text(encoding="utf-8"), table(files))
    except RenderError as error:
        print(error, file=sys.stderr)
        return 2
    outdated = 0
    for path, text in wanted.items():
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            outdated = 1
            print(f"{path} is not up to date: run `make rules`", file=sys.stderr)
    return outdated


if __name__ == "__main__":
    sys.exit(main())
