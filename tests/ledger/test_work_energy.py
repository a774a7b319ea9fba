"""Energy of the work: by phase, and by what became of it; both sums are the run's energy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from energy_support import EnergyLedger
from goodput_support import PaperJob, Watched, of, steps
from hypothesis import given
from hypothesis import strategies as st
from ledger_support import Clock, Page, Sidecar

from exporter.collectors.job import EnergyReading, GpuProcessUse, MachineUse, RunUse
from exporter.ledger.energy.attribution import Flows, ProcessWork
from exporter.ledger.energy.collector import Sources
from exporter.ledger.energy.runs import RunEnergy
from exporter.ledger.energy.tariffs import Tariffs
from exporter.ledger.families.run_info import Gpus
from exporter.ledger.goodput.task import CAUSES

GPU = "GPU-a"


def a_process(phases: Mapping[str, float]) -> ProcessWork:
    return ProcessWork("r", 0, "p", phases, GPU)


def a_device(name: str) -> EnergyReading:
    component: Literal["gpu", "cpu"] = "gpu" if name == GPU else "cpu"
    return EnergyReading(component, name, "nvml_counter", measured=True, joules=1.0, watts=None, at=0.0)


NO_TARIFFS = Tariffs()


def flows(productive: float = 0.0, lost: float = 0.0, hung: float = 0.0, uncommitted: float = 0.0) -> Flows:
    return Flows("s", productive, lost, hung, uncommitted, validates=False)


class Run:
    """The counters of one run, fed by hand."""

    def __init__(self) -> None:
        self.energy = RunEnergy("boot")
        self.phases: dict[str, float] = {}
        self.given = 0.0

    def divide(
        self,
        joules: float,
        spent: Mapping[str, float],
        *,
        seconds: float = 10.0,
        device: str = GPU,
    ) -> None:
        for phase, lasted in spent.items():
            self.phases[phase] = self.phases.get(phase, 0.0) + lasted
        self.energy.begin([a_process(dict(self.phases))])
        self.energy.use(a_device(device), "exclusive", joules, seconds, NO_TARIFFS)
        self.given += joules

    def restart(self) -> None:
        rows = self.energy.rows()
        self.energy = RunEnergy("boot")
        self.energy.resume(rows)

    def counters(self, name: str) -> dict[tuple[str, ...], float]:
        found = {labels: value for spec, labels, value in self.energy.samples() if spec.name == name}
        return {labels: round(value, 6) for labels, value in found.items() if value}

    def phase(self) -> dict[tuple[str, ...], float]:
        return self.counters("training_phase_energy_joules_total")

    def wasted(self) -> dict[str, float]:
        return {
            labels[0]: value for labels, value in self.counters("training_wasted_energy_joules_total").items()
        }

    def productive(self) -> float:
        return self.counters("training_productive_energy_joules_total").get((), 0.0)

    def pool(self) -> float:
        return (self.energy.rows().get(("pool",)) or (0.0,))[0] or 0.0

    def check(self) -> None:
        assert sum(self.phase().values()) == pytest.approx(self.given, abs=1e-5)
        assert self.productive() + sum(self.wasted().values()) + self.pool() == pytest.approx(
            self.given, abs=1e-5
        )


def test_energy_is_split_by_time_where_powers_are_not_known() -> None:
    run = Run()
    run.divide(100.0, {"forward": 2.0, "data_loading": 2.0, "init": 6.0})
    run.divide(100.0, {"forward": 5.0, "data_loading": 5.0}, device="package0")

    assert run.phase() == {
        ("forward", "gpu", "time_share"): 20,
        ("data_loading", "gpu", "time_share"): 20,
        ("init", "gpu", "time_share"): 60,
        ("forward", "cpu", "time_share"): 50,
        ("data_loading", "cpu", "time_share"): 50,
    }
    assert run.wasted() == {"data_stall": 70, "init": 60}
    assert run.pool() == 70
    run.check()


def test_work_waits_until_it_is_known_what_became_of_it() -> None:
    run = Run()
    run.energy.settle(flows())
    run.divide(1000.0, {"forward": 10.0})
    run.energy.settle(flows(uncommitted=10.0))
    before = [run.productive(), run.pool()]
    run.energy.settle(flows(productive=6.0, lost=2.0, hung=1.0, uncommitted=1.0))

    assert before == [0, 1000]
    assert run.productive() == 600
    assert run.wasted() == {"lost_progress": 200, "hang": 100}
    assert run.pool() == pytest.approx(100)
    run.check()


def test_work_that_is_open_when_the_run_begins_another_task_was_lost() -> None:
    run = Run()
    run.energy.settle(flows())
    run.divide(1000.0, {"forward": 10.0})
    run.energy.settle(Flows("another", 1e6, 1e6, 0.0, 1.0, validates=False))
    run.divide(100.0, {"forward": 10.0})
    run.energy.settle(Flows("another", 1e6 + 9.0, 1e6, 0.0, 1.0, validates=False))

    assert run.wasted() == {"lost_progress": 1000}
    assert [run.productive(), run.pool()] == [90, 10]
    run.check()


def test_validation_is_productive_where_the_configuration_says_so() -> None:
    run = Run()
    run.energy.settle(Flows("s", 0.0, 0.0, 0.0, 0.0, validates=True))
    run.divide(100.0, {"validation": 10.0})

    assert run.productive() == 100
    run.check()


def test_without_a_source_of_energy_nothing_is_zero_and_with_one_every_cause_begins() -> None:
    run = Run()
    run.energy.begin([a_process({"init": 1.0})])
    run.energy.settle(flows(productive=1.0))
    run.energy.settle(flows(productive=2.0, lost=1.0, uncommitted=1.0))
    without = list(run.energy.samples())
    run.divide(0.0, {})
    names = {(spec.name, *labels) for spec, labels, _ in run.energy.samples()}

    assert without == []
    assert names >= {("training_productive_energy_joules_total",)} | {
        ("training_wasted_energy_joules_total", cause) for cause in CAUSES
    }


amounts = st.floats(0, 1e6)
phase_seconds = st.dictionaries(
    st.sampled_from(["forward", "data_loading", "other", "init"]), amounts, max_size=3
)
divisions = st.tuples(amounts, phase_seconds, st.tuples(amounts, amounts, amounts, amounts), st.booleans())


@given(st.lists(divisions, max_size=8))
def test_whatever_happens_both_sums_are_the_runs_energy(
    story: list[tuple[float, dict[str, float], tuple[float, float, float, float], bool]],
) -> None:
    run = Run()
    done = [0.0, 0.0, 0.0]
    for joules, spent, (productive, lost, hung, uncommitted), restarts in story:
        run.divide(joules, spent)
        done = [done[0] + productive, done[1] + lost, done[2] + hung]
        run.energy.settle(flows(done[0], done[1], done[2], uncommitted))
        if restarts:
            run.restart()
        assert sum(run.phase().values()) == pytest.approx(run.given, rel=1e-6, abs=1e-4)
        total = run.productive() + sum(run.wasted().values()) + run.pool()
        assert total == pytest.approx(run.given, rel=1e-6, abs=1e-4)


class Machine:
    """A GPU that one job holds, the ledger, and the collector that divides energy."""

    def __init__(self, directory: Path) -> None:
        self.clock = Clock()
        self.sidecar = Sidecar(directory, clock=self.clock)
        self.joules = 0.0
        self.run = "r"
        jobs = self.sidecar.collector
        jobs.gpus = Gpus(use=self.uses, readings=self.readings)
        sources = Sources(self.readings, self.use, self.uses, lambda: {self.run}, lambda: jobs.work)
        self.ledger = EnergyLedger(
            directory,
            sources,
            wall=lambda: self.clock.wall,
            monotonic=lambda: self.clock.monotonic,
            state=self.sidecar.state,
        )
        self.job = Watched(self.sidecar, job=PaperJob())

    def readings(self) -> tuple[EnergyReading, ...]:
        return (replace(a_device(GPU), joules=self.joules, at=self.clock.monotonic),)

    def uses(self) -> tuple[GpuProcessUse, ...]:
        return (GpuProcessUse(7, "0", GPU),)

    def use(self) -> MachineUse:
        run = RunUse(self.run, frozenset({7}), 0.0, 1, 0)
        return MachineUse(self.clock.monotonic, (run,), 0.0, 1, 0)

    def look(self, watts: float = 100.0) -> Page:
        """Let the clock be where the job is, and both look."""
        before = self.clock.monotonic
        self.job.write()
        process_id = self.job.process.id
        self.sidecar.feed.files[process_id] = replace(self.sidecar.feed.files[process_id], pid=7)
        self.joules += watts * (self.clock.monotonic - before)
        self.sidecar.collect()
        return self.ledger.collect()


def wasted(page: Page) -> dict[str, float]:
    found = {cause: of(page, "wasted_energy_joules_total", cause=cause) for cause in CAUSES}
    return {cause: joules for cause, joules in found.items() if joules}


def test_a_jobs_joules_become_productive_with_its_work(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    job = machine.job.job
    job.spend("init", 10.0)
    machine.look()
    job.begin_loop(0)
    job.spend("init", 10.0)
    machine.look()
    steps(job, 20, data=0.25)
    machine.look()
    job.save(5.0)
    page = machine.look()
    in_work = of(page, "phase_energy_joules_total", phase="iteration", component="gpu", method="time_share")

    assert of(page, "energy_joules_total", component="gpu", method="exclusive") == 1000 + 2500 + 500
    assert in_work == of(page, "productive_energy_joules_total") == 2000
    assert wasted(page) == {"init": 1000, "data_stall": 500, "checkpoint_save": 500}


def test_a_node_without_rank_0_divides_its_energy_too(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.job = Watched(machine.sidecar, job=PaperJob(), rank=5)
    job = machine.job.job
    job.spend("init", 10.0)
    job.begin_loop(0)
    machine.look()
    steps(job, 10)
    machine.look()
    job.save(1.0)

    assert of(machine.look(), "productive_energy_joules_total") == 1000
    assert "training_productive_seconds_total" not in machine.sidecar.collect().families


def test_the_joules_of_a_run_are_lost_or_safe_as_the_next_run_of_its_session_finds_them(
    tmp_path: Path,
) -> None:
    """A training that a scheduler begins again under another name."""
    machine = Machine(tmp_path)
    job = machine.job.job
    job.facts["session_tag"] = "s"
    job.begin_loop(0)
    machine.look()
    steps(job, 10)
    machine.look()
    machine.job.die()
    machine.run = "r2"
    machine.job = Watched(machine.sidecar, run="r2", job=PaperJob(facts={"session_tag": "s"}))
    machine.job.job.begin_loop(4)
    machine.look(watts=0.0)
    page = machine.look(watts=0.0)

    assert wasted(page) == {"lost_progress": 600}
    assert of(page, "productive_energy_joules_total") == 400
