"""Five things that can happen to a training, end to end: real processes, killed for real, and a real sidecar.

The numbers are compared with what the job itself has measured of every step (see goodput_job.py).
"""

from __future__ import annotations

import contextlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from places import TESTS
from serve_support import Sidecar, environment, sidecar
from waiting import PATIENCE, wait_until

JOB = TESTS / "goodput_job.py"
CONFIGURATION = "feed:\n  interval: 200ms\n"


@dataclass(frozen=True)
class Step:
    process: int
    number: int
    seconds: float


class Page:
    """A page of the sidecar at one moment."""

    def __init__(self, text: str) -> None:
        self.values: dict[str, float] = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                self.values[name] = float(value)

    def of(self, name: str, run: str, **labels: str) -> float | None:
        pairs = sorted({**labels, "run": run}.items())
        inside = ",".join(f'{label}="{value}"' for label, value in pairs)
        return self.values.get(f"training_{name}{{{inside}}}")

    def runs(self, name: str) -> set[str]:
        """The runs of which there is such a family."""
        found = (re.match(rf'training_{name}\{{.*run="([^"]*)"', key) for key in self.values)
        return {match[1] for match in found if match is not None}

    def info(self, run: str) -> dict[str, str]:
        """What is told of a run."""
        for key in self.values:
            if key.startswith("training_run_info{") and f'run="{run}"' in key:
                return dict(re.findall(r'(\w+)="([^"]*)"', key))
        return {}

    def check(self, run: str) -> None:
        """The identity."""
        badput = [
            value
            for key, value in self.values.items()
            if key.startswith("training_badput") and f'run="{run}"' in key
        ]
        parts = [self.of("productive_seconds_total", run), self.of("uncommitted_seconds", run), *badput]
        assert self.of("wall_seconds_total", run) == pytest.approx(
            sum(part or 0.0 for part in parts), abs=1e-6
        )

    def total(self, name: str, run: str) -> float:
        """The sum over all reasons, or causes."""
        return sum(
            value
            for key, value in self.values.items()
            if key.startswith(f"training_{name}{{") and f'run="{run}"' in key
        )


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    (tmp_path / "exporter.yaml").write_text(CONFIGURATION)
    (tmp_path / "job").mkdir()
    (tmp_path / "state").mkdir()
    return [f"--config.file={tmp_path / 'exporter.yaml'}", f"--state.dir={tmp_path / 'state'}"]


def page(running: Sidecar) -> Page:
    return Page(running.ask("/metrics")[1])


def wait_for(running: Sidecar, holds: Callable[[Page], bool]) -> None:
    wait_until(lambda: holds(page(running)))


@contextlib.contextmanager
def job(tmp_path: Path, steps: int, *arguments: str, run: str = "job-1") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(JOB), str(tmp_path / "job"), str(steps), *arguments]
    env = environment(
        EXPORTER_FEED_DIR=str(tmp_path / "feed"), EXPORTER_RUN=run, EXPORTER_FLUSH_SECONDS="0.2"
    )
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def completed(tmp_path: Path, steps: int, *arguments: str, run: str = "job-1") -> None:
    with job(tmp_path, steps, *arguments, run=run) as process:
        process.communicate(timeout=30 * PATIENCE)
        assert process.returncode == 0


def killed(tmp_path: Path, steps: int, at: int, *arguments: str, run: str = "job-1") -> None:
    with job(tmp_path, steps, f"--pause-at={at}", *arguments, run=run) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "paused\n"
        process.send_signal(signal.SIGKILL)
        process.wait()


def steps_of(tmp_path: Path) -> list[Step]:
    lines = [line.split() for line in (tmp_path / "job" / "log").read_text().splitlines()]
    return [Step(int(process), int(number), float(seconds)) for process, number, seconds in lines]


def has_steps(tmp_path: Path, count: int) -> bool:
    return (tmp_path / "job" / "log").exists() and len(steps_of(tmp_path)) >= count


def seconds_of(steps: list[Step]) -> float:
    return sum(step.seconds for step in steps)


def close(seconds: float) -> object:
    """A tenth, and a tenth of a second: between what the job and what its spans have measured lies little."""
    return pytest.approx(seconds, rel=0.1, abs=0.1)


@pytest.mark.parametrize(
    ("perf", "world_size"),
    [("changed", "1"), ("changed", "8"), ("perf", "1")],
    ids=["another-model", "more-resources", "a-new-kernel"],
)
def test_scenarios_1_to_3_two_trainings_from_the_beginning_are_two_sessions(
    tmp_path: Path, flags: list[str], perf: str, world_size: str
) -> None:
    with sidecar(tmp_path, *flags) as running:
        completed(tmp_path, 40, "--session=a", "--from-nothing")
        wait_for(running, lambda found: found.of("attempt_steps", "job-1") == 40)
        first = page(running)
        middle = len(steps_of(tmp_path))
        completed(
            tmp_path, 40, "--session=b", "--from-nothing", f"--perf={perf}", f"--world-size={world_size}"
        )
        wait_for(running, lambda found: found.info("job-1").get("session_tag") == "b")
        wait_for(running, lambda found: found.of("attempt_steps", "job-1") == 40)
        wait_for(running, lambda found: found.of("uncommitted_seconds", "job-1") == 0)
        second = page(running)

    steps = steps_of(tmp_path)
    assert first.info("job-1")["perf_tag"] == "perf"
    assert [second.info("job-1")[name] for name in ("perf_tag", "world_size")] == [perf, world_size]
    for found, mine in ((first, steps[:middle]), (second, steps[middle:])):
        assert found.of("attempt", "job-1") == 1
        assert found.of("lost_steps_total", "job-1") == 0
        assert found.total("restarts_total", "job-1") == 0
        assert found.total("interruptions_total", "job-1") == 0
        assert found.of("productive_seconds_total", "job-1") == close(seconds_of(mine))
        assert found.of("badput_seconds_total", "job-1", cause="downtime") == 0
        found.check("job-1")


@pytest.mark.parametrize(
    ("second_run", "perf"),
    [("job-1", "perf"), ("job-2", "perf"), ("job-2", "faster")],
    ids=["4", "4-slurm", "5"],
)
def test_scenarios_4_and_5_a_training_that_fails_and_resumes_is_one_session(
    tmp_path: Path, flags: list[str], second_run: str, perf: str
) -> None:
    """It fails at step 100, resumes from 90, under another job of the scheduler perhaps, and ends at 120."""
    with sidecar(tmp_path, *flags) as running:
        killed(tmp_path, 120, 98, "--session=s", "--save-every=30")
        wait_for(running, lambda found: found.total("interruptions_total", "job-1") == 1)
        failed = page(running)
    # The sidecar is killed too, and another one takes over.
    with sidecar(tmp_path, *flags) as running:
        completed(tmp_path, 120, "--session=s", "--save-every=30", f"--perf={perf}", run=second_run)
        wait_for(running, lambda found: found.of("attempt_steps", second_run) == 30)
        wait_for(running, lambda found: found.of("uncommitted_seconds", second_run) == 0)
        resumed = page(running)

    steps = steps_of(tmp_path)
    first = [step for step in steps if step.process == steps[0].process]
    second = [step for step in steps if step.process != steps[0].process]
    assert [step.number for step in second] == list(range(90, 120))
    assert failed.of("productive_seconds_total", "job-1") == close(seconds_of(first[:90]))
    assert failed.of("uncommitted_seconds", "job-1") == close(seconds_of(first[90:]))
    assert resumed.of("lost_steps_total", second_run) == 8
    assert resumed.of("badput_seconds_total", second_run, cause="lost_progress") == close(
        seconds_of(first[90:])
    )
    assert resumed.of("productive_seconds_total", second_run) == close(seconds_of(first[:90] + second))
    assert resumed.of("attempt", second_run) == 2
    assert resumed.total("restarts_total", second_run) == 1
    assert resumed.total("interruptions_total", second_run) == 1
    assert resumed.info(second_run)["perf_tag"] == perf
    assert resumed.info(second_run)["session_tag"] == "s"
    assert resumed.runs("wall_seconds_total") == {second_run}
    resumed.check(second_run)


@pytest.mark.timeout(90)
def test_a_job_and_a_sidecar_that_are_killed_at_any_instant_lose_no_count(
    tmp_path: Path, flags: list[str]
) -> None:
    chance = random.Random(7)
    marks: list[Page] = []
    kills = 0
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(sidecar(tmp_path, *flags))
        for attempt in range(4):
            begun = len(steps_of(tmp_path)) if attempt else 0
            with job(tmp_path, 150, "--session=s", "--save-every=20") as process:
                if attempt < 3:
                    # However long a busy machine takes to start it: it has written to the feed by then.
                    wait_until(lambda begun=begun: has_steps(tmp_path, begun + 1))  # type: ignore[misc]
                    time.sleep(chance.uniform(0.4, 1.2))
                    process.kill()
                    kills += 1
                if attempt == 1:
                    running.process.kill()
                    running = stack.enter_context(sidecar(tmp_path, *flags))
                process.communicate(timeout=60 * PATIENCE)
            wait_for(running, lambda found: found.of("uncommitted_seconds", "job-1") is not None)
            marks.append(page(running))
        wait_for(running, lambda found: found.of("step", "job-1") is None)
        wait_for(running, lambda found: found.of("uncommitted_seconds", "job-1") == 0)
        marks.append(page(running))

    steps = steps_of(tmp_path)
    repeated = len(steps) - len({step.number for step in steps})
    last = marks[-1]
    lost = last.of("lost_steps_total", "job-1")
    assert lost is not None
    # A killed process takes with it what it has not flushed: a fifth of a second, twenty steps.
    assert repeated - 25 * kills <= lost <= repeated
    lost_seconds = last.of("badput_seconds_total", "job-1", cause="lost_progress")
    assert lost_seconds is not None
    productive = last.of("productive_seconds_total", "job-1")
    assert productive == pytest.approx(seconds_of(steps) - repeated * seconds_of(steps) / len(steps), rel=0.2)
    for before, after in pairwise(marks):
        after.check("job-1")
        for name in ("wall_seconds_total", "productive_seconds_total", "lost_steps_total"):
            assert (after.of(name, "job-1") or 0.0) >= (before.of(name, "job-1") or 0.0)


SETTINGS = """
feed:
  interval: 200ms
goodput:
  validation: {validation}
  new_task_after: 10m
  peak_flops:
    - device: "*H100*"
      flops: 9.0e14
collectors:
  checkpoint_dirs:
    interval: 200ms
    paths: ["{directory}", "{directory}/missing"]
"""


def test_goodput_and_checkpoint_directories_are_configured(tmp_path: Path, flags: list[str]) -> None:
    file = tmp_path / "exporter.yaml"
    file.write_text(SETTINGS.format(validation="badput", directory=tmp_path))
    with sidecar(tmp_path, *flags) as running, job(tmp_path, 500, "--session=s") as process:
        wait_for(running, lambda found: (found.of("productive_seconds_total", "job-1") or 0.0) > 0)
        path = str(tmp_path)
        wait_for(running, lambda found: found.of("checkpoint_dir_size_bytes", "job-1", path=path) is not None)
        found = page(running)
        file.write_text(SETTINGS.format(validation="productive", directory=tmp_path))
        running.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "configuration" in running.log and "reload" in running.log.lower())
        reloaded = running.ask("/metrics")[1]
        process.kill()

    assert found.of("checkpoint_dir_available_bytes", "job-1", path=f"{path}/missing") is None
    assert "exporter_config_last_reload_successful 1.0" in reloaded
    assert 'exporter_collector_success{collector="checkpoint_dirs"} 0.0' in reloaded


def test_a_session_goes_on_on_another_node_while_the_first_ones_sidecar_lives(tmp_path: Path) -> None:
    """Two nodes with a sidecar each, that share a directory of state."""
    for name in ("a", "b", "a/job", "b/job", "state"):
        (tmp_path / name).mkdir()
    (tmp_path / "exporter.yaml").write_text(CONFIGURATION)
    flags = [f"--config.file={tmp_path / 'exporter.yaml'}", f"--state.dir={tmp_path / 'state'}"]
    with sidecar(tmp_path / "a", *flags) as here, sidecar(tmp_path / "b", *flags) as there:
        killed(tmp_path / "a", 120, 98, "--session=s", "--save-every=30")
        wait_for(here, lambda found: found.total("interruptions_total", "job-1") == 1)
        (tmp_path / "a" / "job" / "saved").rename(tmp_path / "b" / "job" / "saved")
        completed(tmp_path / "b", 120, "--session=s", "--save-every=30", run="job-2")
        wait_for(there, lambda found: found.of("uncommitted_seconds", "job-2") == 0)
        resumed = page(there)

    first, second = steps_of(tmp_path / "a"), steps_of(tmp_path / "b")
    assert [step.number for step in second] == list(range(90, 120))
    assert resumed.of("attempt", "job-2") == 2
    assert resumed.of("lost_steps_total", "job-2") == 8
    assert resumed.of("productive_seconds_total", "job-2") == close(seconds_of(first[:90] + second))
    resumed.check("job-2")


JOULES = """
feed:
  interval: 200ms
collectors:
  processes: {{interval: 200ms}}
  rapl: {{interval: 200ms}}
energy:
  interval: 300ms
  lock_dir: {directory}
  whole_machine: true
  cpu_tdp_watts: 100
"""


def test_the_energy_of_a_run_is_that_of_its_phases_and_of_what_became_of_its_work(
    tmp_path: Path, flags: list[str]
) -> None:
    """The machine's CPUs stand for a device; a model of their power will do, as it is the sums that are looked at."""
    (tmp_path / "exporter.yaml").write_text(JOULES.format(directory=tmp_path))
    run = "job-1"
    with sidecar(tmp_path, *flags) as running:
        killed(tmp_path, 400, 150, "--session=s", "--save-every=100")
        completed(tmp_path, 400, "--session=s", "--save-every=100")
        wait_for(running, lambda found: found.of("uncommitted_seconds", run) == 0)
        wait_until(lambda: settled(running, run))
        found = page(running)

    energy = found.total("energy_joules_total", run)
    assert energy > 0
    assert found.total("phase_energy_joules_total", run) == pytest.approx(energy)
    assert found.of("productive_energy_joules_total", run) == pytest.approx(
        energy - found.total("wasted_energy_joules_total", run)
    )
    assert (found.of("wasted_energy_joules_total", run, cause="lost_progress") or 0.0) > 0
    assert (found.of("wasted_energy_joules_total", run, cause="init") or 0.0) > 0


def settled(running: Sidecar, run: str) -> bool:
    """Whether all energy of work has found its place."""
    found = page(running)
    placed = (found.of("productive_energy_joules_total", run) or 0.0) + found.total(
        "wasted_energy_joules_total", run
    )
    return abs(found.total("energy_joules_total", run) - placed) < 1e-6
