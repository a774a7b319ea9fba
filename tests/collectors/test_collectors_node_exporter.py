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
from prometheus_support import Prometheus, needs_prometheus
from run_support import fetch, free_port
from serve_support import sidecar
from waiting import WAIT_LIMIT_SECONDS, wait_until

from exporter.collectors.catalogue import CATALOGUE
from exporter.errors import CollectError

DOCUMENT = PROJECT / "docs/NODE_EXPORTER.md"

PROGRAM = shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="install node_exporter: apt-get install prometheus-node-exporter"
)

Labels = frozenset[tuple[str, str]]
Values = Mapping[str, Mapping[Labels, float]]
"""Values of series by sample name and labels."""


class Row(NamedTuple):
    family: str
    node_exporter_name: str
    comparison: str


ROWS = [
    Row(*cells)
    for cells in re.findall(
        r"^\| `(\w+)` \| `(\w+)` \| (same|counter|gauge)(?:, except tunnels)? \|$",
        DOCUMENT.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    listen_address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [PROGRAM or "", f"--web.listen-address={listen_address}"], stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: fetch(f"http://{listen_address}/metrics"))
        yield listen_address
    finally:
        process.terminate()
        process.wait(WAIT_LIMIT_SECONDS)


@pytest.fixture(scope="module")
def page_values(address: str) -> tuple[Values, Values, Values]:
    """Return values of node_exporter, of the exporter, and again of node_exporter."""
    return node_exporter_values(address), exporter_values(), node_exporter_values(address)


def node_exporter_values(address: str) -> Values:
    page = fetch(f"http://{address}/metrics")
    assert page is not None
    values: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            values.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return values


def exporter_values() -> Values:
    values: dict[str, dict[Labels, float]] = {}
    for entry in CATALOGUE:
        if not entry.specs[0].name.startswith("host_"):
            continue
        try:
            collected = entry.factory().collect()
        except CollectError as error:
            assert error.reason == "permission"  # noqa: PT017  # a sandbox may lack the permission
            continue
        for metric in collected:
            for sample in metric.samples:
                values.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return values


def sum_of_series(values: Mapping[Labels, float], labels: Labels) -> float | None:
    """Return the sum of node_exporter's series that have these labels, or None without a series."""
    matching_values = [value for series_labels, value in values.items() if labels <= series_labels]
    return sum(matching_values) if matching_values else None


def gauge_slack(family: str) -> float:
    """Return the difference that is allowed beyond 10 % of the value, as docs/NODE_EXPORTER.md states it."""
    if family.endswith("_bytes"):
        return 64 * 2**20
    return 2.0 if family.startswith("host_load") else 50.0


def devices(all_series: list[dict[str, Any]]) -> list[str]:
    return sorted(series["metric"].get("device", "all") for series in all_series)


def test_the_table_is_read_as_a_whole() -> None:
    table_lines = [
        line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    ]

    assert len(ROWS) == len(table_lines) > 35
    assert {row.family for row in ROWS} <= {spec.name for entry in CATALOGUE for spec in entry.specs}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.family))
def test_a_value_agrees_with_that_of_node_exporter(
    row: Row, page_values: tuple[Values, Values, Values]
) -> None:
    values_before, values, values_after = page_values
    if row.node_exporter_name not in values_before:
        pytest.skip("not offered by this machine")
    comparisons = 0
    for labels, value in values[row.family].items():
        before = sum_of_series(values_before[row.node_exporter_name], labels)
        after = sum_of_series(values_after[row.node_exporter_name], labels)
        if before is None or after is None:
            continue  # a device or mode that node_exporter does not show
        comparisons += 1
        if row.comparison == "same":
            assert value in (before, after)
        elif row.comparison == "counter":
            # The sums of floats differ by their order, and the kernel may decrease a CPU's idle time slightly.
            assert before - 0.05 <= value <= after + 0.05
        elif row.comparison == "gauge":
            slack = 0.1 * max(abs(before), abs(after)) + gauge_slack(row.family)
            assert min(before, after) - slack <= value <= max(before, after) + slack

    assert comparisons > 0


@needs_prometheus
@pytest.mark.timeout(60)
def test_prometheus_that_scrapes_both_sees_the_same_machine(address: str, tmp_path: Path) -> None:
    names = sorted({entry.name for entry in CATALOGUE if entry.specs[0].name.startswith("host_")})
    settings = tmp_path / "config.yaml"
    settings.write_text(
        "collectors:\n" + "".join(f"  {name}: {{interval: 1s, deadline: 900ms}}\n" for name in names)
    )
    counters = [row for row in ROWS if row.comparison == "counter" and "cpu" not in row.family]
    with (
        sidecar(tmp_path, f"--config.file={settings}") as running,
        Prometheus(
            tmp_path / "p", {"training": running.address, "node": address}, scrape_seconds=0.5
        ) as server,
    ):
        wait_until(
            lambda: (
                (server.value("count_over_time(host_boot_time_seconds[30s])") or 0) >= 16
                and (server.value("count_over_time(node_boot_time_seconds[30s])") or 0) >= 16
            ),
            seconds=40,
        )
        matching_devices, common_devices = {}, {}
        for row in counters:
            # The exporter's value lies between the values of node_exporter before and after.
            minimum, maximum = (
                f"{aggregation}_over_time({row.node_exporter_name}[8s])" for aggregation in ("min", "max")
            )
            query = f"({row.family} offset 2s >= on(device) {minimum} - 0.05) <= on(device) {maximum} + 0.05"
            matching_devices[row.family] = devices(server.query(query))
            common_devices[row.family] = devices(
                server.query(f"{row.family} and on(device) {row.node_exporter_name}")
            )
        assert server.query("host_disk_read_bytes_total")
        assert server.query("host_network_receive_bytes_total")

    assert matching_devices == common_devices
    assert all(
        common_devices[row.family] for row in counters if row.node_exporter_name != "node_vmstat_oom_kill"
    )
