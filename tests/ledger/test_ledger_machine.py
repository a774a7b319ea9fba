"""State machine of the ledger: in any order of events, totals never decrease. While the state can be saved, they equal the samples that were read."""

from __future__ import annotations

import enum
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
    SimulatedSidecar,
    make_definition,
    make_process,
    make_reading,
    make_snapshot,
)

from exporter.feed.snapshot import ProcessIdentity

LOSS_STAT = make_definition("loss", buckets=(1.0, 2.0))


class SidecarKilled(BaseException):
    """SIGKILL of the sidecar within a pass."""


class KillMoment(enum.Enum):
    """Moment of a pass at which the sidecar is killed."""

    BEFORE_SAVE = enum.auto()
    AFTER_SAVE = enum.auto()
    BEFORE_REMOVE = enum.auto()
    AFTER_REMOVE = enum.auto()


class KillingFeed(MemoryFeed):
    """Feed that kills the sidecar before or after the removal of a file, if `kill_moment` requires it."""

    kill_moment: KillMoment | None = None

    def remove(self, process_id: str) -> bool:
        if self.kill_moment is KillMoment.BEFORE_REMOVE:
            raise SidecarKilled
        is_removed = super().remove(process_id)
        if self.kill_moment is KillMoment.AFTER_REMOVE:
            raise SidecarKilled
        return is_removed


@dataclass
class RecordedProcess:
    """Training process, with its recorded, written, read and saved samples."""

    identity: ProcessIdentity
    rank: int
    is_running: bool = True
    samples: list[float] = field(default_factory=list)
    written_samples: list[float] = field(default_factory=list)
    sequence: int = 0
    read_count: int = 0  # written samples that the current sidecar has read, or has loaded from a state file
    saved_count: int = 0  # written samples that a state file has


class LedgerMachine(RuleBasedStateMachine):
    """Random order of processes, kills and restarts of the sidecar, and a broken state directory around one ledger."""

    processes = Bundle("processes")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="ledger-"))
        self.feed = KillingFeed()
        self.sidecar = SimulatedSidecar(self.directory, self.feed)
        self.all_processes: list[RecordedProcess] = []
        self.highest_values: dict[tuple[object, ...], float] = {}
        self.is_state_broken = False

    def teardown(self) -> None:
        self.sidecar.state.close()
        shutil.rmtree(self.directory)

    # The training processes ------------------------------------------------------------------------------

    @initialize(target=processes)
    def start_first_process(self) -> RecordedProcess:
        return self.new_process(0)

    @rule(target=processes, rank=st.integers(0, 1))
    def start_process(self, rank: int) -> RecordedProcess:
        return self.new_process(rank)

    def new_process(self, rank: int) -> RecordedProcess:
        process = RecordedProcess(make_process(rank=rank, started=self.sidecar.clock.wall), rank)
        self.all_processes.append(process)
        return process

    @rule(process=processes, samples=st.lists(st.sampled_from([0.1, 0.7, 1.5, 3.3]), min_size=1, max_size=3))
    def add(self, process: RecordedProcess, samples: list[float]) -> None:
        if process.is_running:
            process.samples += samples

    @rule(process=processes)
    def flush(self, process: RecordedProcess) -> None:
        if process.is_running:
            process.sequence += 1
            process.written_samples = list(process.samples)
            # The count of rejected samples grows with each snapshot: a further counter for `check_monotonicity`.
            reading = make_reading(LOSS_STAT, process.written_samples, rejected={"nan": process.sequence})
            self.feed.publish(make_snapshot(process.identity, reading, sequence=process.sequence))

    @rule(process=consumes(processes), flushes_first=st.booleans())
    def end_process(self, process: RecordedProcess, flushes_first: bool) -> None:
        if flushes_first:
            self.flush(process)
        process.is_running = False
        if process.identity.id in self.feed.files:
            self.feed.kill(process.identity)  # marks the process as not alive

    @rule(process=processes, collects_first=st.booleans())
    def delete_feed_file(self, process: RecordedProcess, collects_first: bool) -> None:
        """Delete the feed file of a process. A running process writes a new file."""
        if self.feed.files.pop(process.identity.id, None) is not None:
            if collects_first:
                self.run_pass()
            self.flush(process)

    @rule(seconds=st.sampled_from([1.0, 5.0, -3600.0]))
    def move_wall_clock(self, seconds: float) -> None:
        # The wall clock may be set back; the monotonic clock never goes back.
        self.sidecar.clock.wall += seconds
        self.sidecar.clock.monotonic += max(seconds, 0.0)

    # The sidecar -----------------------------------------------------------------------------------------

    @rule()
    def run_pass(self) -> None:
        initial_files = set(self.feed.files)
        self.sidecar.clock.advance(1.0)
        page = self.sidecar.collect()
        self.record_reads(initial_files)
        self.check_monotonicity(page)
        if not self.is_state_broken:
            self.record_saves()
            self.check_totals(page)

    @rule(moment=st.sampled_from(KillMoment))
    def kill_sidecar_within_pass(self, moment: KillMoment) -> None:
        state = self.sidecar.state
        original_save = state.save

        def save(key: tuple[str, ...], content: bytes) -> None:
            if moment is KillMoment.BEFORE_SAVE:
                raise SidecarKilled
            original_save(key, content)
            if moment is KillMoment.AFTER_SAVE:
                raise SidecarKilled

        state.save = save  # type: ignore[method-assign]  # the sidecar is killed between two files
        self.feed.kill_moment = moment
        initial_files = set(self.feed.files)
        self.sidecar.clock.advance(1.0)
        try:
            page = self.sidecar.collect()
        except SidecarKilled:
            page = None
        self.feed.kill_moment = None
        self.record_reads(initial_files)
        is_killed_at_removal = moment in {KillMoment.BEFORE_REMOVE, KillMoment.AFTER_REMOVE}
        if is_killed_at_removal and not self.is_state_broken:
            self.record_saves()  # a pass saves all ranks before it removes a file
        if page is not None:
            self.check_monotonicity(page)
        self.restart_sidecar()
        if moment is KillMoment.AFTER_SAVE and not self.is_state_broken:
            self.run_pass()  # some ranks may be unsaved: a complete pass saves them

    @rule()
    def restart_sidecar(self) -> None:
        self.sidecar.restart()
        for process in self.all_processes:
            process.read_count = process.saved_count

    @precondition(lambda self: not self.is_state_broken)
    @rule()
    def break_the_state(self) -> None:
        # Before the first save, there is no directory to replace.
        (self.directory / "ledger").mkdir(exist_ok=True)
        self.sidecar.replace_state_by_file()
        self.is_state_broken = True

    @precondition(lambda self: self.is_state_broken)
    @rule()
    def mend_the_state(self) -> None:
        self.sidecar.restore_state()
        self.is_state_broken = False

    @rule(removable=st.booleans())
    def set_removable(self, removable: bool) -> None:
        self.feed.is_removable = removable

    # Model and invariants --------------------------------------------------------------------------------------

    def record_reads(self, initial_files: set[str]) -> None:
        for process in self.all_processes:
            if process.identity.id in initial_files:
                process.read_count = len(process.written_samples)

    def record_saves(self) -> None:
        for process in self.all_processes:
            process.saved_count = process.read_count

    def check_totals(self, page: Page) -> None:
        for rank in (0, 1):
            expected_samples = [
                sample
                for process in self.all_processes
                if process.rank == rank
                for sample in process.written_samples[: process.read_count]
            ]
            assert self.total(page, "loss_count", rank) == len(expected_samples)
            assert abs(self.total(page, "loss_sum", rank) - sum(expected_samples)) < 1e-6
            for bound in LOSS_STAT.buckets:
                bucket_count = self.total(page, "loss_bucket", rank, le=str(bound))
                assert bucket_count == sum(sample <= bound for sample in expected_samples)

    def total(self, page: Page, name: str, rank: int, **labels: str) -> float:
        """Return the sum of the values of a sample name, such as `loss_count`, over the series of a rank with *labels*."""
        expected_labels = {("rank", str(rank)), *labels.items()}
        return sum(
            value for series_labels, value in page.all(name).items() if expected_labels <= set(series_labels)
        )

    def check_monotonicity(self, page: Page) -> None:
        for name, family in page.families.items():
            if name.startswith(("loss", "training")) and family.type not in {"gauge", "info"}:
                for sample in family.samples:
                    series = (sample.name, *sorted(sample.labels.items()))
                    assert sample.value >= self.highest_values.get(series, 0), series
                    self.highest_values[series] = sample.value

    @invariant()
    def no_state_is_damaged(self) -> None:
        assert self.sidecar.state.damaged_files == 0


TestLedger = LedgerMachine.TestCase
TestLedger.pytestmark = pytest.mark.timeout(120)  # type: ignore[attr-defined]  # hundreds of passes
TestLedger.settings = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
