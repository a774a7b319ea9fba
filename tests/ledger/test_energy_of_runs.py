"""Energy of complete runs: a real sidecar, real processes, and a libnvidia-ml.so.1 whose GPUs draw a constant 500 W."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from container_support import ContainedSidecar, reason_to_skip, sidecar_in_namespaces
from fake_nvml_support import FakeNvml, Load, needs_fake_nvml, play_constant_load
from serve_support import Sidecar, environment, sidecar
from waiting import wait_until

pytestmark = needs_fake_nvml

SKIP_REASON = reason_to_skip()
WATTS = 500.0
CARD = "GPU-00000001-fa4e-4e47-8888-123456789abc"
"""UUID of the stand-in's second GPU."""
JOB = """
import sys, time
from exporter import training
until = time.monotonic() + float(sys.argv[1])
with training.training_loop(train_iterations_start=0):
    while time.monotonic() < until:
        with training.training_iteration():
            time.sleep(0.05)
"""


CRASHING_JOB = """
import sys, time
from exporter import training
with training.training_loop(train_iterations_start=0):
    with training.checkpoint_load():
        time.sleep(float(sys.argv[1]))
        raise OSError("no such checkpoint")
"""


class Job:
    """A process that trains on a GPU."""

    def __init__(
        self, tmp_path: Path, run: str, seconds: float, rank: int = 0, code: str = JOB, **variables: str
    ) -> None:
        self.run, self.started_at = run, time.monotonic()
        identity = {"EXPORTER_RUN": run, "RANK": str(rank)}
        env = environment(EXPORTER_FEED_DIR=str(tmp_path / "feed"), **identity, **variables)
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
        self.process.kill()
        return self.wait()


def joules(running: Sidecar | ContainedSidecar, family: str, run: str, label: str = "") -> float:
    """Return the sum over the series of a run with a label."""
    pattern = rf'^{family}{{(?=[^}}]*run="{run}")(?=[^}}]*{label})[^}}]*}} (\S+)$'
    return sum(float(number) for number in re.findall(pattern, running.page, re.MULTILINE))


def last_energy_pass(running: Sidecar | ContainedSidecar) -> str:
    """Return the time of the last pass of the energy ledger."""
    match = re.search(
        r'^exporter_collector_last_success_timestamp_seconds{collector="energy"} (\S+)$',
        running.page,
        re.MULTILINE,
    )
    return "" if match is None else match[1]


def wait_for_settled_energy(running: Sidecar | ContainedSidecar, run: str) -> float:
    """Return the energy of a run that has ended, once four passes in a row have not changed it."""
    last_joules, unchanged_passes, last_passes = -1.0, 0, ""
    while unchanged_passes < 4:
        wait_until(lambda: last_energy_pass(running) != last_passes)  # noqa: B023  # called at once
        last_passes = last_energy_pass(running)
        current_joules = joules(running, "training_energy_joules_total", run)
        last_joules, unchanged_passes = (
            current_joules,
            unchanged_passes + 1 if current_joules == last_joules else 0,
        )
    return last_joules


def hold(fake: FakeNvml, jobs: Sequence[Job], gpus: range | None = None) -> None:
    fake.hold(*((job.process.pid, gpu) for job in jobs for gpu in gpus or range(fake.count)))


def start_fake_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> FakeNvml:
    (tmp_path / "feed").mkdir(mode=0o700)
    fake = FakeNvml(tmp_path / "nvml", count=count)
    play_constant_load(fake, Load(watts=WATTS))
    for name, text in fake.environment.items():
        monkeypatch.setenv(name, text)
    return fake


def flags(tmp_path: Path, *energy: str) -> str:
    file = tmp_path / "config.yaml"
    file.write_text(f"energy: {{{', '.join([f'lock_dir: {tmp_path}', *energy])}}}\n")
    return f"--config.file={file}"


def idle_watts(running: Sidecar, method: str) -> float | None:
    """Return the idle power of the first GPU by a method."""
    pattern = rf'^gpu_power_idle_watts{{(?=[^}}]*gpu="0")[^}}]*method="{method}"[^}}]*}} (\S+)$'
    match = re.search(pattern, running.page, re.MULTILINE)
    return None if match is None else float(match[1])


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_run_is_attributed_the_energy_of_its_whole_lifetime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_killed: bool
) -> None:
    fake = start_fake_nvml(tmp_path, monkeypatch)
    with sidecar(tmp_path, flags(tmp_path)) as running:
        wait_until(lambda: "gpu_energy_joules_total{" in running.page)
        job = Job(tmp_path, "a", 60 if is_killed else 10)
        hold(fake, [job])
        if is_killed:
            time.sleep(13)
        seconds = job.kill() if is_killed else job.wait()
        run_joules = wait_for_settled_energy(running, "a")
        other_joules = running.sample('training_wasted_energy_joules_total{run="a",cause="other"}')

    assert run_joules == pytest.approx(WATTS * seconds, rel=0.02)
    assert is_killed or (other_joules or 0.0) < 0.02 * run_joules


def test_two_runs_share_a_card_and_a_third_run_uses_two_cards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = start_fake_nvml(tmp_path, monkeypatch, count=3)
    with sidecar(tmp_path, flags(tmp_path)) as running:
        wait_until(lambda: "gpu_energy_joules_total{" in running.page)
        first, second, wide = (Job(tmp_path, run, 12) for run in ("a", "b", "c"))
        fake.hold(
            (first.process.pid, 0), (second.process.pid, 0), (wide.process.pid, 1), (wide.process.pid, 2)
        )
        lives = [job.wait() for job in (first, second, wide)]
        run_joules = [wait_for_settled_energy(running, run) for run in ("a", "b", "c")]

    assert run_joules[0] + run_joules[1] == pytest.approx(WATTS * max(lives[:2]), rel=0.03)
    assert run_joules[0] == pytest.approx(run_joules[1], rel=0.05)
    assert run_joules[2] == pytest.approx(2 * WATTS * lives[2], rel=0.02)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_run_on_eight_cards_is_attributed_their_energy_despite_a_restart_of_the_sidecar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_restarted: bool
) -> None:
    fake = start_fake_nvml(tmp_path, monkeypatch, count=8)
    downtime_seconds = 0.0
    with ExitStack() as sidecars:
        running = sidecars.enter_context(sidecar(tmp_path, flags(tmp_path)))
        wait_until(lambda: running.page.count("gpu_energy_joules_total{") == 8)
        ranks = [Job(tmp_path, "a", 600, rank) for rank in range(8)]
        fake.hold(*((rank.process.pid, gpu) for gpu, rank in enumerate(ranks)))
        registration_seconds = time.monotonic() - ranks[0].started_at
        time.sleep(12)
        if is_restarted:
            start = time.monotonic()
            running.end(signal.SIGKILL)
            running = sidecars.enter_context(sidecar(tmp_path, flags(tmp_path)))
            wait_until(lambda: running.page.count("gpu_energy_joules_total{") == 8)
            downtime_seconds = time.monotonic() - start
            time.sleep(12)
        for rank in ranks:
            rank.process.kill()
        lives = [rank.wait() for rank in ranks]
        run_joules = wait_for_settled_energy(running, "a")

    # A process that the driver lists late has the GPU from the last list without the process.
    assert (
        WATTS * (sum(lives) - 8 * (downtime_seconds + registration_seconds)) * 0.98
        <= run_joules
        <= WATTS * sum(lives) * 1.02
    )


def test_an_attempt_of_two_seconds_is_attributed_its_energy_and_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = start_fake_nvml(tmp_path, monkeypatch)
    with sidecar(tmp_path, flags(tmp_path)) as running:
        wait_until(lambda: "gpu_energy_joules_total{" in running.page)
        first = Job(tmp_path, "a", 1.5, code=CRASHING_JOB)
        hold(fake, [first])
        seconds = first.wait()
        second = Job(tmp_path, "a", 10)
        hold(fake, [second])
        seconds += second.wait()
        run_joules = wait_for_settled_energy(running, "a")
        cause = joules(running, "training_wasted_energy_joules_total", "a", 'cause="checkpoint_load"')

    assert run_joules == pytest.approx(WATTS * seconds, rel=0.05)
    assert cause == pytest.approx(WATTS * 1.5, rel=0.1)


def test_without_a_process_list_a_run_is_attributed_energy_by_the_card_in_the_feed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = start_fake_nvml(tmp_path, monkeypatch, count=2)
    fake.draw(100.0, WATTS)
    fake.fail(*(f"nvmlDeviceGetComputeRunningProcesses_v{version} -1 3 0 1e12" for version in (2, 3)))
    with sidecar(tmp_path, flags(tmp_path)) as running:
        wait_until(lambda: "gpu_energy_joules_total{" in running.page)
        job = Job(tmp_path, "a", 4.0, code=CRASHING_JOB, CUDA_VISIBLE_DEVICES=CARD)
        seconds = job.wait()
        run_joules = wait_for_settled_energy(running, "a")
        load = joules(running, "training_phase_energy_joules_total", "a", 'phase="checkpoint_load"')

    assert WATTS * 4.0 <= run_joules <= WATTS * seconds * 1.02
    assert load == pytest.approx(WATTS * 4.0, rel=0.1)


@pytest.mark.skipif(bool(SKIP_REASON), reason=SKIP_REASON)
def test_a_sidecar_in_another_pid_namespace_finds_the_card_of_a_run_in_its_feed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = start_fake_nvml(tmp_path, monkeypatch, count=2)
    fake.draw(100.0, WATTS)
    with sidecar_in_namespaces(tmp_path, tmp_path / "feed") as running:
        wait_until(lambda: "gpu_energy_joules_total{" in running.page)
        job = Job(tmp_path, "a", 12, CUDA_VISIBLE_DEVICES="1")
        fake.hold((job.process.pid, 1))  # a number of another namespace
        seconds = job.wait()
        run_joules = wait_for_settled_energy(running, "a")

    assert WATTS * 12 <= run_joules <= WATTS * seconds * 1.02


def test_the_energy_of_an_attempt_without_a_known_card_is_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_fake_nvml(tmp_path, monkeypatch, count=2)
    gap = (
        'exporter_energy_gap_joules_total{component="gpu",device="GPU-00000000-fa4e-4e47-8888-123456789abc",'
    )
    with sidecar(tmp_path, flags(tmp_path)) as running:
        wait_until(lambda: "gpu_energy_joules_total{" in running.page)
        job = Job(tmp_path, "a", 0.2, code=CRASHING_JOB)
        seconds = job.wait()
        wait_until(lambda: running.sample(f'{gap}reason="process_not_listed"}}') is not None)
        gap_seconds = running.sample(f'{gap}reason="process_not_listed"}}') or 0.0
        run_joules = joules(running, "training_energy_joules_total", "a")

    assert 0 < gap_seconds <= WATTS * seconds
    assert run_joules == 0


def test_a_restart_of_the_sidecar_loses_only_the_energy_of_the_downtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = start_fake_nvml(tmp_path, monkeypatch)
    with sidecar(tmp_path, flags(tmp_path)) as running:
        wait_until(lambda: "gpu_energy_joules_total{" in running.page)
        job = Job(tmp_path, "a", 60)
        hold(fake, [job])
        time.sleep(14)
        downtime_seconds = time.monotonic()
        running.end(signal.SIGKILL)
    with sidecar(tmp_path, flags(tmp_path)) as running:
        wait_until(lambda: "gpu_energy_joules_total{" in running.page)
        downtime_seconds = time.monotonic() - downtime_seconds
        time.sleep(12)
        seconds = job.kill()
        run_joules = wait_for_settled_energy(running, "a")

    assert WATTS * (seconds - downtime_seconds) * 0.98 <= run_joules <= WATTS * seconds * 1.02


def test_idle_power_is_right_at_a_steady_draw_and_after_one_damaged_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = start_fake_nvml(tmp_path, monkeypatch)
    start = play_constant_load(fake, Load(watts=300.0))
    with sidecar(tmp_path, flags(tmp_path, "interval: 1s")) as running:
        wait_until(lambda: idle_watts(running, "before_start"))
        initial_idle = idle_watts(running, "before_start")
        fault_time = time.time()
        # One reading returns a third of the counter.
        fake.fail(f"nvmlDeviceGetTotalEnergyConsumption -1 0 {fault_time} {fault_time + 1.0} 0 2")
        time.sleep(6)
        fake.play((start - 1000.0, Load(watts=300.0)), (time.time(), Load(watts=700.0)))
        wait_until(lambda: idle_watts(running, "min_seen"))
        final_idle = [idle_watts(running, method) for method in ("before_start", "min_seen")]

    assert initial_idle == pytest.approx(300.0, rel=0.1)
    assert final_idle == pytest.approx([300.0, 300.0], rel=0.1)
