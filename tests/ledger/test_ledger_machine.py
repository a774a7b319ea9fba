"""State machine of the ledger: in any order of events, totals never decrease and equal the recorded values."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)
from ledger_support import (
    MemoryFeed,
    Page,
    Sidecar,
    make_definition,
    make_process,
    make_reading,
    make_snapshot,
)

from exporter.feed.snapshot import ProcessIdentity

LOSS = make_definition("loss", buckets=(1.0, 2.0))


class Killed(BaseException):
    """SIGKILL of the sidecar, in the middle of a pass."""


class MortalFeed(MemoryFeed):
    """Kills the sidecar directly before or after the removal of a file."""

    dies_at = ""

    def remove(self, process_id: str) -> bool:
        if self.dies_at == "before remove":
            raise Killed
        removed = super().remove(process_id)
        if self.dies_at == "after remove":
            raise Killed
        return removed


@dataclass
class Job:
    """Process of the job: recorded values, written values, and the values that the sidecar must have."""

    process: ProcessIdentity
    rank: int
    living: bool = True
    samples: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    sequence: int = 0
    looked: int = 0  # samples read by the current sidecar
    saved: int = 0  # samples that a state file has


class Ledger(RuleBasedStateMachine):
    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="ledger-"))
        self.feed = MortalFeed()
        self.sidecar = Sidecar(self.directory, self.feed)
        self.all: list[Job] = []
        self.highest: dict[tuple[object, ...], float] = {}
        self.broken = False

    def teardown(self) -> None:
        self.sidecar.state.close()
        shutil.rmtree(self.directory)

    # The job ---------------------------------------------------------------------------------------------

    @initialize(target=jobs)
    def first(self) -> Job:
        return self.new_job(0)

    @rule(target=jobs, rank=st.integers(0, 1))
    def begin(self, rank: int) -> Job:
        return self.new_job(rank)

    def new_job(self, rank: int) -> Job:
        job = Job(make_process(rank=rank, started=self.sidecar.clock.wall), rank)
        self.all.append(job)
        return job

    @rule(job=jobs, samples=st.lists(st.sampled_from([0.1, 0.7, 1.5, 3.3]), min_size=1, max_size=3))
    def add(self, job: Job, samples: list[float]) -> None:
        if job.living:
            job.samples += samples

    @rule(job=jobs)
    def flush(self, job: Job) -> None:
        if job.living:
            job.sequence += 1
            job.written = list(job.samples)
            reading = make_reading(LOSS, job.written, rejected={"nan": job.sequence})
            self.feed.put(make_snapshot(job.process, reading, sequence=job.sequence))

    @rule(job=consumes(jobs), in_order=st.booleans())
    def die(self, job: Job, in_order: bool) -> None:
        if in_order:
            self.flush(job)
        job.living = False
        if job.process.id in self.feed.files:
            self.feed.kill(job.process)

    @rule(job=jobs, looks=st.booleans())
    def lose_the_file(self, job: Job, looks: bool) -> None:
        """The file is deleted; a live process writes a new file before any replacement."""
        if self.feed.files.pop(job.process.id, None) is not None:
            if looks:
                self.take_a_look()
            self.flush(job)

    @rule(seconds=st.sampled_from([1.0, 5.0, -3600.0]))
    def wait(self, seconds: float) -> None:
        self.sidecar.clock.wall += seconds
        self.sidecar.clock.monotonic += max(seconds, 0.0)

    # The sidecar -----------------------------------------------------------------------------------------

    @rule()
    def take_a_look(self) -> None:
        present = set(self.feed.files)
        self.sidecar.clock.advance(1.0)
        page = self.sidecar.collect()
        self.looked_at(present)
        self.check_that_nothing_fell(page)
        if not self.broken:
            self.saved()
            self.check(page)

    @rule(moment=st.sampled_from(["before save", "after save", "before remove", "after remove"]))
    def die_in_the_middle(self, moment: str) -> None:
        state, saves = self.sidecar.state, 0
        real = state.save

        def save(key: tuple[str, ...], content: bytes) -> None:
            nonlocal saves
            if moment == "before save":
                raise Killed
            real(key, content)
            saves += 1
            if moment == "after save":
                raise Killed

        state.save = save  # type: ignore[method-assign]  # the death comes between the file and the ledger
        self.feed.dies_at = moment
        present = set(self.feed.files)
        self.sidecar.clock.advance(1.0)
        try:
            page = self.sidecar.collect()
        except Killed:
            page = None
        self.feed.dies_at = ""
        self.looked_at(present)
        if "remove" in moment and not self.broken:
            self.saved()
        if page is not None:
            self.check_that_nothing_fell(page)
        self.start_anew()
        if moment == "after save" and not self.broken:
            self.take_a_look()  # one rank was saved and one was not: determine which

    @rule()
    def start_anew(self) -> None:
        self.sidecar.restart()
        for job in self.all:
            job.looked = job.saved

    @precondition(lambda self: not self.broken)
    @rule()
    def break_the_state(self) -> None:
        (self.directory / "ledger").mkdir(exist_ok=True)
        self.sidecar.break_state()
        self.broken = True

    @precondition(lambda self: self.broken)
    @rule()
    def mend_the_state(self) -> None:
        self.sidecar.mend_state()
        self.broken = False

    @rule(removable=st.booleans())
    def make_removal_fail_or_work(self, removable: bool) -> None:
        self.feed.removable = removable

    # Invariants --------------------------------------------------------------------------------------

    def looked_at(self, present: set[str]) -> None:
        for job in self.all:
            if job.process.id in present:
                job.looked = len(job.written)

    def saved(self) -> None:
        for job in self.all:
            job.saved = job.looked

    def check(self, page: Page) -> None:
        for rank in (0, 1):
            expected = [
                sample for job in self.all if job.rank == rank for sample in job.written[: job.looked]
            ]
            assert self.total(page, "loss_count", rank) == len(expected)
            assert abs(self.total(page, "loss_sum", rank) - sum(expected)) < 1e-6
            for bound in LOSS.buckets:
                bucket_count = self.total(page, "loss_bucket", rank, le=str(bound))
                assert bucket_count == sum(sample <= bound for sample in expected)

    def total(self, page: Page, name: str, rank: int, **labels: str) -> float:
        """Over all workers of a rank."""
        expected = {("rank", str(rank)), *labels.items()}
        return sum(value for labels, value in page.all(name).items() if expected <= set(labels))

    def check_that_nothing_fell(self, page: Page) -> None:
        for name, family in page.families.items():
            if name.startswith(("loss", "training")) and family.type not in {"gauge", "info"}:
                for sample in family.samples:
                    series = (sample.name, *sorted(sample.labels.items()))
                    assert sample.value >= self.highest.get(series, 0), series
                    self.highest[series] = sample.value

    @invariant()
    def no_state_is_damaged(self) -> None:
        assert self.sidecar.state.damaged == 0


TestLedger = Ledger.TestCase
TestLedger.pytestmark = pytest.mark.timeout(120)  # type: ignore[attr-defined]  # thousands of passes
TestLedger.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
