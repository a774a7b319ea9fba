"""The whole sidecar with a real job: processes and energy on the page, over a SIGKILL, a reload and a rival."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from serve_support import Sidecar, recording, sidecar
from waiting import wait_until

JOB = """
import sys, exporter
stat = exporter.Stat("x", {exporter.Aggregation.MEAN})
stat.add(1)
exporter.flush()
print("recording", flush=True)
while not sys.stdin.readline():
    pass
"""

CONFIGURATION = """
collectors:
  processes: {{interval: 200ms}}
  rapl: {{interval: 200ms}}
energy:
  enabled: {enabled}
  interval: 200ms
  lock_dir: {directory}
  whole_machine: true
  cpu_tdp_watts: 100
  carbon_intensity: 360
"""

ENERGY = 'training_energy_joules_total{component="cpu",method="whole",run="r"}'
CARBON = 'training_carbon_grams_total{component="cpu",run="r"}'
COUNTING = "exporter_energy_counting"
CPU = 'training_process_cpu_seconds_total{mode="user",rank="3",role="trainer",run="r"}'


def configuration(tmp_path: Path, *, enabled: bool = True) -> str:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIGURATION.format(directory=tmp_path, enabled=str(enabled).lower()))
    return f"--config.file={file}"


def above(running: Sidecar, series: str, value: float) -> float:
    """Wait until a series is larger than a value, and give it."""
    wait_until(lambda: (running.sample(series) or 0.0) > value)
    found = running.sample(series)
    assert found is not None
    return found


def test_energy_and_cpu_time_go_on_after_the_sidecar_was_killed(tmp_path: Path) -> None:
    with recording(tmp_path, JOB, 3):
        with sidecar(tmp_path, configuration(tmp_path)) as first:
            joules = above(first, ENERGY, 5.0)
            grams, seconds = first.sample(CARBON), above(first, CPU, 0.0)
            first.end(signal.SIGKILL)
        with sidecar(tmp_path, configuration(tmp_path)) as second:
            wait_until(lambda: second.sample(ENERGY) is not None and second.sample(CPU) is not None)
            at_once = second.sample(ENERGY)
            more = above(second, ENERGY, joules)
            page = second.ask("/metrics")[1]

    assert at_once is not None
    assert at_once >= joules
    assert grams is not None
    assert more > joules
    found = re.search(rf"^{re.escape(CPU)} (\S+)$", page, re.MULTILINE)
    assert found is not None
    assert float(found[1]) >= seconds
    assert 'training_process_up{rank="3",run="r"} 1' in page
    assert 'training_process_proportional_bytes{rank="3",role="trainer",run="r"}' in page


def test_of_two_sidecars_on_one_machine_one_counts(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    flag = configuration(tmp_path)
    with sidecar(tmp_path, flag) as first:
        wait_until(lambda: first.sample(COUNTING) == 1)
        with sidecar(other, flag) as second:
            wait_until(lambda: second.sample(COUNTING) == 0)
            page = second.ask("/metrics")[1]
            assert first.end() == 0
            wait_until(lambda: second.sample(COUNTING) == 1)

    assert "host_cpu_energy_joules_total{" not in page
    assert "another exporter on this machine counts its energy" in second.log


def test_energy_can_be_switched_off_and_on_again(tmp_path: Path) -> None:
    with recording(tmp_path, JOB, 3), sidecar(tmp_path, configuration(tmp_path)) as running:
        before = above(running, ENERGY, 0.0)
        configuration(tmp_path, enabled=False)
        os.kill(running.process.pid, signal.SIGHUP)
        wait_until(lambda: running.sample(ENERGY) is None)
        assert "energy" not in running.collectors()
        configuration(tmp_path)
        os.kill(running.process.pid, signal.SIGHUP)
        after = above(running, ENERGY, 0.0)

    assert after >= before
