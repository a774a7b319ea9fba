"""Jobs and GPUs for the tests of energy: GPUs of 500 W, simulated below libnvidia-ml.so.1, and processes that train on them."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from container_support import ContainedSidecar
from fake_nvml_support import FakeNvml, Load, play_constant_load
from run_support import child_environment
from serve_support import Sidecar
from waiting import wait_until

WATTS = 500.0
SECOND_GPU = "GPU-00000001-fa4e-4e47-8888-123456789abc"
"""UUID of the stand-in's second GPU."""

UNCHANGED_PASSES = 4
"""Number of passes of the energy collector without a change after which the energy of an ended run counts as final."""

JOB = """
import sys, time
from exporter import training
deadline = time.monotonic() + float(sys.argv[1])
with training.training_loop(train_iterations_start=0):
    while time.monotonic() < deadline:
        with training.training_iteration():
            time.sleep(0.05)
"""
"""Job that trains for the seconds of its argument."""

CRASHING_JOB = """
import sys, time
from exporter import training
with training.training_loop(train_iterations_start=0):
    with training.checkpoint_load():
        time.sleep(float(sys.argv[1]))
        raise OSError("no such checkpoint")
"""
"""Job that loads a checkpoint for the seconds of its argument, and then fails."""


class GpuJob:
    """Process that trains on a GPU, with its lifetime."""

    def __init__(
        self, tmp_path: Path, run: str, seconds: float, rank: int = 0, code: str = JOB, **variables: str
    ) -> None:
        self.run, self.started_at = run, time.monotonic()
        identity = {"EXPORTER_RUN": run, "RANK": str(rank)}
        env = child_environment(EXPORTER_FEED_DIR=str(tmp_path / "feed"), **identity, **variables)
        self.process = subprocess.Popen([sys.executable, "-c", code, str(seconds)], env=env)
        self._ended_at = 0.0
        self._waiter = threading.Thread(target=self._wait)
        self._waiter.start()

    def wait(self) -> float:
        """Wait for the exit and return the lifetime in seconds."""
        self._waiter.join()
        return self._ended_at - self.started_at

    def _wait(self) -> None:
        self.process.wait()
        self._ended_at = time.monotonic()

    def kill(self) -> float:
        """Kill the process and return the lifetime in seconds."""
        self.process.kill()
        return self.wait()


def joules(running: Sidecar | ContainedSidecar, family: str, run: str, label: str = "") -> float:
    """Return the energy of a run in joules: the sum over the series of a family.

    *label*, a text such as `phase="forward"`, restricts the sum to the series with this label.
    """
    pattern = rf'^{family}{{(?=[^}}]*run="{run}")(?=[^}}]*{label})[^}}]*}} (\S+)$'
    return sum(float(value) for value in re.findall(pattern, running.page, re.MULTILINE))


def wait_for_final_joules(running: Sidecar | ContainedSidecar, *runs: str) -> list[float]:
    """Wait until UNCHANGED_PASSES passes in a row have not changed the energies of ended runs, and return the energies."""
    last_joules: list[float] = []
    unchanged_passes, last_pass = 0, ""
    while unchanged_passes < UNCHANGED_PASSES:
        wait_until(lambda: _last_energy_pass(running) != last_pass)  # noqa: B023  # called at once
        last_pass = _last_energy_pass(running)
        current_joules = [joules(running, "training_energy_joules_total", run) for run in runs]
        unchanged_passes = unchanged_passes + 1 if current_joules == last_joules else 0
        last_joules = current_joules
    return last_joules


def _last_energy_pass(running: Sidecar | ContainedSidecar) -> str:
    """Return the time of the last pass of the energy collector, as printed on the page."""
    pattern = r'^exporter_collector_last_success_timestamp_seconds{collector="energy"} (\S+)$'
    match = re.search(pattern, running.page, re.MULTILINE)
    return "" if match is None else match[1]


def hold(fake: FakeNvml, jobs: Sequence[GpuJob], gpus: range | None = None) -> None:
    """Let NVML list the processes of jobs on GPUs, by default each process on all GPUs."""
    fake.hold(*((job.process.pid, gpu) for job in jobs for gpu in gpus or range(fake.count)))


def start_fake_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> FakeNvml:
    """Create the feed directory and a machine whose GPUs draw WATTS. Sidecars of this test load it in place of NVML."""
    (tmp_path / "feed").mkdir(mode=0o700)
    fake = FakeNvml(tmp_path / "nvml", count=count)
    play_constant_load(fake, Load(watts=WATTS))
    for variable, setting in fake.environment.items():
        monkeypatch.setenv(variable, setting)
    return fake


def energy_flag(tmp_path: Path, *settings: str) -> str:
    """Write a configuration with these settings of the section `energy`, and return the flag that selects it."""
    file = tmp_path / "config.yaml"
    file.write_text(f"energy: {{{', '.join([f'lock_dir: {tmp_path}', *settings])}}}\n")
    return f"--config.file={file}"


def idle_watts(running: Sidecar, method: str) -> float | None:
    """Return the idle power of the first GPU in watts as estimated by a method, or None if absent."""
    pattern = rf'^gpu_power_idle_watts{{(?=[^}}]*gpu="0")[^}}]*method="{method}"[^}}]*}} (\S+)$'
    match = re.search(pattern, running.page, re.MULTILINE)
    return None if match is None else float(match[1])
