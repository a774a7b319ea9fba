"""Goodput of a training, end to end: real processes, SIGKILL, and a real sidecar.

The first tests play five scenarios of one or two attempts. The further tests kill the job and the sidecar repeatedly, move a
session to another node, and compare sums of energy. Durations are compared with the job's own measurement of every step (see
goodput_job.py).
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from goodput_support import check_seconds_add_up, read_page, training_value, wait_for_page
from ledger_support import Page
from places import TESTS
from run_support import child_environment
from serve_support import sidecar
from waiting import PATIENCE, wait_until

JOB = TESTS / "goodput_job.py"
CONFIGURATION = "feed: {interval: 200ms}\ngpu: {enabled: false}\n"


@dataclass(frozen=True)
class Step:
    """Step in the job's own log."""

    process_id: int
    number: int
    body_seconds: float  # without the entry and exit of the block, in which a busy machine may stop the job
    seconds: float


def sum_of_series(page: Page, name: str, run: str) -> float:
    """Return the sum of a family over all reasons, causes or phases."""
    samples = page.all(f"training_{name}").items()
    return sum(value for labels, value in samples if ("run", run) in labels)


def run_info(page: Page, run: str) -> dict[str, str]:
    """Return the labels of `training_run_info` of a run."""
    return next((dict(labels) for labels in page.all("training_run_info") if ("run", run) in labels), {})


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    (tmp_path / "exporter.yaml").write_text(CONFIGURATION)
    (tmp_path / "job").mkdir()
    (tmp_path / "state").mkdir()
    return [f"--config.file={tmp_path / 'exporter.yaml'}", f"--state.dir={tmp_path / 'state'}"]


@contextlib.contextmanager
def running_job(
    tmp_path: Path, steps: int, *arguments: str, run: str = "job-1"
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(JOB), str(tmp_path / "job"), str(steps), *arguments]
    env = child_environment(
        EXPORTER_FEED_DIR=str(tmp_path / "feed"), EXPORTER_RUN=run, EXPORTER_FLUSH_SECONDS="0.2"
    )
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run_to_completion(tmp_path: Path, steps: int, *arguments: str, run: str = "job-1") -> None:
    with running_job(tmp_path, steps, *arguments, run=run) as process:
        process.communicate(timeout=30 * PATIENCE)
        assert process.returncode == 0


def run_until_killed(
    tmp_path: Path, steps: int, killed_step: int, *arguments: str, run: str = "job-1"
) -> None:
    with running_job(tmp_path, steps, f"--pause-at={killed_step}", *arguments, run=run) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "paused\n"
        process.send_signal(signal.SIGKILL)
        process.wait()


def steps_of(tmp_path: Path) -> list[Step]:
    log_lines = (tmp_path / "job" / "log").read_text().splitlines()
    return [
        Step(int(process_id), int(number), float(body_seconds), float(seconds))
        for process_id, number, body_seconds, seconds in map(str.split, log_lines)
    ]


def has_steps(tmp_path: Path, count: int) -> bool:
    return (tmp_path / "job" / "log").exists() and len(steps_of(tmp_path)) >= count


def body_seconds_of(steps: list[Step]) -> float:
    return sum(step.body_seconds for step in steps)


def seconds_of(steps: list[Step]) -> float:
    return sum(step.seconds for step in steps)


def is_duration_of(seconds: float | None, steps: list[Step]) -> bool:
    """Return True if a sum of step durations is that of the job's own measurement, with a tolerance of 10 % or 0.1 s."""
    assert seconds is not None
    shortest_seconds, longest_seconds = body_seconds_of(steps), seconds_of(steps)
    return (
        shortest_seconds - max(0.1, 0.1 * shortest_seconds)
        <= seconds
        <= longest_seconds + max(0.1, 0.1 * longest_seconds)
    )


@pytest.mark.parametrize(
    ("perf", "world_size"),
    [("changed", "1"), ("changed", "8"), ("perf", "1")],
    ids=["another-model", "more-resources", "a-new-kernel"],
)
def test_scenarios_1_to_3_two_trainings_from_step_0_are_two_sessions(
    tmp_path: Path, flags: list[str], perf: str, world_size: str
) -> None:
    with sidecar(tmp_path, *flags) as running:
        run_to_completion(tmp_path, 40, "--session=a", "--from-nothing")
        wait_for_page(running, lambda scraped: training_value(scraped, "attempt_steps", "job-1") == 40)
        first_page = read_page(running)
        first_step_count = len(steps_of(tmp_path))
        run_to_completion(
            tmp_path, 40, "--session=b", "--from-nothing", f"--perf={perf}", f"--world-size={world_size}"
        )
        wait_for_page(running, lambda scraped: run_info(scraped, "job-1").get("session_tag") == "b")
        wait_for_page(running, lambda scraped: training_value(scraped, "attempt_steps", "job-1") == 40)
        wait_for_page(running, lambda scraped: training_value(scraped, "uncommitted_seconds", "job-1") == 0)
        second_page = read_page(running)

    steps = steps_of(tmp_path)
    assert run_info(first_page, "job-1")["perf_tag"] == "perf"
    assert [run_info(second_page, "job-1")[name] for name in ("perf_tag", "world_size")] == [perf, world_size]
    for session_page, session_steps in (
        (first_page, steps[:first_step_count]),
        (second_page, steps[first_step_count:]),
    ):
        assert training_value(session_page, "attempt", "job-1") == 1
        assert training_value(session_page, "lost_steps_total", "job-1") == 0
        assert sum_of_series(session_page, "restarts_total", "job-1") == 0
        assert sum_of_series(session_page, "interruptions_total", "job-1") == 0
        assert is_duration_of(
            training_value(session_page, "productive_seconds_total", "job-1"), session_steps
        )
        assert training_value(session_page, "badput_seconds_total", "job-1", cause="downtime") == 0
        check_seconds_add_up(session_page, "job-1")


@pytest.mark.parametrize(
    ("second_run", "perf"),
    [("job-1", "perf"), ("job-2", "perf"), ("job-2", "faster")],
    ids=["4-same-run-name", "4-other-run-name", "5-faster-code"],
)
def test_scenarios_4_and_5_a_training_that_fails_and_resumes_is_one_session(
    tmp_path: Path, flags: list[str], second_run: str, perf: str
) -> None:
    # The job is killed after 98 steps, resumes at step 90, and ends at step 120.
    with sidecar(tmp_path, *flags) as running:
        run_until_killed(tmp_path, 120, 98, "--session=s", "--save-every=30")
        wait_for_page(running, lambda scraped: sum_of_series(scraped, "interruptions_total", "job-1") == 1)
        failed_page = read_page(running)
    # The sidecar is also killed, and a new sidecar continues.
    with sidecar(tmp_path, *flags) as running:
        run_to_completion(tmp_path, 120, "--session=s", "--save-every=30", f"--perf={perf}", run=second_run)
        wait_for_page(running, lambda scraped: training_value(scraped, "attempt_steps", second_run) == 30)
        wait_for_page(
            running, lambda scraped: training_value(scraped, "uncommitted_seconds", second_run) == 0
        )
        resumed_page = read_page(running)

    steps = steps_of(tmp_path)
    first_attempt = [step for step in steps if step.process_id == steps[0].process_id]
    second_attempt = [step for step in steps if step.process_id != steps[0].process_id]
    assert [step.number for step in second_attempt] == list(range(90, 120))
    assert is_duration_of(
        training_value(failed_page, "productive_seconds_total", "job-1"), first_attempt[:90]
    )
    assert is_duration_of(training_value(failed_page, "uncommitted_seconds", "job-1"), first_attempt[90:])
    assert training_value(resumed_page, "lost_steps_total", second_run) == 8
    assert is_duration_of(
        training_value(resumed_page, "badput_seconds_total", second_run, cause="lost_progress"),
        first_attempt[90:],
    )
    assert is_duration_of(
        training_value(resumed_page, "productive_seconds_total", second_run),
        first_attempt[:90] + second_attempt,
    )
    assert training_value(resumed_page, "attempt", second_run) == 2
    assert sum_of_series(resumed_page, "restarts_total", second_run) == 1
    assert sum_of_series(resumed_page, "interruptions_total", second_run) == 1
    assert run_info(resumed_page, second_run)["perf_tag"] == perf
    assert run_info(resumed_page, second_run)["session_tag"] == "s"
    assert [dict(labels)["run"] for labels in resumed_page.all("training_wall_seconds_total")] == [second_run]
    check_seconds_add_up(resumed_page, second_run)


@pytest.mark.timeout(90)
def test_killing_job_and_sidecar_loses_at_most_the_unflushed_steps(tmp_path: Path, flags: list[str]) -> None:
    generator = random.Random(7)
    pages: list[Page] = []
    kills = 0
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(sidecar(tmp_path, *flags))
        for attempt in range(4):
            previous_steps = len(steps_of(tmp_path)) if attempt else 0
            with running_job(tmp_path, 150, "--session=s", "--save-every=20") as process:
                if attempt < 3:
                    # After its first step, the job has written to the feed, however slow its start is.
                    wait_until(lambda previous_steps=previous_steps: has_steps(tmp_path, previous_steps + 1))  # type: ignore[misc]
                    time.sleep(generator.uniform(0.4, 1.2))
                    process.kill()
                    kills += 1
                if attempt == 1:
                    running.process.kill()
                    running = stack.enter_context(sidecar(tmp_path, *flags))
                process.communicate(timeout=60 * PATIENCE)
            wait_for_page(
                running, lambda scraped: training_value(scraped, "uncommitted_seconds", "job-1") is not None
            )
            pages.append(read_page(running))
        wait_for_page(running, lambda scraped: training_value(scraped, "uncommitted_seconds", "job-1") == 0)
        pages.append(read_page(running))

    steps = steps_of(tmp_path)
    repeated_steps = len(steps) - len({step.number for step in steps})
    final_page = pages[-1]
    lost_steps = training_value(final_page, "lost_steps_total", "job-1")
    assert lost_steps is not None
    # A killed process loses its unflushed values: a fifth of a second, or twenty steps, and a few on a busy machine.
    assert repeated_steps - 25 * kills <= lost_steps <= repeated_steps
    lost_seconds = training_value(final_page, "badput_seconds_total", "job-1", cause="lost_progress")
    assert lost_seconds is not None
    productive_seconds = training_value(final_page, "productive_seconds_total", "job-1")
    assert productive_seconds is not None
    counted_ratio = 1 - repeated_steps / len(steps)
    assert 0.8 * counted_ratio * body_seconds_of(steps) <= productive_seconds
    assert productive_seconds <= 1.2 * counted_ratio * seconds_of(steps)
    for previous_page, next_page in pairwise(pages):
        check_seconds_add_up(next_page, "job-1")
        for name in ("wall_seconds_total", "productive_seconds_total", "lost_steps_total"):
            assert (training_value(next_page, name, "job-1") or 0.0) >= (
                training_value(previous_page, name, "job-1") or 0.0
            )


def test_a_session_continues_on_another_node_while_the_first_sidecar_is_running(
    tmp_path: Path, flags: list[str]
) -> None:
    # The nodes are simulated: the sidecars have separate feeds and share a state directory.
    for name in ("a", "b", "a/job", "b/job"):
        (tmp_path / name).mkdir()
    with sidecar(tmp_path / "a", *flags) as first_sidecar, sidecar(tmp_path / "b", *flags) as second_sidecar:
        run_until_killed(tmp_path / "a", 120, 98, "--session=s", "--save-every=30")
        wait_for_page(
            first_sidecar, lambda scraped: sum_of_series(scraped, "interruptions_total", "job-1") == 1
        )
        (tmp_path / "a" / "job" / "saved").rename(tmp_path / "b" / "job" / "saved")
        run_to_completion(tmp_path / "b", 120, "--session=s", "--save-every=30", run="job-2")
        wait_for_page(
            second_sidecar, lambda scraped: training_value(scraped, "uncommitted_seconds", "job-2") == 0
        )
        resumed_page = read_page(second_sidecar)

    first_steps, second_steps = steps_of(tmp_path / "a"), steps_of(tmp_path / "b")
    assert [step.number for step in second_steps] == list(range(90, 120))
    assert training_value(resumed_page, "attempt", "job-2") == 2
    assert training_value(resumed_page, "lost_steps_total", "job-2") == 8
    assert is_duration_of(
        training_value(resumed_page, "productive_seconds_total", "job-2"), first_steps[:90] + second_steps
    )
    check_seconds_add_up(resumed_page, "job-2")


ENERGY_CONFIGURATION = """
feed:
  interval: 200ms
collectors:
  processes: {{interval: 200ms}}
  rapl: {{interval: 200ms}}
gpu:
  enabled: false
energy:
  interval: 300ms
  lock_dir: {directory}
  whole_machine: true
  cpu_tdp_watts: 100
"""


def test_the_energy_of_a_run_is_the_sum_over_phases_and_over_outcomes_of_work(
    tmp_path: Path, flags: list[str]
) -> None:
    # A power model of the CPUs provides the energy. The test compares only sums of energy.
    (tmp_path / "exporter.yaml").write_text(ENERGY_CONFIGURATION.format(directory=tmp_path))
    run = "job-1"
    with sidecar(tmp_path, *flags) as running:
        run_until_killed(tmp_path, 400, 150, "--session=s", "--save-every=100")
        run_to_completion(tmp_path, 400, "--session=s", "--save-every=100")
        wait_for_page(running, lambda scraped: training_value(scraped, "uncommitted_seconds", run) == 0)
        wait_for_page(
            running,
            lambda scraped: (
                abs(sum_of_series(scraped, "energy_joules_total", run) - energy_with_outcome(scraped, run))
                < 1e-6
            ),
        )
        final_page = read_page(running)

    assert sum_of_series(final_page, "phase_energy_joules_total", run) == pytest.approx(
        energy_with_outcome(final_page, run)
    )
    assert (training_value(final_page, "productive_energy_joules_total", run) or 0.0) > 0
    for cause in ("lost_progress", "init"):
        assert (training_value(final_page, "wasted_energy_joules_total", run, cause=cause) or 0.0) > 0


def energy_with_outcome(scraped: Page, run: str) -> float:
    """Return the productive and wasted energy of a run."""
    productive_joules = training_value(scraped, "productive_energy_joules_total", run) or 0.0
    return productive_joules + sum_of_series(scraped, "wasted_energy_joules_total", run)
