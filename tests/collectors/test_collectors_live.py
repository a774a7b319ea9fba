"""The host collectors on this very machine, against what others say about it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from collectors_support import OF_JOB, Board, assert_sound, text_of, value_of
from prometheus_client.core import Metric
from waiting import wait_until

from exporter.collectors.catalogue import CATALOGUE, CollectorEntry
from exporter.collectors.host.cpu import CpuCollector
from exporter.collectors.host.network import NetworkCollector
from exporter.collectors.host.system import HardwareCollector
from exporter.collectors.scheduler import Scheduler
from exporter.errors import CollectError

pytestmark = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux")


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: str(entry.name))
def test_each_collector_reads_this_machine_without_a_problem(entry: CollectorEntry) -> None:
    collector = entry.factory(
        **{setting.name: True for setting in entry.settings if setting.default is False}
    )
    try:
        collected = collector.collect()
    except CollectError as error:  # a sandbox without the right is no fault of the collector
        assert error.reason == "permission"  # noqa: PT017 - either outcome is a pass
        return

    assert_sound(collector, collected)
    assert {reason for reason, _ in collected.problems} <= {"permission"}
    assert collected or collected.unsupported or collected.problems or entry.name in OF_JOB


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_wrong_with_the_names_of_all_families() -> None:
    board = Board()
    scheduler = Scheduler(publish=board.publish, withdraw=board.withdraw)
    for entry in CATALOGUE:
        scheduler.add(
            entry.factory(), interval_seconds=entry.interval_seconds, deadline_seconds=entry.deadline_seconds
        )
    scheduler.start()
    wait_until(lambda: all(status.success is not None for status in scheduler.statuses()))
    scheduler.stop()
    families: list[Metric] = [
        *scheduler.families(),
        *(family for block in board.blocks.values() for family in block),
    ]
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=text_of(families),
        text=True,
        capture_output=True,
        check=False,
        timeout=15,
    )

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_cpus_load_and_links_are_those_of_this_machine() -> None:
    cpu, hardware = CpuCollector().collect(), HardwareCollector().collect()
    samples = [sample for metric in NetworkCollector().collect() for sample in metric.samples]
    shown = [sample.labels["device"] for sample in samples if sample.name == "host_network_up"]

    assert value_of(hardware, "host_cpus", "online") == os.cpu_count()
    assert value_of(hardware, "host_cpus", "affinity") == len(os.sched_getaffinity(0))
    assert value_of(cpu, "host_load1") == pytest.approx(os.getloadavg()[0], abs=0.5)
    assert set(shown) <= {path.name for path in Path("/sys/class/net").iterdir()}


def test_thermometers_of_one_name_are_numbered_and_those_of_cores_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = {
        "coretemp": [("Package id 0", 61.0), ("Core 7", 60.0)],
        "nvme": [("Composite", 41.85), ("Composite", 38.85), ("", -273.15)],
    }
    chips = {
        chip: [SimpleNamespace(label=label, current=celsius) for label, celsius in sensors]
        for chip, sensors in readings.items()
    }
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: chips)
    collected = HardwareCollector().collect()

    found = next(metric for metric in collected if metric.name == "host_temperature_celsius")
    assert {tuple(sample.labels.values()): sample.value for sample in found.samples} == {
        ("coretemp", "Package id 0"): 61.0,
        ("nvme", "Composite"): 41.85,
        ("nvme", "Composite 2"): 38.85,
    }
