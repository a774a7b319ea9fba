"""A job on paper: what its process of rank 0 would tell of its training, second by second."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from ledger_support import Page, Sidecar, a_process, a_snapshot

from exporter.families import Distribution
from exporter.feed.snapshot import ProcessIdentity, Snapshot
from exporter.ledger.goodput.task import CAUSES, Attempt, Goodput
from exporter.recording.values import END_REASONS, TrainingReading


@dataclass
class PaperJob:
    """Keeps the books of a process as the recording thread would.

    Attributes:
        facts: What describes the run.
        phases: Seconds by phase so far.
        first_step: Where the training loop begins; None while it has not.
        step: Steps completed.
        work: Seconds of completed iterations.
        saved: Step and work of the latest save.
        segments: (loop, first step, last step, seconds) that no save covers.
    """

    facts: dict[str, str] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    phase: str = "init"
    first_step: int | None = None
    loop: int = 0
    guessed: bool = False
    step: int | None = None
    steps: int = 0
    work: float = 0.0
    open: float = 0.0
    failed: float = 0.0
    saved: tuple[int | None, float] = (None, 0.0)
    segments: list[tuple[int, int, int, float]] = field(default_factory=list)
    finished: bool = False
    failure: str = ""
    longest: float | None = None

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    def spend(self, phase: str, seconds: float) -> None:
        """Let time pass in a phase."""
        self.phase = phase
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds

    def begin_loop(self, first_step: int) -> None:
        self.loop += 1
        if self.first_step is None:
            self.first_step = first_step
        self.step = first_step

    def train(self, seconds: float, *, data: float = 0.0) -> None:
        """Complete one iteration."""
        assert self.step is not None
        if data:
            self.spend("data_loading", data)
        self.spend("iteration", seconds)
        self.step += 1
        self.steps += 1
        self.work += seconds
        self.longest = max(self.longest or 0.0, seconds)
        this = self.step - 1
        if self.segments and self.segments[-1][0] == self.loop and self.segments[-1][2] == this - 1:
            loop, first, _, before = self.segments.pop()
            self.segments.append((loop, first, this, before + seconds))
        else:
            self.segments.append((self.loop, this, this, seconds))

    def hold(self, seconds: float) -> None:
        """Spend time in an iteration that does not end."""
        self.spend("iteration", seconds)
        self.open += seconds

    def save(self, seconds: float) -> None:
        """Save a checkpoint; what was done before it is safe afterwards."""
        self.spend("checkpoint_save_sync", seconds)
        self.saved = (self.step, self.work)
        self.segments = []

    def reading(self) -> TrainingReading:
        return TrainingReading(
            facts=tuple(sorted(self.facts.items())),
            phase=self.phase,
            phases=dict(self.phases),
            last_progress=None,
            first_step=self.first_step,
            loop=self.loop,
            guessed=self.guessed,
            step=self.step,
            steps=self.steps,
            work_seconds=self.work,
            open_seconds=self.open,
            failed_seconds=self.failed,
            committed_step=self.saved[0],
            committed_seconds=self.saved[1],
            segments=tuple(self.segments),
            finished=self.finished,
            failure=self.failure,
            longest_step_seconds=self.longest,
        )


def a_job(first_step: int = 0, *, init: float = 4.0, load: float = 0.0, **facts: str) -> PaperJob:
    """A job that is about to begin its training loop."""
    job = PaperJob(facts=dict(facts))
    job.spend("init", init)
    if load:
        job.spend("checkpoint_load", load)
    job.begin_loop(first_step)
    return job


def steps(job: PaperJob, count: int, seconds: float = 1.0, data: float = 0.0) -> None:
    for _ in range(count):
        job.train(seconds, data=data)


def of(page: Page, name: str, run: str = "r", **labels: str) -> float | None:
    """The value of a family of a run."""
    value = page.get(f"training_{name}", run=run, **labels)
    assert not isinstance(value, Distribution)
    return value if value is None else round(value, 6)


def badput(page: Page, run: str = "r") -> dict[str, float]:
    """Seconds lost, by cause."""
    causes = {cause: of(page, "badput_seconds_total", run, cause=cause) for cause in CAUSES}
    return {cause: seconds for cause, seconds in causes.items() if seconds}


def reasons(page: Page, family: str = "interruptions", run: str = "r") -> dict[str, float]:
    """Interruptions, or restarts, by reason."""
    counts = {each: of(page, f"{family}_total", run, reason=each) for each in END_REASONS}
    return {each: count for each, count in counts.items() if count}


def check_identity(page: Page, run: str = "r") -> None:
    """The parts are the wall."""
    parts = [of(page, "productive_seconds_total", run), of(page, "uncommitted_seconds", run)]
    parts += badput(page, run).values()
    wall = of(page, "wall_seconds_total", run)
    assert wall == pytest.approx(sum(part or 0.0 for part in parts), abs=1e-4)


class Books:
    """The goodput of a task, and the clock of its wall; jobs are followed one after another."""

    def __init__(self, *, new_after_seconds: float = 3600.0) -> None:
        self.goodput = Goodput()
        self.now = 1000.0
        self._new_after_seconds = new_after_seconds
        self._jobs = 0
        self._start = 0.0

    def begin(self, job: PaperJob, *, tagged: bool = False, validates: bool = False) -> None:
        self._jobs += 1
        self._start = self.now
        attempt = Attempt(
            f"p{self._jobs}", "r", 1, self.now, self.now, tagged=tagged, validates=validates, written=self.now
        )
        self.goodput.begin(attempt, new_after_seconds=self._new_after_seconds)
        self.see(job)

    def see(self, job: PaperJob, *, final: bool = False) -> None:
        """A snapshot is read, at the moment at which it was written."""
        self.now = self._start + job.seconds
        self.goodput.update(job.reading(), written=self.now, final=final)
        self.check()

    def end(self, job: PaperJob, *, after: float = 0.0, reason: str = "signal", final: bool = False) -> None:
        """The process ends so long after its last snapshot."""
        self.see(job, final=final)
        self.now += after
        self.goodput.end(self.now, reason)
        self.check()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        attempt = self.goodput.attempt
        assert attempt is not None
        self.goodput.wait(0.0 if attempt.ended is None else self.now - attempt.ended)
        self.check()

    def check(self) -> None:
        """The identity."""
        goodput = self.goodput
        parts = goodput.productive + goodput.uncommitted + sum(goodput.badput.values())
        assert abs(goodput.wall - parts) <= 1e-9 * max(1.0, goodput.wall)

    def lost(self) -> dict[str, float]:
        return {cause: round(seconds, 6) for cause, seconds in self.goodput.badput.items() if seconds > 1e-9}


def told(
    process: ProcessIdentity,
    job: PaperJob,
    *,
    sequence: int = 1,
    final: bool = False,
    written: float | None = None,
) -> Snapshot:
    """What the process writes into the feed at this moment of the job."""
    snapshot = a_snapshot(
        process,
        sequence=sequence,
        written=process.started + job.seconds if written is None else written,
        final=final,
    )
    return snapshot.replace(recording=snapshot.recording.replace(training=job.reading()))


class Watched:
    """A job on paper in the feed of a sidecar; both clocks move together."""

    def __init__(
        self, sidecar: Sidecar, *, run: str = "r", job: PaperJob | None = None, rank: int = 0
    ) -> None:
        self.sidecar = sidecar
        self.job = job or PaperJob()
        self.run = run
        sidecar.clock.advance(0.5)
        self.process = a_process(run=run, rank=rank, started=sidecar.clock.wall)
        self.sequence = 0

    def catch_up(self) -> None:
        """Let the clock be where the job is."""
        self.sidecar.clock.advance(
            max(0.0, self.process.started + self.job.seconds - self.sidecar.clock.wall)
        )

    def write(self, *, final: bool = False) -> Watched:
        self.catch_up()
        self.sequence += 1
        self.sidecar.feed.put(told(self.process, self.job, sequence=self.sequence, final=final))
        return self

    def kill(self) -> Watched:
        self.sidecar.feed.kill(self.process)
        return self

    def see(self) -> Page:
        self.write()
        return self.sidecar.collect()

    def die(self, seconds: float = 4.0) -> Page:
        """It is killed, and the sidecar looks at once and after a while."""
        self.kill()
        self.sidecar.collect()
        return self.sidecar.after(seconds)
