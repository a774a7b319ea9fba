"""Energy of complete runs: a real sidecar, real processes, and GPUs that draw a constant 500 W."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from energy_run_support import (
    CRASHING_JOB,
    WATTS,
    GpuJob,
    energy_flag,
    hold,
    idle_watts,
    joules,
    start_fake_nvml,
    wait_for_final_joules,
)
from fake_nvml_support import Load, needs_fake_nvml, play_constant_load
from serve_support import sidecar
from waiting import wait_until

pytestmark = [pytest.mark.slow, needs_fake_nvml]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_run_is_attributed_the_energy_of_its_whole_lifetime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_killed: bool
) -> None:
    fake = start_fake_nvml(tmp_path, monkeypatch)
    with sidecar(tmp_path, energy_flag(tmp_path)) as running:
        wait_until(lambda: "gpu_energy_joules_total{" in running.page)
        job = GpuJob(tmp_path, "a", 60 if is_killed else 10)
        hold(fake, [job])
        if is_killed:
            time.sleep(13)
        lifetime_seconds = job.kill() if is_killed else job.wait()
        (run_joules,) = wait_for_final_joules(running, "a")
        other_joules = running.sample('training_wasted_energy_joules_total{run="a",cause="other"}')

    assert run_joules == pytest.approx(WATTS * lifetime_seconds, rel=0.02)
    if not is_killed:
        assert (other_joules or 0.0) < 0.02 * run_joules  # the tolerance of the energy above


def test_an_attempt_of_two_seconds_is_attributed_its_energy_and_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = start_fake_nvml(tmp_path, monkeypatch)
    with sidecar(tmp_path, energy_flag(tmp_path)) as running:
        wait_until(lambda: "gpu_energy_joules_total{" in running.page)
        crashing_job = GpuJob(tmp_path, "a", 1.5, code=CRASHING_JOB)
        hold(fake, [crashing_job])
        crash_seconds = crashing_job.wait()
        next_attempt = GpuJob(tmp_path, "a", 10)
        hold(fake, [next_attempt])
        lifetime_seconds = crash_seconds + next_attempt.wait()
        (run_joules,) = wait_for_final_joules(running, "a")
        load_joules = joules(running, "training_wasted_energy_joules_total", "a", 'cause="checkpoint_load"')

    assert run_joules == pytest.approx(WATTS * lifetime_seconds, rel=0.05)
    # A busy machine ends the load late.
    assert WATTS * 1.5 * 0.9 <= load_joules <= WATTS * crash_seconds * 1.05


def test_idle_power_is_right_at_a_steady_draw_and_after_one_damaged_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = start_fake_nvml(tmp_path, monkeypatch)
    start_time = play_constant_load(fake, Load(watts=300.0))
    with sidecar(tmp_path, energy_flag(tmp_path, "interval: 1s")) as running:
        wait_until(lambda: idle_watts(running, "before_start"))
        initial_idle_watts = idle_watts(running, "before_start")
        fault_time = time.time()
        # One reading returns a third of the counter.
        fake.fail(f"nvmlDeviceGetTotalEnergyConsumption -1 0 {fault_time} {fault_time + 1.0} 0 2")
        time.sleep(6)
        fake.play((start_time - 1000.0, Load(watts=300.0)), (time.time(), Load(watts=700.0)))
        wait_until(lambda: idle_watts(running, "min_seen"))
        final_idle_watts = [idle_watts(running, method) for method in ("before_start", "min_seen")]

    assert initial_idle_watts == pytest.approx(300.0, rel=0.1)
    assert final_idle_watts == pytest.approx([300.0, 300.0], rel=0.1)
