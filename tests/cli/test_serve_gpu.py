"""Complete sidecar with replayed machines: GPUs on the page during reloads, signals, and lost or hanging GPUs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_support import Prometheus, needs_prometheus
from rules_support import needs_promtool
from serve_support import Sidecar, recording, run_exporter, sidecar
from waiting import wait_until

from exporter.replay.machines import PACKAGE_DIRECTORY

CONFIGURATION = """
gpu: {{{gpu_settings}}}
energy: {{lock_dir: {directory}}}
"""
SHORT_INTERVALS = "interval: 200ms, period: 200ms, retry: 300ms"
GPU_COUNTERS = re.compile(r"^(gpu_\w+_total\{.*\}) (\S+)$", re.MULTILINE)


def configure(tmp_path: Path, gpu_settings: str) -> str:
    """Write a configuration with settings of the section `gpu`, and return the flag that selects it."""
    file = tmp_path / "config.yaml"
    file.write_text(CONFIGURATION.format(gpu_settings=gpu_settings, directory=tmp_path))
    return f"--config.file={file}"


def reconfigure(running: Sidecar, tmp_path: Path, gpu_settings: str) -> None:
    """Reload with a new `gpu` section."""
    configure(tmp_path, gpu_settings)
    running.reload()


def counters(running: Sidecar) -> dict[str, float]:
    return {series: float(value) for series, value in GPU_COUNTERS.findall(running.page)}


def count_gpus_up(running: Sidecar) -> int:
    return len(re.findall(r"^gpu_up\{.*\} 1", running.page, re.MULTILINE))


@needs_promtool
def test_the_page_of_eight_gpus_passes_promtool(tmp_path: Path) -> None:
    with sidecar(tmp_path, configure(tmp_path, ""), "--gpu.replay=h100") as running:
        wait_until(lambda: "gpu_tensor_activity_ratio{" in running.page)
        wait_until(lambda: "host_load1 " in running.page)
        page = running.page
    command = ["promtool", "check", "metrics"]
    result = subprocess.run(command, input=page, capture_output=True, text=True, check=False)

    for family in ("power_watts", "energy_joules_total", "memory_used_bytes", "temperature_celsius"):
        assert f'gpu_{family}{{gpu="7"' in page
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_without_a_gpu_the_page_has_the_reason_and_the_log_has_one_line(tmp_path: Path) -> None:
    with sidecar(tmp_path, configure(tmp_path, SHORT_INTERVALS), "--gpu.replay=no-gpu") as running:
        wait_until(lambda: running.sample('gpu_nvml_error_info{reason="library_not_found"}') == 1)
        wait_until(lambda: running.sample('exporter_collector_success{collector="gpu"}') == 1)
        time.sleep(1)

        assert running.sample("gpu_nvml_up") == 0
        assert running.sample("host_load1") is not None
        assert running.log.count("GPUs are not monitored (library_not_found)") == 1


def test_a_reload_detaches_and_reattaches_the_described_machine(tmp_path: Path) -> None:
    with sidecar(tmp_path, configure(tmp_path, f"replay: h100, {SHORT_INTERVALS}")) as running:
        wait_until(lambda: count_gpus_up(running) == 8 and counters(running))
        reconfigure(running, tmp_path, "enabled: false")
        wait_until(lambda: "\ngpu_" not in running.page)
        assert "gpu" not in running.collectors()
        reconfigure(running, tmp_path, f"replay: t4, {SHORT_INTERVALS}")
        wait_until(lambda: count_gpus_up(running) == 1)
        reconfigure(running, tmp_path, f"replay: h100, {SHORT_INTERVALS}")
        wait_until(lambda: count_gpus_up(running) == 8 and counters(running))


@pytest.mark.parametrize("flags", [(), ("--config.check",)], ids=["start", "check"])
def test_an_unknown_machine_is_reported_and_nothing_starts(tmp_path: Path, flags: tuple[str, ...]) -> None:
    result = run_exporter("--gpu.replay=h1000", f"--feed.dir={tmp_path}", *flags)

    assert result.returncode == 2
    assert '--gpu.replay: no machine "h1000" to replay; choose one of a100-mig' in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_missing_required_gpus_make_the_exporter_not_ready_and_keep_the_page(tmp_path: Path) -> None:
    flag = configure(tmp_path, f"mode: required, replay: no-gpu, {SHORT_INTERVALS}")
    with sidecar(tmp_path, flag, ready=False) as running:
        wait_until(lambda: running.request("/metrics")[0] == 200)
        wait_until(lambda: "library_not_found" in running.request("/-/ready")[1])
        status = running.request("/-/ready")[0]
        reconfigure(running, tmp_path, f"mode: required, replay: t4, {SHORT_INTERVALS}")
        wait_until(lambda: running.request("/-/ready")[0] == 200)

    assert status == 503


def test_sigusr1_detaches_nvml_and_the_next_one_reattaches_it(tmp_path: Path) -> None:
    with sidecar(tmp_path, configure(tmp_path, f"replay: t4, {SHORT_INTERVALS}")) as running:
        wait_until(lambda: count_gpus_up(running) == 1)
        running.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: running.sample('gpu_nvml_error_info{reason="detached"}') == 1)
        children = psutil.Process(running.process.pid).children()
        running.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: count_gpus_up(running) == 1)

    assert children == []
    assert "NVML is being detached" in running.log


def longest_gap(points: dict[float, float]) -> float:
    """Return the longest time in seconds between two successive points of a range query."""
    times = sorted(points)
    return max(later - earlier for earlier, later in pairwise(times))


def power_beside_the_failure(prometheus: Prometheus, up_series: str) -> list[dict[str, Any]]:
    """Return the series of the power once the failed GPU is down and the seven other GPUs have power. Before that, return no series."""
    series = prometheus.query("gpu_power_watts")
    return series if len(series) >= 7 and prometheus.value(up_series) == 0 else []


@needs_prometheus
@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("gpus: [3], lost: true", "gpu_is_lost"),
        ('gpus: [3], hang: ["*"]', "hung"),
    ],
    ids=["lost", "hanging"],
)
def test_only_the_series_of_a_failed_gpu_end_and_return_with_the_gpu(
    tmp_path: Path, fault: str, reason: str
) -> None:
    machine = tmp_path / "faulty.yaml"
    # On a busy machine, the first scrape with the GPUs is late, and so is the restart of the child that a hanging GPU blocks.
    slowdown = min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / 2), 6.0)
    start_seconds, end_seconds = 8 * slowdown, 14 * slowdown
    event = f"at: {start_seconds:.0f}s, until: {end_seconds:.0f}s, {fault}"
    machine.write_text((PACKAGE_DIRECTORY / "h100.yaml").read_text() + f"timeline:\n  - {{{event}}}\n")
    with (
        sidecar(tmp_path, configure(tmp_path, "enabled: false"), machines=tmp_path) as running,
        Prometheus(tmp_path / "prometheus", {"node": running.address}, scrape_seconds=0.25) as prometheus,
    ):
        wait_until(lambda: prometheus.value("up") == 1)
        reconfigure(running, tmp_path, f"replay: faulty, {SHORT_INTERVALS}")
        up_series = 'gpu_up{gpu="3"}'
        wait_until(lambda: prometheus.value(up_series) == 1)
        start_time = time.time()
        wait_until(lambda: prometheus.value(up_series) == 0)
        # The child that a hanging GPU blocks is restarted.
        power_series = wait_until(lambda: power_beside_the_failure(prometheus, up_series))
        error_series = prometheus.query(f'gpu_error_info{{reason="{reason}"}}')
        wait_until(lambda: prometheus.value(up_series) == 1)
        wait_until(lambda: len(prometheus.query("gpu_power_watts")) == 8)
        time.sleep(1)
        gap_seconds = {
            gpu: longest_gap(prometheus.range(f'gpu_power_watts{{gpu="{gpu}"}}', start_time, time.time()))
            for gpu in range(8)
        }

    assert {series["metric"]["gpu"] for series in power_series} == set("0124567")
    assert [series["metric"]["gpu"] for series in error_series] == ["3"]
    failed_gpu_gap_seconds = gap_seconds.pop(3)
    assert failed_gpu_gap_seconds > 1
    # The other GPUs return before the failed GPU, once the child that a hanging GPU blocks is restarted.
    assert max(gap_seconds.values()) < failed_gpu_gap_seconds, gap_seconds


RANKS = 8
MAX_FIXED_SERIES = 1500
"""Maximum number of series of the node, the GPUs and the run, without those of the Stats."""
MAX_CHILD_BYTES = 30 << 20
MAX_SIDECAR_BYTES = 64 << 20

RANK_PROGRAM = """
import sys, exporter
stats = [exporter.Stat(f"own.part{index}", ["mean", "p95", "max"], window_seconds=1.0) for index in range(50)]
for stat in stats:
    stat.add(1.0)
print("recording", flush=True)
sys.stdin.readline()
"""


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(60)
def test_a_node_of_eight_gpus_and_ranks_keeps_its_budgets(tmp_path: Path) -> None:
    child_memory = "exporter_nvml_child_resident_memory_bytes"
    with sidecar(tmp_path, configure(tmp_path, ""), "--gpu.replay=h100") as running, ExitStack() as stack:
        for rank in range(RANKS):
            stack.enter_context(recording(tmp_path, RANK_PROGRAM, rank))
        wait_until(lambda: running.page.count("training_process_unique_bytes{") == RANKS, 30)
        wait_until(lambda: running.sample(child_memory), 30)
        series_lines = [line for line in running.page.splitlines() if line and not line.startswith("#")]
        gpu_count, child_bytes = count_gpus_up(running), running.sample(child_memory)
        sidecar_bytes = resident_bytes(running.process.pid)

    fixed_series = [line for line in series_lines if not line.startswith("own_part")]
    assert gpu_count == 8
    assert len(series_lines) - len(fixed_series) > 1000
    assert len(fixed_series) <= MAX_FIXED_SERIES
    assert (child_bytes or 0.0) <= MAX_CHILD_BYTES
    assert sidecar_bytes <= MAX_SIDECAR_BYTES
