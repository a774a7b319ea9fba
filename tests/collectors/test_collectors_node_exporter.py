"""Comparison of the host families with node_exporter, by the table of docs/NODE_EXPORTER.md."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from places import PROJECT
from prometheus_client.parser import text_string_to_metric_families
from prometheus_support import Prometheus, fetch, free_port, needs_prometheus
from serve_support import sidecar
from waiting import wait_until

from exporter.collectors.catalogue import CATALOGUE
from exporter.errors import CollectError

DOCUMENT = PROJECT / "docs/NODE_EXPORTER.md"

PROGRAM = shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="install node_exporter: apt-get install prometheus-node-exporter"
)

Labels = frozenset[tuple[str, str]]
Values = Mapping[str, Mapping[Labels, float]]


class Row(NamedTuple):
    ours: str
    theirs: str
    compared: str


ROWS = [
    Row(*found)
    for found in re.findall(
        r"^\| `(\w+)` \| `(\w+)` \| (same|counter|gauge) \|$",
        DOCUMENT.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    listening = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [PROGRAM or "", f"--web.listen-address={listening}"], stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: fetch(f"http://{listening}/metrics"), 15)
        yield listening
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def moments(address: str) -> tuple[Values, Values, Values]:
    """Values of node_exporter, of the exporter, and of node_exporter again."""
    return theirs(address), ours(), theirs(address)


def theirs(address: str) -> Values:
    page = fetch(f"http://{address}/metrics")
    assert page is not None
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def ours() -> Values:
    found: dict[str, dict[Labels, float]] = {}
    for entry in CATALOGUE:
        if not entry.specs[0].name.startswith("host_"):
            continue
        try:
            collected = entry.factory().collect()
        except CollectError as error:
            assert error.reason == "permission"  # noqa: PT017 - a sandbox without the right
            continue
        for metric in collected:
            for sample in metric.samples:
                found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def summed(values: Mapping[Labels, float], labels: Labels) -> float | None:
    """Sum of node_exporter's series with the labels of a series."""
    matching = [value for series, value in values.items() if labels <= series]
    return sum(matching) if matching else None


def devices(series: list[dict[str, Any]]) -> list[str]:
    return sorted(each["metric"].get("device", "all") for each in series)


def test_the_table_is_read_as_a_whole() -> None:
    lines = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]

    assert len(ROWS) == len(lines) > 35
    assert {row.ours for row in ROWS} <= {spec.name for entry in CATALOGUE for spec in entry.specs}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.ours))
def test_a_value_equals_that_of_node_exporter(row: Row, moments: tuple[Values, Values, Values]) -> None:
    before, now, after = moments
    if row.theirs not in before:
        pytest.skip("not offered by this machine")
    compared = 0
    for labels, value in now[row.ours].items():
        low, high = summed(before[row.theirs], labels), summed(after[row.theirs], labels)
        if low is None or high is None:
            continue  # a device or mode that node_exporter does not show
        compared += 1
        if row.compared == "same":
            assert value in (low, high)
        elif row.compared == "counter":
            # Floats are summed in a different order, and the kernel decreases a CPU's idle time a little.
            assert low - 0.05 <= value <= high + 0.05
        elif row.compared == "gauge":
            slack = 0.1 * max(abs(low), abs(high)) + (2**26 if row.ours.endswith("_bytes") else 50)
            assert min(low, high) - slack <= value <= max(low, high) + slack

    assert compared > 0


@needs_prometheus
@pytest.mark.timeout(60)
def test_prometheus_that_scrapes_both_sees_the_same_machine(address: str, tmp_path: Path) -> None:
    names = sorted({entry.name for entry in CATALOGUE if entry.specs[0].name.startswith("host_")})
    settings = tmp_path / "config.yaml"
    settings.write_text(
        "collectors:\n" + "".join(f"  {name}: {{interval: 1s, deadline: 900ms}}\n" for name in names)
    )
    counters = [row for row in ROWS if row.compared == "counter" and "cpu" not in row.ours]
    with (
        sidecar(tmp_path, f"--config.file={settings}") as running,
        Prometheus(
            tmp_path / "p", {"ours": running.address, "theirs": address}, scrape_seconds=0.5
        ) as server,
    ):
        wait_until(
            lambda: (
                (server.value("count_over_time(host_boot_time_seconds[30s])") or 0) >= 16
                and (server.value("count_over_time(node_boot_time_seconds[30s])") or 0) >= 16
            ),
            seconds=40,
        )
        agreeing, shared = {}, {}
        for row in counters:
            # The exporter's value lies between the values of node_exporter before and after.
            least, most = (f"{which}_over_time({row.theirs}[8s])" for which in ("min", "max"))
            within = f"({row.ours} offset 2s >= on(device) {least} - 0.05) <= on(device) {most} + 0.05"
            agreeing[row.ours] = devices(server.query(within))
            shared[row.ours] = devices(server.query(f"{row.ours} and on(device) {row.theirs}"))
        assert server.query("host_disk_read_bytes_total")
        assert server.query("host_network_receive_bytes_total")

    assert agreeing == shared
    assert all(shared[row.ours] for row in counters if row.theirs != "node_vmstat_oom_kill")
