"""Generator of docs/BENCHMARKS.md and of the tables of figures in README.md, docs/comparison.md and docs/operations.md.

`python benchmarks/page.py` runs the four benchmarks and growth, or the named benchmarks, and writes benchmarks/results.json and the
documents. `fleet`, which takes twenty minutes on a quiet machine, runs only if named. `--quick` shortens each benchmark. With
`--check`, no benchmark runs, and the exit status is 1 if a document does not match results.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from growth import FLAT, LINEAR
from report import QUICK, REPOSITORY

RESULTS = REPOSITORY / "benchmarks/results.json"
NAMES = ("bench_recording", "bench_web", "bench_node", "bench_energy")
GROWTH, FLEET = "growth", "fleet"
BUDGET_OBSERVE_NS = 600

COSTS_OF_THE_SIDECAR = {
    "CPU time of the sidecar with 8 GPUs and 8 ranks (scaled)": "CPU of the sidecar: 8 GPUs (replayed), 8 ranks of 50 Stats, a scrape every 15 s",
    "Memory of the sidecar with 8 GPUs and 8 ranks": "memory of the sidecar",
    "CPU time of the NVML child per GPU (scaled)": "CPU of the NVML child per GPU, with the call costs of an H100",
    "Memory of the NVML child": "memory of the NVML child",
}
"""Figures in docs/operations.md and at the end of the table in README.md, with their names there."""

COSTS_OF_RECORDING = {
    "CPU time of a call of `Stat.add`": "a call of `Stat.add`",
    "CPU time of a call of `exporter.elastic.metrics.put_metric`": "a call of `put_metric`",
    "CPU time of an iteration with 4 phases and 3 values": "an iteration with four phases and three values",
}
"""Figures in docs/comparison.md, with their names there."""

README_ROWS = {
    "CPU time of a call of `Stat.add`": "`Stat.add`",
    "CPU time of an iteration with 4 phases and 3 values": "an iteration with four phases, loss, tokens and gradient norm",
    "CPU time of the recording thread at 1,000 samples/s (scaled)": "recording thread, 1,000 samples/s over 50 Stats",
    "CPU time of the recording thread at 100 iterations/s (scaled)": "recording thread, 100 instrumented iterations/s",
    "Lost values of 3 million, added at a million per second": "values lost of three million, added within three seconds",
    "Memory of the import of the API and the compatibility modules": "memory of the import of the API and the compatibility modules",
    "CPU time of the server for a scrape of 500 series, no value changed": "CPU time of the server for a scrape of 500 series",
    "Scrape time that Prometheus measures, about 800 series, relative to node_exporter (ratio)": (
        "scrape time that Prometheus measures, about 800 series, relative to node_exporter (ratio)"
    ),
    "99th percentile of the scrape time with 64 concurrent clients": "99th percentile of the scrape time, 64 concurrent clients",
    **COSTS_OF_THE_SIDECAR,
}
"""Figures in README.md, with their names there."""


def number(value: float) -> str:
    """Return a number with three significant digits, or rounded to a whole number from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def table_row(name: str, result: dict[str, Any], *, has_budget: bool) -> str:
    """Return a row of a table: name, value, budget if requested, and peers with notes."""
    unit = result["unit"]
    peers = [f"{peer} {number(value)} {unit}".strip() for peer, value in result["peers"].items() if value]
    cells = [name, f"{number(result['value'])} {unit}".strip()]
    if has_budget:
        budget = result["budget"]
        if budget is not None and not result["holds"] and number(budget) == number(result["value"]):
            # More digits, so that the value is visibly above the budget.
            cells[1] = f"{result['value']:.5g} {unit}".strip()
        budget_cell = "" if budget is None else f"{number(budget)} {unit}".strip()
        cells.append(budget_cell if result["holds"] else f"{budget_cell} (missed)")
    return "| " + " | ".join([*cells, ", ".join([*peers, *result["notes"]])]) + " |"


def page(results: dict[str, Any]) -> str:
    """Return the text of docs/BENCHMARKS.md."""
    parts = [
        "# Benchmarks",
        "",
        "Each section shows the last run of a benchmark program, with the machine and the commit of that run. `make bench` repeats the",
        "runs. Peers are other tools that were measured in the same run.",
        "",
        "The machine is shared and sometimes less than half as fast as usual. Therefore do not compare times of different sections, such",
        "as the time of an iteration of nv-one-logger in the first and in the last section. In the tables with budgets, compare only values of",
        "the same row. The rows of a growth table were measured one after the other, so small differences between rows may be due to the",
        "machine.",
        "",
        "- A *quick run* (`--quick`) has fewer or shorter measurements, so its values vary more.",
        "- The suffix `-dirty` of a commit means that the run had uncommitted changes.",
        "- *Budget* is the highest value that this project accepts. A row above its budget is marked as *missed*. A time that",
        "  is not scaled can miss its budget because the machine was slow during the run.",
        f"- Budgets of times assume a machine on which `Histogram.observe` of prometheus_client takes {BUDGET_OBSERVE_NS} ns. A *scaled* value",
        f"  is corrected for the speed of the machine: it is multiplied by {BUDGET_OBSERVE_NS} ns and divided by the time of",
        "  `Histogram.observe` in the same run. The other values are not corrected. In the rows of the bridge to plain loops, each figure is",
        "  the median of several processes, so the scaled figure does not follow exactly from the other two.",
        "- The budgets of an iteration are relative to nv-one-logger in the same run: 5 % without phases and values, 15 % with 4 phases",
        "  and 3 values.",
        "- A *ratio* compares two measurements of the same run; 1 means equal.",
        "- *% of a core* is CPU time per elapsed time.",
        "- The *NVML child* is the process of the sidecar that calls NVML.",
    ]
    for name in NAMES:
        if name not in results:
            continue
        result = results[name]
        parts += [
            "",
            f"## `python benchmarks/{name}.py`",
            "",
            run_description(result),
            "",
            "| figure | measured | budget | peers and notes |",
            "|---|---|---|---|",
            *(table_row(line["figure"], line, has_budget=True) for line in result["budgets"]),
        ]
    if GROWTH in results:
        parts += [
            "",
            "## `python benchmarks/growth.py`",
            "",
            run_description(results[GROWTH]),
            "",
            "These tables show how the costs grow with the load, which is the first column. The other columns are:",
            "",
            "- *% of a core* and *MiB*: CPU time and memory of the sidecar. In the table of iterations, the memory is that of the job.",
            "- *series* and *KiB of a scrape*: number of series and size of the scraped page.",
            "- *ms of a scrape*: duration of the fastest scrape of a row, as the client measures it. For prometheus_client, it is the time of",
            "  rendering the page, without HTTP.",
            "- *KiB of state*: size of the state of the ledger.",
            "- *µs each*: CPU time of an iteration on the thread of the job, the mean of the iterations since the row before.",
            "",
            "The conditions of the measurements are:",
            "",
            "- The sidecar is scraped every five seconds, or every two seconds in a quick run.",
            "- A peer has an empty cell where its measurement would take too long.",
            "- In this benchmark, the sidecar limits a page to 100,000 series (`exposition.max_series`). The row of 1,000 runs is at that",
            "  limit.",
            "",
            "The last line of a table compares the growth of a column with the growth of the load. A value that grows as the load to the",
            "power *e* is:",
            "",
            f"- *flat*, if *e* is at most {FLAT} from the first to the last row;",
            f"- *linear at most*, if it is not flat and *e* is at most {LINEAR} from each row to the next;",
            f"- *more than linear between* two loads, if it is not flat and *e* is above {LINEAR} from the row of the first load to the row of the second.",
            "",
        ]
        parts += [line for curve in results[GROWTH]["curves"] for line in curve_section(curve)]
    return "\n".join([*parts, ""]).replace("\n\n\n", "\n\n")


def run_description(result: Mapping[str, Any]) -> str:
    """Return the line about the machine, the Python version and the commit of a run."""
    quick = "; quick run" if result.get("quick") else ""
    return f"{result['machine']}; CPython {result['python']}; commit {result['commit']}{quick}."


def curve_section(curve: dict[str, Any]) -> list[str]:
    """Return the table and the picture of a curve."""
    names = list(curve["points"][0])
    rows = [
        " | ".join(number(point[name]) if name in point else "" for name in names)
        for point in curve["points"]
    ]
    growth = " | ".join(["*growth*", *(curve["verdicts"].get(name, "") for name in names[1:])])
    picture = f"![{curve['title']}](images/growth-{names[0]}.svg)"
    head = [f"### {curve['title']}", "", "| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return [*head, *(f"| {row} |" for row in [*rows, growth]), "", picture, ""]


def fleet(result: dict[str, Any]) -> str:
    """Return the table of the simulated fleet, with a row for each figure and a column for each number of nodes."""
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


def table(results: dict[str, Any], names: Mapping[str, str]) -> str:
    """Return a table of figures under other names. Raises SystemExit if the results do not contain a figure."""
    rows = {line["figure"]: line for name in NAMES if name in results for line in results[name]["budgets"]}
    if missing := [figure for figure in names if figure not in rows]:
        raise SystemExit(f"results.json has no figure {', '.join(missing)}; run python benchmarks/page.py")
    return "\n".join(
        [
            "| figure | measured | peers and notes, same run |",
            "|---|---|---|",
            *(table_row(name, rows[figure], has_budget=False) for figure, name in names.items()),
        ]
    )


def replace_region(document: str, region: str, text: str) -> str:
    """Return a document with the text of a region, which two comments enclose, replaced. Raises SystemExit without them."""
    start, end = f"<!-- benchmarks: {region} -->\n\n", f"\n\n<!-- end of benchmarks: {region} -->"
    head, start_comment, rest = document.partition(start)
    _, end_comment, tail = rest.partition(end)
    if not start_comment or not end_comment:
        raise SystemExit(f"a document has no region {region!r} for the results of the benchmarks")
    return head + start + text + end + tail


def documents(results: dict[str, Any]) -> dict[Path, str]:
    """Return the text of each document by path."""
    readme, operations = REPOSITORY / "README.md", REPOSITORY / "docs/operations.md"
    comparison = REPOSITORY / "docs/comparison.md"
    operations_text = operations.read_text(encoding="utf-8")
    operations_text = replace_region(operations_text, "sidecar", table(results, COSTS_OF_THE_SIDECAR))
    if FLEET in results:
        operations_text = replace_region(operations_text, "fleet", fleet(results[FLEET]))
    return {
        REPOSITORY / "docs/BENCHMARKS.md": page(results),
        readme: replace_region(readme.read_text(encoding="utf-8"), "costs", table(results, README_ROWS)),
        operations: operations_text,
        comparison: replace_region(
            comparison.read_text(encoding="utf-8"), "recording", table(results, COSTS_OF_RECORDING)
        ),
    }


def run_benchmark(name: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark. Return the finished process, whose standard output is the JSON document."""
    options = ["--pictures", *(["--quick"] if QUICK else [])]
    command = [sys.executable, str(REPOSITORY / f"benchmarks/{name}.py"), *options]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)


def main() -> int:
    """Run the benchmarks and write the documents, or check the documents. Return the exit status."""
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if "--check" in sys.argv:
        stale = [
            path for path, text in documents(results).items() if path.read_text(encoding="utf-8") != text
        ]
        print("\n".join(f"{path.name}: run python benchmarks/page.py" for path in stale))
        return 1 if stale else 0
    status = 0
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    for name in names or (*NAMES, GROWTH):
        process = run_benchmark(name)
        print(process.stdout)
        results[name] = json.loads(process.stdout)
        status = status or process.returncode
        # After each benchmark, so that a later failure loses no result.
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for path, text in documents(results).items():
        path.write_text(text, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
