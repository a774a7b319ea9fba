"""Division of the energy of GPUs among runs: GPUs shared by runs, runs on several GPUs, and GPUs that only the feed names."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from container_support import reason_to_skip, sidecar_in_namespaces
from energy_run_support import (
    CRASHING_JOB,
    SECOND_GPU,
    WATTS,
    GpuJob,
    energy_flag,
    joules,
    start_fake_nvml,
    wait_for_final_joules,
)
from fake_nvml_support import needs_fake_nvml
from serve_support import Sidecar, sidecar
from waiting import wait_until

pytestmark = [pytest.mark.slow, needs_fake_nvml]

SKIP_REASON = reason_to_skip()
TRAINING_SECONDS = 12.0
"""Duration of a job. Two tenths of a second at its start and end are less than 2 % of its energy."""


def share_sum(running: Sidecar) -> float:
    """Return the sum over all GPUs of the shares of run a."""
    return joules(running, "training_energy_share_ratio", "a", 'component="gpu"')


def repeat_until(end_time: float) -> Iterator[None]:
    """Yield every 0.2 seconds until a monotonic time."""
    while time.monotonic() < end_time:
        yield
        time.sleep(0.2)


def test_two_runs_share_a_gpu_and_a_third_run_uses_two_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = start_fake_nvml(tmp_path, monkeypatch, count=3)
    with sidecar(tmp_path, energy_flag(tmp_path)) as running:
        wait_until(lambda: "gpu_energy_joules_total{" in running.page)
        jobs = [GpuJob(tmp_path, run, TRAINING_SECONDS) for run in ("a", "b", "c")]
        a_pid, b_pid, c_pid = (job.process.pid for job in jobs)
        fake.hold((a_pid, 0), (b_pid, 0), (c_pid, 1), (c_pid, 2))
        lifetimes = [job.wait() for job in jobs]
        run_joules = wait_for_final_joules(running, "a", "b", "c")

    # The deviations of two runs add up.
    assert run_joules[0] + run_joules[1] == pytest.approx(WATTS * max(lifetimes[:2]), rel=0.03)
    # After the end of one run, the other run is attributed the whole power.
    survivor_joules = WATTS * (lifetimes[0] - lifetimes[1])
    assert run_joules[0] == pytest.approx(run_joules[1] + survivor_joules, rel=0.05)
    assert run_joules[2] == pytest.approx(2 * WATTS * lifetimes[2], rel=0.02)


def test_a_run_on_eight_gpus_loses_at_most_the_energy_of_the_downtime_of_the_sidecar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = start_fake_nvml(tmp_path, monkeypatch, count=8)
    with sidecar(tmp_path, energy_flag(tmp_path)) as running:
        wait_until(lambda: running.page.count("gpu_energy_joules_total{") == 8)
        ranks = [GpuJob(tmp_path, "a", 600, rank) for rank in range(8)]
        fake.hold(*((rank.process.pid, gpu) for gpu, rank in enumerate(ranks)))
        registration_seconds = time.monotonic() - ranks[0].started_at
        wait_until(lambda: share_sum(running) == 8.0)
        # The rule `run_gpu:training_gpu_held:group` reads the shares.
        share_sums = {share_sum(running) for _ in repeat_until(time.monotonic() + TRAINING_SECONDS)}
        kill_time = time.monotonic()
        running.end(signal.SIGKILL)
    with sidecar(tmp_path, energy_flag(tmp_path)) as running:
        wait_until(lambda: running.page.count("gpu_energy_joules_total{") == 8)
        downtime_seconds = time.monotonic() - kill_time
        time.sleep(TRAINING_SECONDS)
        for rank in ranks:
            rank.process.kill()
        lifetimes = [rank.wait() for rank in ranks]
        (run_joules,) = wait_for_final_joules(running, "a")

    assert share_sums == {8.0}
    # A process that the driver lists late has the GPU from the last list without the process.
    known_seconds = sum(lifetimes) - 8 * (downtime_seconds + registration_seconds)
    assert WATTS * known_seconds * 0.98 <= run_joules <= WATTS * sum(lifetimes) * 1.02


def test_without_a_process_list_a_run_is_attributed_energy_by_the_gpu_in_the_feed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = start_fake_nvml(tmp_path, monkeypatch, count=2)
    fake.draw(100.0, WATTS)
    # Both versions of the call return NVML_ERROR_NOT_SUPPORTED (3) for all GPUs.
    fake.fail(*(f"nvmlDeviceGetComputeRunningProcesses_v{version} -1 3 0 1e12" for version in (2, 3)))
    with sidecar(tmp_path, energy_flag(tmp_path)) as running:
        wait_until(lambda: "gpu_energy_joules_total{" in running.page)
        job = GpuJob(tmp_path, "a", 4.0, code=CRASHING_JOB, CUDA_VISIBLE_DEVICES=SECOND_GPU)
        lifetime_seconds = job.wait()
        (run_joules,) = wait_for_final_joules(running, "a")
        load_joules = joules(running, "training_phase_energy_joules_total", "a", 'phase="checkpoint_load"')

    assert WATTS * 4.0 * 0.98 <= run_joules <= WATTS * lifetime_seconds * 1.02
    assert load_joules == pytest.approx(WATTS * 4.0, rel=0.1)


@pytest.mark.skipif(bool(SKIP_REASON), reason=SKIP_REASON)
def test_a_sidecar_in_another_pid_namespace_finds_the_gpu_of_a_run_in_its_feed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = start_fake_nvml(tmp_path, monkeypatch, count=2)
    fake.draw(100.0, WATTS)
    with sidecar_in_namespaces(tmp_path, tmp_path / "feed") as running:
        wait_until(lambda: "gpu_energy_joules_total{" in running.page)
        job = GpuJob(tmp_path, "a", TRAINING_SECONDS, CUDA_VISIBLE_DEVICES="1")
        fake.hold((job.process.pid, 1))  # a pid that the sidecar does not know
        lifetime_seconds = job.wait()
        (run_joules,) = wait_for_final_joules(running, "a")

    assert WATTS * TRAINING_SECONDS * 0.98 <= run_joules <= WATTS * lifetime_seconds * 1.02


def test_the_energy_of_an_attempt_without_a_known_gpu_is_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_fake_nvml(tmp_path, monkeypatch, count=2)
    gap_series_prefix = (
        'exporter_energy_gap_joules_total{component="gpu",device="GPU-00000000-fa4e-4e47-8888-123456789abc",'
    )
    with sidecar(tmp_path, energy_flag(tmp_path)) as running:
        wait_until(lambda: "gpu_energy_joules_total{" in running.page)
        job = GpuJob(tmp_path, "a", 0.2, code=CRASHING_JOB)
        lifetime_seconds = job.wait()
        wait_until(lambda: running.sample(f'{gap_series_prefix}reason="process_not_listed"}}') is not None)
        gap_joules = running.sample(f'{gap_series_prefix}reason="process_not_listed"}}') or 0.0
        run_joules = joules(running, "training_energy_joules_total", "a")

    assert 0 < gap_joules <= WATTS * lifetime_seconds
    assert run_joules == 0
