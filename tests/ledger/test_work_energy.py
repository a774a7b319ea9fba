"""Energy of work by phase and by outcome.

The sum over the phases is the energy since the job reports training. So is the sum over the outcomes with the uncommitted energy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from energy_support import SidecarNode, gpu_reading
from goodput_support import MonitoredJob, SimulatedJob, training_value
from hypothesis import given
from hypothesis import strategies as st
from ledger_support import Page

from exporter.collectors.job import EnergyReading
from exporter.ledger.energy.options import EnergyOptions
from exporter.ledger.energy.records import decode_run
from exporter.ledger.energy.run_energy import RunEnergy
from exporter.ledger.energy.work import ProcessWork, WorkAccount
from exporter.ledger.goodput.accounting import BADPUT_CAUSES
from exporter.ledger.state.codec import to_line


def account(
    *,
    session: str = "s",
    productive_seconds: float = 0.0,
    lost_seconds: float = 0.0,
    hung_seconds: float = 0.0,
    uncommitted_seconds: float = 0.0,
    is_validation_productive: bool = False,
) -> WorkAccount:
    return WorkAccount(
        session,
        productive_seconds=productive_seconds,
        lost_seconds=lost_seconds,
        hung_seconds=hung_seconds,
        uncommitted_seconds=uncommitted_seconds,
        is_validation_productive=is_validation_productive,
    )


class SimulatedRun:
    """Run whose energy and outcomes are set by the test, without a ledger that reads a feed.

    Attributes:
        energy: The tested record of the energy of the run.
        phases: Total seconds of the only process by phase.
        divided_joules: Total energy added by `divide`, which is the energy since the run reports training.
    """

    def __init__(self) -> None:
        self.energy = RunEnergy("boot")
        self.phases: dict[str, float] = {}
        self.divided_joules = 0.0

    def divide(self, joules: float, spent_seconds: Mapping[str, float]) -> None:
        """Add energy of the GPU, and divide it among the phases in which the process has spent these seconds."""
        for phase, seconds in spent_seconds.items():
            self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        self.energy.start_division([ProcessWork("r", 0, "p", dict(self.phases), "GPU-a")])
        self.energy.add_energy(gpu_reading(1.0, 0.0), "exclusive", joules, 10.0, EnergyOptions())
        self.divided_joules += joules

    def restart_exporter(self) -> None:
        record = decode_run(to_line(self.energy.record))
        self.energy = RunEnergy("boot")
        self.energy.resume(record)

    def counters(self, name: str) -> dict[str, float]:
        """Return the joules above zero of a counter, by the value of its first label."""
        joules_by_label: dict[str, float] = {}
        for sample in self.energy.samples():
            if sample.spec.name == name and sample.value:
                label = (*sample.labels, "")[0]
                joules_by_label[label] = round(joules_by_label.get(label, 0.0) + sample.value, 6)
        return joules_by_label

    def wasted_joules(self) -> dict[str, float]:
        return self.counters("training_wasted_energy_joules_total")

    def productive_joules(self) -> float:
        return self.counters("training_productive_energy_joules_total").get("", 0.0)

    def check(self) -> None:
        """Check that both sums equal the energy since the run reports training. Uncommitted work is part of the second sum."""
        joules_by_phase = self.counters("training_phase_energy_joules_total")
        pending_joules = self.energy.record.uncommitted_joules
        assert sum(joules_by_phase.values()) == pytest.approx(self.divided_joules, rel=1e-6, abs=1e-4)
        total_joules = self.productive_joules() + sum(self.wasted_joules().values()) + pending_joules
        assert total_joules == pytest.approx(self.divided_joules, rel=1e-6, abs=1e-4)


def test_energy_of_work_is_pending_until_its_outcome_is_known() -> None:
    run = SimulatedRun()
    run.energy.apply_outcomes(account())  # later accounts are compared with the first
    run.divide(1000.0, {"forward": 10.0})
    run.energy.apply_outcomes(account(uncommitted_seconds=10.0))
    initial_joules = run.productive_joules()
    run.energy.apply_outcomes(
        account(productive_seconds=6.0, lost_seconds=2.0, hung_seconds=1.0, uncommitted_seconds=1.0)
    )

    assert [initial_joules, run.productive_joules()] == [0, 600]
    assert run.wasted_joules() == {"lost_progress": 200, "hang": 100}
    run.check()


def test_energy_before_the_job_reports_training_is_in_no_phase() -> None:
    run = SimulatedRun()
    run.energy.add_energy(gpu_reading(1.0, 0.0), "exclusive", 500.0, 10.0, EnergyOptions())
    run.divide(1000.0, {"forward": 10.0})

    assert run.counters("training_energy_joules_total") == {"gpu": 1500}
    assert run.counters("training_phase_energy_joules_total") == {"forward": 1000}
    run.check()


def test_pending_work_is_lost_when_another_session_starts() -> None:
    run = SimulatedRun()
    run.energy.apply_outcomes(account())
    run.divide(1000.0, {"forward": 10.0})
    # The seconds of the first account of a session are older than the measured energy.
    older_seconds = 1e6
    run.energy.apply_outcomes(
        account(
            session="another",
            productive_seconds=older_seconds,
            lost_seconds=older_seconds,
            uncommitted_seconds=1.0,
        )
    )
    run.divide(100.0, {"forward": 10.0})
    run.energy.apply_outcomes(
        account(
            session="another",
            productive_seconds=older_seconds + 9.0,
            lost_seconds=older_seconds,
            uncommitted_seconds=1.0,
        )
    )

    assert run.wasted_joules() == {"lost_progress": 1000}
    assert run.productive_joules() == 90
    run.check()


def test_validation_is_productive_if_configured() -> None:
    run = SimulatedRun()
    run.energy.apply_outcomes(account(is_validation_productive=True))
    run.divide(100.0, {"validation": 10.0})

    assert run.productive_joules() == 100


def test_without_an_energy_source_families_are_absent_and_with_one_they_start_at_zero() -> None:
    run = SimulatedRun()
    run.energy.start_division([ProcessWork("r", 0, "p", {"init": 1.0}, "GPU-a")])
    run.energy.apply_outcomes(account(productive_seconds=1.0))
    run.energy.apply_outcomes(account(productive_seconds=2.0, lost_seconds=1.0, uncommitted_seconds=1.0))
    initial_samples = list(run.energy.samples())
    run.divide(0.0, {})
    wasted_series = {sample.labels for sample in run.energy.samples() if "wasted" in sample.spec.name}

    assert initial_samples == []
    assert wasted_series == {(cause,) for cause in BADPUT_CAUSES}


@dataclass
class Interval:
    """Energy and work of a run between two accounts, and whether the exporter restarts at the end."""

    joules: float
    spent_seconds: dict[str, float]  # by phase
    productive_seconds: float
    lost_seconds: float
    hung_seconds: float
    uncommitted_seconds: float
    is_exporter_restarted: bool


amounts = st.floats(0, 1e6)
intervals = st.builds(
    Interval,
    joules=amounts,
    spent_seconds=st.dictionaries(
        st.sampled_from(["forward", "data_loading", "other", "init"]), amounts, max_size=3
    ),
    productive_seconds=amounts,
    lost_seconds=amounts,
    hung_seconds=amounts,
    uncommitted_seconds=amounts,
    is_exporter_restarted=st.booleans(),
)


@given(st.lists(intervals, max_size=8))
def test_both_sums_equal_the_energy_of_a_run_that_reports_training(history: list[Interval]) -> None:
    run = SimulatedRun()
    productive_seconds = lost_seconds = hung_seconds = 0.0
    for interval in history:
        run.divide(interval.joules, interval.spent_seconds)
        productive_seconds += interval.productive_seconds
        lost_seconds += interval.lost_seconds
        hung_seconds += interval.hung_seconds
        run.energy.apply_outcomes(
            account(
                productive_seconds=productive_seconds,
                lost_seconds=lost_seconds,
                hung_seconds=hung_seconds,
                uncommitted_seconds=interval.uncommitted_seconds,
            )
        )
        if interval.is_exporter_restarted:
            run.restart_exporter()
        run.check()


class SingleGpuNode(SidecarNode):
    """Node with one GPU, which a simulated job holds, and with a sidecar."""

    def __init__(self, directory: Path, *, rank: int = 0) -> None:
        super().__init__(directory)
        self.joules = 0.0
        self.monitored_job = MonitoredJob(self.sidecar, rank=rank, pid=7)

    @property
    def job(self) -> SimulatedJob:
        return self.monitored_job.simulated

    def readings(self) -> Sequence[EnergyReading]:
        return (gpu_reading(self.joules, self.clock.monotonic),)

    def advance_and_collect(self, watts: float = 100.0) -> Page:
        """Advance the clock to the time of the job, and run a pass of the ledger and of the energy collector.

        The first pass only stores the reading of the GPU: the energy since the start of the job is not attributed.
        """
        start_seconds = self.clock.monotonic
        self.monitored_job.write()
        self.joules += watts * (self.clock.monotonic - start_seconds)
        self.sidecar.collect()
        return self.collect()


def wasted_joules(page: Page) -> dict[str, float]:
    joules_by_cause = {
        cause: training_value(page, "wasted_energy_joules_total", cause=cause) for cause in BADPUT_CAUSES
    }
    return {cause: joules for cause, joules in joules_by_cause.items() if joules}


def test_energy_becomes_productive_with_the_work_of_the_job(tmp_path: Path) -> None:
    node = SingleGpuNode(tmp_path)
    job = node.job
    job.spend("init", 10.0)
    node.advance_and_collect()
    job.start_loop(0)
    job.spend("init", 10.0)
    node.advance_and_collect()
    job.train(20, data_seconds=0.25)
    node.advance_and_collect()
    job.save(5.0)
    page = node.advance_and_collect()
    work_joules = training_value(
        page, "phase_energy_joules_total", phase="iteration", component="gpu", method="time_share"
    )

    assert (
        training_value(page, "energy_joules_total", component="gpu", method="exclusive") == 1000 + 2500 + 500
    )
    assert work_joules == training_value(page, "productive_energy_joules_total") == 2000
    assert wasted_joules(page) == {"init": 1000, "data_stall": 500, "checkpoint_save": 500}


def test_a_node_without_rank_0_attributes_its_energy(tmp_path: Path) -> None:
    node = SingleGpuNode(tmp_path, rank=5)
    node.job.spend("init", 10.0)
    node.job.start_loop(0)
    node.advance_and_collect()
    node.job.train(10)
    node.advance_and_collect()
    node.job.save(1.0)

    assert training_value(node.advance_and_collect(), "productive_energy_joules_total") == 1000
    assert "training_productive_seconds_total" not in node.sidecar.collect().families


def test_pending_energy_is_decided_by_the_next_run_of_the_session(
    tmp_path: Path,
) -> None:
    # A scheduler restarts the training under a new run name.
    node = SingleGpuNode(tmp_path)
    node.job.facts["session_tag"] = "s"
    node.job.start_loop(0)
    node.advance_and_collect()
    node.job.train(10)
    node.advance_and_collect()
    node.monitored_job.die()
    node.run = "r2"
    restarted_job = SimulatedJob(facts={"session_tag": "s"})
    restarted_job.start_loop(4)
    node.monitored_job = MonitoredJob(node.sidecar, restarted_job, run="r2", pid=7)
    node.advance_and_collect(watts=0.0)
    page = node.advance_and_collect(watts=0.0)

    assert wasted_joules(page) == {"lost_progress": 600}
    assert training_value(page, "productive_energy_joules_total") == 400
