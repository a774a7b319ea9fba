"""Generator of docs/BENCHMARKS.md and of the tables in README and docs/operations.md, from the results of the benchmarks.

`python benchmarks/page.py` runs the four benchmarks and growth, or the named benchmarks (including fleet, which runs for twenty
minutes on a quiet machine), then writes the documents and benchmarks/results.json. With `--check`, exits with status 1 if a
document differs from results.json.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from report import REPOSITORY

RESULTS = REPOSITORY / "benchmarks/results.json"
NAMES = ("bench_recording", "bench_web", "bench_node", "bench_energy")
GROWTH, FLEET = "growth", "fleet"
BUDGETS_OBSERVE_NS = 600

SHOWN = {
    "Stat.add, ns": "`Stat.add`",
    "iteration with 4 phases and 3 values, µs": "an iteration with four phases, loss, tokens and gradient norm",
    "recording thread at 1,000 samples/s, % of a core": "recording thread, 1,000 samples/s over 50 Stats",
    "recording thread at 100 iterations/s, % of a core": "recording thread, 100 instrumented iterations/s",
    "lost of 3 million adds at a million per second": "values lost of three million, added within three seconds",
    "import, MiB": "import of all modules that a job can import",
    "server time of a scrape, nothing changed, ms": "server time of a scrape, 500 series",
    "64 at once, p99, ms": "64 scrapers at once, the slowest of a hundred",
    "sidecar, % of a core": "sidecar, 8 GPUs (replayed), 8 ranks of 50 Stats, scraped every 15 s",
    "sidecar, MiB": "memory of this sidecar",
    "NVML child, % of a core a card": "NVML child of this sidecar for each GPU, with the call costs of an H100",
}
"""Rows of the README, with the names there."""


def number(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def split(what: str) -> tuple[str, str]:
    """Return the name and the unit of a row; the unit may be empty."""
    name, comma, unit = what.rpartition(", ")
    return (name, unit) if comma and len(unit) < 20 else (what, "")


def with_unit(value: float, unit: str) -> str:
    """Return a number with its unit."""
    text = number(value)
    return f"{text} {unit}".strip() if not unit.startswith("%") else f"{text} {unit}"


def row(name: str, each: dict[str, Any], *, budget: bool) -> str:
    """Return a line of a table."""
    unit = split(each["what"])[1]
    peers = ", ".join(f"{peer} {with_unit(value, unit)}" for peer, value in each["peers"].items() if value)
    cells = [name, with_unit(each["measured"], unit)]
    if budget:
        limit = each["budget"]
        cells.append("" if limit is None else number(limit) + ("" if each["holds"] else " (missed)"))
    return "| " + " | ".join([*cells, peers]) + " |"


def page(results: dict[str, Any]) -> str:
    """Return docs/BENCHMARKS.md."""
    parts = [
        "# Benchmarks",
        "",
        "Results of the last `make bench`, with the peers in the same run. Compare within a row: the machine is shared, and in some",
        "hours half as fast as in others. Rows above the budget are marked as missed.",
    ]
    if "bench_recording" in results:
        observe = results["bench_recording"]["budgets"][0]["peers"]["prometheus_client"]
        parts += [
            "",
            f"`Histogram.observe` of prometheus_client cost {number(observe)} ns in this run, and {BUDGETS_OBSERVE_NS} ns on the machine",
            f"for which the budgets are set: this machine was slower by a factor of {observe / BUDGETS_OBSERVE_NS:.1f}.",
        ]
    for name in NAMES:
        if name not in results:
            continue
        each = results[name]
        parts += [
            "",
            f"## `python benchmarks/{name}.py`",
            "",
            f"{each['machine']}; CPython {each['python']}; commit {each['commit']}.",
            "",
            "| figure | measured | budget | peers |",
            "|---|---|---|---|",
            *(row(split(line["what"])[0], line, budget=True) for line in each["budgets"]),
        ]
    if GROWTH in results:
        parts += [
            "",
            "## `python benchmarks/growth.py`",
            "",
            "Growth of the costs with the load: the sidecar is scraped every five seconds.",
            "",
        ]
        parts += [line for curve in results[GROWTH]["curves"] for line in grown(curve)]
    return "\n".join([*parts, ""]).replace("\n\n\n", "\n\n")


def grown(curve: dict[str, Any]) -> list[str]:
    """Return the table and the picture of a curve."""
    names = list(curve["points"][0])
    rows = [
        " | ".join(number(point[name]) if name in point else "" for name in names)
        for point in curve["points"]
    ]
    told = "; ".join(f"{name}: {verdict}" for name, verdict in curve["verdicts"].items())
    picture = f"![{curve['title']}](images/growth-{names[0]}.svg)"
    head = [f"### {curve['title']}", "", "| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return [*head, *(f"| {row} |" for row in rows), "", f"Growth of {told}.", "", picture, ""]


def fleet(result: dict[str, Any]) -> str:
    """Return the table of a simulated fleet: a line for each figure, a column for each number of nodes."""
    columns = [*result["measured"], *([result["computed"]] if result["computed"] else [])]
    kinds = ["*measured*"] * len(result["measured"]) + ["*computed*"]
    lines = [
        "| | " + " | ".join(f"{number(column['nodes'])} nodes" for column in columns) + " |",
        "|---|" + "---:|" * len(columns),
        "| | " + " | ".join(kinds[: len(columns)]) + " |",
    ]
    for name in list(columns[0])[1:]:
        cells = [number(column[name]) if name in column else "" for column in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table(results: dict[str, Any]) -> str:
    """Return the table of the README."""
    rows = {line["what"]: line for name in NAMES if name in results for line in results[name]["budgets"]}
    return "\n".join(
        [
            "| figure | measured | peers, same run |",
            "|---|---|---|",
            *(row(name, rows[what], budget=False) for what, name in SHOWN.items() if what in rows),
        ]
    )


def marked(path: Path, text: str) -> str:
    """Return a document with the text between the marks."""
    place = re.compile(r"(?<=<!-- benchmarks -->\n\n).*?(?=\n\n<!-- end of benchmarks -->)", re.DOTALL)
    return place.sub(lambda _: text, path.read_text(encoding="utf-8"))


def documents(results: dict[str, Any]) -> dict[Path, str]:
    """Return the content of each document by path."""
    readme, operations = REPOSITORY / "README.md", REPOSITORY / "docs/operations.md"
    found = {REPOSITORY / "docs/BENCHMARKS.md": page(results), readme: marked(readme, table(results))}
    if FLEET in results:
        found[operations] = marked(operations, fleet(results[FLEET]))
    return found


def main() -> int:
    """Run the benchmarks and write the documents, or check the documents; returns the exit status."""
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if "--check" in sys.argv:
        stale = [
            path for path, text in documents(results).items() if path.read_text(encoding="utf-8") != text
        ]
        print("\n".join(f"{path.name}: run python benchmarks/page.py" for path in stale))
        return 1 if stale else 0
    status = 0
    for name in sys.argv[1:] or (*NAMES, GROWTH):
        command = [sys.executable, str(REPOSITORY / f"benchmarks/{name}.py"), "--pictures"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout)
        results[name] = json.loads(done.stdout)
        status = status or done.returncode
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for path, text in documents(results).items():
        path.write_text(text, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
