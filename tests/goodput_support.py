"""Simulated jobs with explicit durations, in the feed of a sidecar, and the goodput on the page of a simulated or a real sidecar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import serve_support
from ledger_support import Page, SimulatedSidecar, make_process, make_snapshot
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_until

from exporter.ledger.goodput.accounting import BADPUT_CAUSES
from exporter.recording.values import END_REASONS, Ending, StatReading, TrainingReading, WorkSegment


@dataclass
class SimulatedJob:
    """Training of a process that advances only on request. The fields are those of `TrainingReading`."""

    facts: dict[str, str] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    phase: str = "init"
    first_step: int | None = None
    loop: int = 0
    inferred_loop: bool = False
    step: int | None = None
    steps: int = 0
    work_seconds: float = 0.0
    open_seconds: float = 0.0
    committed_step: int | None = None
    committed_seconds: float = 0.0
    segments: list[WorkSegment] = field(default_factory=list)
    last_progress: float | None = None
    finished: bool = False
    failure: str = ""
    longest_step_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """Time since the start of the job, the sum over all phases."""
        return sum(self.phases.values())

    def spend(self, phase: str, seconds: float) -> None:
        """Let the job spend a time in a phase."""
        self.phase = phase
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds

    def start_loop(self, first_step: int) -> None:
        self.loop += 1
        if self.first_step is None:
            self.first_step = first_step
        self.step = first_step

    def train(self, steps: int = 1, seconds: float = 1.0, *, data_seconds: float = 0.0) -> None:
        """Complete *steps* iterations that last *seconds* each. Each iteration first waits *data_seconds* for data."""
        self.open_seconds = 0.0
        for _ in range(steps):
            assert self.step is not None
            if data_seconds:
                self.spend("data_loading", data_seconds)
            self.spend("iteration", seconds)
            current_step, self.step = self.step, self.step + 1
            self.steps += 1
            self.work_seconds += seconds
            self.longest_step_seconds = max(self.longest_step_seconds or 0.0, seconds)
            self._add_to_segments(current_step, seconds)

    def _add_to_segments(self, step: int, seconds: float) -> None:
        """Extend the last segment by a step, or add a segment."""
        first_step, previous_seconds = step, 0.0
        if self.segments:
            last_segment = self.segments[-1]
            if (last_segment.loop, last_segment.last_step) == (self.loop, step - 1):
                first_step, previous_seconds = last_segment.first_step, last_segment.seconds
                del self.segments[-1]
        self.segments.append(WorkSegment(self.loop, first_step, step, previous_seconds + seconds))

    def hold(self, seconds: float) -> None:
        """Let the job spend a time in an iteration that does not end."""
        self.spend("iteration", seconds)
        self.open_seconds += seconds

    def save(self, seconds: float) -> None:
        """Save a checkpoint for *seconds*, which commits all earlier work."""
        self.spend("checkpoint_save_sync", seconds)
        self.committed_step, self.committed_seconds = self.step, self.work_seconds
        self.segments = []

    def reading(self) -> TrainingReading:
        facts, segments = tuple(sorted(self.facts.items())), tuple(self.segments)
        return TrainingReading(
            **{**vars(self), "facts": facts, "phases": dict(self.phases), "segments": segments}
        )


def job_in_loop(
    first_step: int = 0, *, init_seconds: float = 4.0, load_seconds: float = 0.0, **facts: str
) -> SimulatedJob:
    """Return a job at the start of its training loop, after the initialization and the load of a checkpoint."""
    job = SimulatedJob(facts=dict(facts))
    job.spend("init", init_seconds)
    if load_seconds:
        job.spend("checkpoint_load", load_seconds)
    job.start_loop(first_step)
    return job


def training_value(page: Page, name: str, run: str = "r", **labels: str) -> float | None:
    """Return the value of the family `training_NAME` of a run, rounded to six decimals, or None if absent."""
    value = page.get(f"training_{name}", run=run, **labels)
    return value if value is None else round(value, 6)


def badput_seconds(page: Page, run: str = "r") -> dict[str, float]:
    """Return the lost seconds by cause, without the causes that have none."""
    causes = {
        cause: training_value(page, "badput_seconds_total", run, cause=cause) for cause in BADPUT_CAUSES
    }
    return {cause: seconds for cause, seconds in causes.items() if seconds}


def counts_by_reason(page: Page, family: str = "interruptions", run: str = "r") -> dict[str, float]:
    """Return the number of interruptions or restarts by reason, without the reasons that have none."""
    counts = {reason: training_value(page, f"{family}_total", run, reason=reason) for reason in END_REASONS}
    return {reason: count for reason, count in counts.items() if count}


def check_seconds_add_up(page: Page, run: str = "r") -> None:
    """Check that productive, uncommitted and lost seconds add up to the wall time."""
    productive_seconds = training_value(page, "productive_seconds_total", run) or 0.0
    uncommitted_seconds = training_value(page, "uncommitted_seconds", run) or 0.0
    lost_seconds = sum(badput_seconds(page, run).values())
    wall_seconds = training_value(page, "wall_seconds_total", run)
    assert wall_seconds == pytest.approx(productive_seconds + uncommitted_seconds + lost_seconds, abs=1e-4)


class MonitoredJob:
    """Simulated job that writes its readings into the feed of a sidecar. Job and sidecar share a clock."""

    def __init__(
        self,
        sidecar: SimulatedSidecar,
        simulated: SimulatedJob | None = None,
        *,
        run: str = "r",
        rank: int = 0,
        pid: int | None = None,
    ) -> None:
        self.sidecar = sidecar
        self.simulated = simulated or SimulatedJob()
        sidecar.clock.advance(0.5)
        self.process = make_process(run=run, rank=rank, started=sidecar.clock.wall)
        self.pid = pid
        self.sequence = 0

    def write(
        self, *stats: StatReading, final: bool = False, ending: Ending | None = None, age_seconds: float = 0.5
    ) -> MonitoredJob:
        """Set the clock to the time of the job, and write its feed."""
        write_time, clock = self.process.started + self.simulated.seconds, self.sidecar.clock
        clock.advance(max(0.0, write_time - clock.wall))
        self.sequence += 1
        snapshot = make_snapshot(
            self.process, *stats, sequence=self.sequence, written=write_time, final=final
        )
        recording = snapshot.recording.replace(training=self.simulated.reading(), ending=ending)
        self.sidecar.feed.publish(
            snapshot.replace(recording=recording), age_seconds=age_seconds, pid=self.pid
        )
        return self

    def write_and_collect(self) -> Page:
        self.write()
        return self.sidecar.collect()

    def kill(self) -> None:
        self.sidecar.feed.kill(self.process)

    def die(self, seconds: float = 4.0) -> Page:
        """Kill the job. The sidecar reads the feed at once and again after *seconds*. Return the page of the second pass."""
        self.kill()
        self.sidecar.collect()
        return self.sidecar.collect_after(seconds)

    def finish(self) -> Page:
        """End the job normally, and return the page after the end."""
        self.simulated.finished = True
        return self.write(final=True).die()


def read_page(running: serve_support.Sidecar) -> Page:
    """Return the page of a sidecar that runs in a child process."""
    return Page(list(text_string_to_metric_families(running.request("/metrics")[1])))


def wait_for_page(running: serve_support.Sidecar, condition: Callable[[Page], bool]) -> None:
    """Wait until the page of a sidecar in a child process fulfills a condition."""
    wait_until(lambda: condition(read_page(running)))
