"""Generator of docs/METRICS.md and exporter/recording/reserved.py from the specifications in the code.

    python docs/generate_metrics.py           # `make docs`
    python docs/generate_metrics.py --check   # exit status 1 and a diff if a file is not up to date

The specifications are the tuples `SPECS` of the modules in the folders of `HEADING_BY_FOLDER`. A section of the document has a
table of the families of a folder, and below it the details of the families that have any.
"""
# ruff: noqa: INP001 - a script, not a package

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import exporter
from exporter.families import FamilySpec
from exporter.recording.reserved import RESERVED_PREFIXES, SUFFIXES
from exporter.recording.values import AGGREGATIONS

ROOT = Path(__file__).resolve().parent.parent
RESERVED_FILE = ROOT / "exporter/recording/reserved.py"

HEADING_BY_FOLDER = {
    "collectors": "Machine and collectors",
    "ledger": "Job",
    "hangs": "Explanation of hangs",
    "exposition": "Exposition",
    "web": "Web",
    "cli": "Program",
}
"""Heading by folder, in the order of the document."""

EMPTY_CELL = "\N{EN DASH}"

FOLDER_COLLECTORS = {"ledger": "feed"}
"""Name of the collector by folder, for folders whose families no collector class lists."""

PREAMBLE = """\
# Metrics

This page lists all metric families of the exporter. `make docs` generates it from the specifications in the code; do not edit
it. Names are a contract: the changelog lists every change under *Metric names*.

- A name ends with the base unit, such as `_seconds`, `_bytes` or `_ratio` (from 0 to 1), and with `_total` if the family is
  a counter.
- An unknown value is an *absent* series, not NaN or a sentinel. *Absent* lists the conditions. A value whose conditions include
  *expired* and not *exited* stays after the exit of the process.
- *Meaning* is the help text of the family in a scrape. *Details* below a table lists the values of labels, and rules.
- In OpenMetrics, the name of a counter's family has no `_total`, and the name of an info's family no `_info`.
- In protobuf, a histogram is published twice: as a native histogram, and as counters `_bucket`, `_sum` and `_count`.
- Prometheus adds `job` and `instance`; no family repeats them.
- *Collector* is the value of the label `collector` and the key in the configuration; a dash means that no collector
  publishes the family.
- A *pass* is one call of a collector.
- A *feed* is the file in shared memory through which a training process passes its data to the sidecar. A process writes a
  *snapshot* of its data into the feed about once per second.
- The *ledger* is the part of the sidecar that reads the feeds and adds the processes of a run to totals. The totals are saved
  in the state directory, so that they continue after a restart of the job or of the sidecar.

## Absent series

The tables use these names for the conditions that many families share:

| condition | the series is absent |
|---|---|
| *not reported* | because the job does not report the value |
| *not instrumented* | because the job does not record its training through `exporter.training` or a bridge |
| *other node* | because rank 0 of the run trains on a different node, whose sidecar publishes the family |
| *exited* | because the process has exited |
| *stale* | because a running process has written no snapshot for 10 s (or for three of its flush intervals, if longer) |
| *hang* | because a step is overdue (`goodput.hang_after`) |
| *expired* | because the process exited longer ago than the retention time `feed.linger`, or because 20 runs ended after its run |
| *not saved* | because the sidecar cannot write or lock the state file with the values; the values return when a retry succeeds |
"""

STAT_TEXT = """\
## What a Stat becomes

A Stat `training.batch.latency` with the unit `seconds` is published as the following families. Their labels are `run`,
`rank`, `worker` if a rank has several processes, and the constant labels of the Stat. The unit is a suffix of the name,
and is not repeated if the name already has it. The gauge of SUM contains `added`, because OpenMetrics reserves the suffix
`_sum` for summaries and histograms. The gauge of VALUE contains `last`: VALUE is the last sample of the window.

| name | type | content | absent |
|---|---|---|---|
| `training_batch_latency_seconds` | histogram with HISTOGRAM, else summary | `_count` and `_sum` of all samples since the rank's first process started; `_bucket` in a histogram | *expired* or *not saved*; `_sum` also after a negative sample |
"""

STAT_LAST_ROWS = """\
| `training_batch_latency_window_samples` | gauge | COUNT: number of samples in the last closed window; 0 for an empty window, and before the first window has closed | *exited* or *stale* |
| `training_batch_latency_last_sample_timestamp_seconds` | gauge | Unix time at which the latest sample was processed | before the first sample or *expired* |
"""


def load_specs() -> dict[str, Sequence[FamilySpec]]:
    """Return the specifications of the modules in the folders of `HEADING_BY_FOLDER`, by module name.

    The other folders are not imported. They have no specifications, and some need optional packages.
    """
    modules = [
        importlib.import_module(module.name)
        for folder in HEADING_BY_FOLDER
        for module in pkgutil.walk_packages([f"{exporter.__path__[0]}/{folder}"], f"exporter.{folder}.")
    ]
    specs = {module.__name__: module.SPECS for module in modules if hasattr(module, "SPECS")}
    return dict(sorted(specs.items()))


def collectors_by_family() -> dict[str, str]:
    """Return the collector by family: the `name` of the class whose `specs` contain the family.

    Searches the modules that are imported, so that `load_specs` must be called first.
    """
    collectors: dict[str, str] = {}
    modules = [module for name, module in sys.modules.items() if name.startswith("exporter.")]
    for module in modules:
        for member in vars(module).values():
            if (
                isinstance(member, type)
                and hasattr(member, "collect")
                and isinstance(member.__dict__.get("specs"), tuple)
            ):
                collectors.update(
                    (spec.name, str(member.__dict__["name"])) for spec in member.__dict__["specs"]
                )
    return collectors


def sample_names(spec: FamilySpec) -> set[str]:
    """Return the sample names of a family, and its name without the suffix of a counter or info."""
    suffixes = SUFFIXES[spec.type]
    base = spec.name
    if spec.type in ("counter", "info"):
        base = base.removesuffix(suffixes[0])
    return {base, *(base + suffix for suffix in suffixes)}


def metrics_document(specs_by_module: Mapping[str, Sequence[FamilySpec]]) -> str:
    """Return the text of docs/METRICS.md."""
    stages: dict[str, dict[str, FamilySpec]] = {}
    collectors: dict[str, str] = {}
    for name, specs in specs_by_module.items():
        folder = name.split(".")[1]
        stages.setdefault(folder, {}).update((spec.name, spec) for spec in specs)
        if folder in FOLDER_COLLECTORS:
            collectors.update((spec.name, FOLDER_COLLECTORS[folder]) for spec in specs)
    collectors |= collectors_by_family()
    order = [*HEADING_BY_FOLDER, *sorted(stages.keys() - HEADING_BY_FOLDER.keys())]
    sections = [
        _section(HEADING_BY_FOLDER.get(folder, folder), stages[folder], collectors)
        for folder in order
        if folder in stages
    ]
    windows = "".join(
        f"| `training_batch_latency_window_{row.infix}_seconds` | gauge | {aggregation.name} of the last closed window"
        " | before the first window has closed, after an empty window, *exited*, or *stale* |\n"
        for aggregation, row in AGGREGATIONS.items()
        if row.infix
    )
    return "\n".join([PREAMBLE, *sections, STAT_TEXT + windows + STAT_LAST_ROWS])


def _section(title: str, specs: dict[str, FamilySpec], collectors: dict[str, str]) -> str:
    lines = [
        f"## {title}",
        "",
        "| name | type | labels | meaning | absent | source | collector |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, spec in sorted(specs.items()):
        cells = (
            f"`{name}`",
            spec.type,
            ", ".join(f"`{label}`" for label in spec.labels) or EMPTY_CELL,
            f"{spec.help} [Details](#{name})." if spec.details else spec.help,
            spec.absent or EMPTY_CELL,
            spec.source,
            f"`{collectors[name]}`" if name in collectors else EMPTY_CELL,
        )
        row = " | ".join(cell.replace("|", "\\|") for cell in cells)
        lines.append(f"| {row} |")
    detailed = [spec for _, spec in sorted(specs.items()) if spec.details]
    if detailed:
        lines += ["", f"### {title}: details"]
    for spec in detailed:
        items = [
            textwrap.fill(item, 120, initial_indent="- ", subsequent_indent="  ") for item in spec.details
        ]
        lines += ["", f"#### {spec.name}", "", *items]
    return "\n".join([*lines, ""])


def reserved_module(specs_by_module: Mapping[str, Sequence[FamilySpec]]) -> str:
    """Return the text of exporter/recording/reserved.py with the current names of the families."""
    names_by_type: dict[str, set[str]] = {}
    for spec in (spec for specs in specs_by_module.values() for spec in specs):
        # Training processes load the file, so names with a reserved prefix, which are redundant, are omitted.
        name = min(sample_names(spec), key=len)
        if not name.startswith(RESERVED_PREFIXES):
            names_by_type.setdefault(spec.type, set()).add(name)
    rows = [
        f'    "{family_type}": """\n{textwrap.fill(" ".join(sorted(names)), 118)}\n""",\n'
        for family_type, names in sorted(names_by_type.items())
    ]
    text = RESERVED_FILE.read_text(encoding="utf-8")
    head, opening, tail = text.partition("_FAMILIES = {\n")
    return head + opening + "".join(rows) + tail[tail.index("}\n") :]


def main(arguments: Sequence[str]) -> int:
    """Write the files. With --check, compare them instead, and return 1 if a file is not up to date."""
    specs_by_module = load_specs()
    exit_status = 0
    for path, text in (
        (ROOT / "docs/METRICS.md", metrics_document(specs_by_module)),
        (RESERVED_FILE, reserved_module(specs_by_module)),
    ):
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
            continue
        current_text = path.read_text(encoding="utf-8") if path.exists() else ""
        if current_text != text:
            exit_status = 1
            name = str(path.relative_to(ROOT))
            difference = difflib.unified_diff(
                current_text.splitlines(), text.splitlines(), name, "generated", lineterm=""
            )
            sys.stderr.write("\n".join([*difference, f"{name} is not up to date: run `make docs`", ""]))
    return exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
