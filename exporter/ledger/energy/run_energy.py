"""Energy, carbon and cost counters of a run, by phase and by the outcome of the work.

    energy since the job reports training = phases + unattributed
                                          = productive + wasted by cause + energy of uncommitted work

The energy of work is uncommitted until goodput decides the outcome of the work. When a share of the uncommitted seconds becomes
productive, lost or hung, the same share of the uncommitted energy is added to the counter of this outcome. When a new session of the run
starts, the remaining uncommitted energy is lost. The counters never decrease and are saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from exporter.collectors.job import EnergyReading
from exporter.families import FamilySpec
from exporter.ledger.energy import families
from exporter.ledger.energy.options import EnergyOptions, Intensity
from exporter.ledger.energy.power_split import UNATTRIBUTED, PhaseSplit
from exporter.ledger.energy.records import (
    CostLabels,
    EnergyLabels,
    PhaseEnergyLabels,
    RunRecord,
    WorkOutcomes,
)
from exporter.ledger.energy.work import ProcessWork, WorkAccount
from exporter.ledger.goodput.accounting import BADPUT_CAUSES, CAUSE_OF_PHASE
from exporter.training.phases import WORK_PHASES

_Key = TypeVar("_Key")

# Values of the label `method` of the energy of a phase.
POWER_SAMPLES = "power_samples"
EXCLUSIVE = "exclusive"
TIME_SHARE = "time_share"


@dataclass(frozen=True, slots=True)
class RunSample:
    """Value of a family of the run."""

    spec: FamilySpec
    labels: tuple[str, ...]  # label values without the run
    value: float


@dataclass(frozen=True, slots=True)
class _SpentTime:
    """Time that a process spent in each phase since the last division."""

    process: ProcessWork
    seconds_by_phase: Mapping[str, float]
    is_complete: bool  # True if the process was running at the last division, so that its time covers the whole interval


@dataclass(frozen=True, slots=True)
class _PhaseWeights:
    """Weights by which an amount of energy is divided among phases: joules or seconds."""

    method: str
    weight_by_phase: Mapping[str, float]
    total_weight: float  # weight of the whole amount; the remainder is unattributed


class RunEnergy:
    """Energy, carbon and cost counters of a run."""

    def __init__(self, boot: str) -> None:
        self.record = RunRecord(boot=boot)
        self.has_changes = False  # since the last save
        self._boot = boot
        self._reports_training = False  # True once the job has reported training
        self._is_validation_productive = False
        # Seconds by phase at the last division, by process id.
        self._previous_phases: dict[str, Mapping[str, float]] = {}
        self._spent_times: list[_SpentTime] = []

    @property
    def alive_at(self) -> float | None:
        """Monotonic time of the last pass in which the run was alive, in this boot."""
        return self.record.alive_at

    @property
    def session(self) -> str:
        """Session whose outcomes were applied last, or an empty text before the first."""
        return "" if self.record.applied_outcomes is None else self.record.applied_outcomes.session

    def resume(self, record: RunRecord) -> None:
        """Continue from a saved record, before the first count."""
        self.record = record
        self._reports_training = record.is_split
        if record.is_split:
            for cause in BADPUT_CAUSES:  # a record of an older release may lack a cause
                record.wasted_joules.setdefault(cause, 0.0)
        if record.boot != self._boot:
            record.boot, record.alive_at = self._boot, None

    def mark_alive(self, alive_at: float) -> None:
        """Set the monotonic time of the last pass in which the run was alive."""
        self.record.alive_at = alive_at

    def mark_reporting(self) -> None:
        """Divide the energy from now on among phases, because the job reports training."""
        self._reports_training = True

    def samples(self) -> Iterator[RunSample]:
        """Yield the values of all families of the run."""
        record = self.record
        for energy, joules in record.energy_joules.items():
            yield RunSample(families.ENERGY, (energy.component, energy.method), joules)
        for component, grams in record.carbon_grams.items():
            yield RunSample(families.CARBON, (component,), grams)
        for cost, money in record.cost.items():
            yield RunSample(families.COST, (cost.kind, cost.currency), money)
        for key, joules in record.phase_joules.items():
            yield RunSample(families.PHASE_ENERGY, (key.phase, key.component, key.method), joules)
            if key.method == POWER_SAMPLES and joules and key.phase != UNATTRIBUTED:
                inaccurate_joules = record.inaccurate_joules.get(key.phase, 0.0)
                quality_ratio = max(0.0, 1 - inaccurate_joules / joules)
                yield RunSample(families.PHASE_QUALITY, (key.phase,), quality_ratio)
        if record.is_split:
            yield RunSample(families.PRODUCTIVE_ENERGY, (), record.productive_joules)
        for cause, joules in record.wasted_joules.items():
            yield RunSample(families.WASTED_ENERGY, (cause,), joules)

    def add_energy(
        self,
        reading: EnergyReading,
        method: str,
        joules: float,
        seconds: float,
        options: EnergyOptions,
        intensity: Intensity | None = None,
        split: PhaseSplit | None = None,
    ) -> None:
        """Add the run's part of a device's energy over *seconds*, with carbon and cost.

        *split* is the measured division of the energy among phases, or None if another run used the device too or power samples are
        missing. Without *split*, the energy is divided by the time in each phase.
        """
        component, record = reading.component, self.record
        site_joules = joules * (1.0 if options.pue is None else options.pue)
        _add(record.energy_joules, EnergyLabels(component, method), joules)
        if intensity is not None:
            _add(record.carbon_grams, component, site_joules * intensity.grams_per_joule)
        if options.price_per_joule is not None:
            electricity = CostLabels("electricity", options.currency or "")
            _add(record.cost, electricity, site_joules * options.price_per_joule)
        self.has_changes = True
        if self._reports_training:
            self._divide_among_phases(component, reading.device, joules, seconds, split)

    def add_gpu_cost(self, gpu_seconds: float, options: EnergyOptions) -> None:
        """Add the price of GPU time, if a price is configured."""
        price = options.gpu_price_per_second
        if price is not None:
            _add(self.record.cost, CostLabels("device_time", options.currency or ""), gpu_seconds * price)
            self.has_changes = True

    def start_division(self, processes: Sequence[ProcessWork]) -> None:
        """Compute the time by phase of the run's running processes since the last division."""
        self._spent_times = []
        for process in processes:
            previous = self._previous_phases.get(process.process_id, {})
            increments = {
                phase: seconds - previous.get(phase, 0.0) for phase, seconds in process.phases.items()
            }
            positive_increments = {phase: seconds for phase, seconds in increments.items() if seconds > 0}
            is_complete = process.process_id in self._previous_phases
            self._spent_times.append(_SpentTime(process, positive_increments, is_complete))
        self._previous_phases = {process.process_id: process.phases for process in processes}
        self._reports_training = self._reports_training or bool(processes)

    def apply_outcomes(self, account: WorkAccount | None) -> None:
        """Move the energy of work whose outcome has become known from the uncommitted energy to the counters.

        The seconds of an account are compared with the previous account of the same session. The first account of a session only
        moves the uncommitted energy of the previous session to lost progress. Without an account, the counters do not change.
        """
        if account is None:
            return
        self._is_validation_productive = account.is_validation_productive
        record, previous = self.record, self.record.applied_outcomes
        applied_outcomes = WorkOutcomes(
            account.session, account.productive_seconds, account.lost_seconds, account.hung_seconds
        )
        record.applied_outcomes = applied_outcomes
        self.has_changes = self.has_changes or previous != applied_outcomes
        if previous is not None and previous.session != account.session:
            # A new session has started: the unsaved work of the previous session is lost.
            if record.uncommitted_joules:
                _add(record.wasted_joules, "lost_progress", record.uncommitted_joules)
            record.uncommitted_joules = 0.0
            return
        if previous is None or not record.is_split:
            return
        productive_seconds = applied_outcomes.productive_seconds - previous.productive_seconds
        lost_seconds = applied_outcomes.lost_seconds - previous.lost_seconds
        hung_seconds = applied_outcomes.hung_seconds - previous.hung_seconds
        decided_seconds = productive_seconds + lost_seconds + hung_seconds
        if decided_seconds > 0 and min(productive_seconds, lost_seconds, hung_seconds) >= 0:
            mean_watts = record.uncommitted_joules / (decided_seconds + account.uncommitted_seconds)
            record.uncommitted_joules = max(0.0, record.uncommitted_joules - decided_seconds * mean_watts)
            record.productive_joules += productive_seconds * mean_watts
            _add(record.wasted_joules, "lost_progress", lost_seconds * mean_watts)
            _add(record.wasted_joules, "hang", hung_seconds * mean_watts)

    def _divide_among_phases(
        self, component: str, device: str, joules: float, seconds: float, split: PhaseSplit | None
    ) -> None:
        """Divide energy of a device since the last division among phases, and count the energy of each phase."""
        record = self.record
        if not record.is_split:  # not earlier, so that a run without an energy source has no counters of 0
            record.is_split = True
            for cause in BADPUT_CAUSES:
                record.wasted_joules.setdefault(cause, 0.0)
        if joules <= 0:
            return
        total_weight = 0.0 if split is None else sum(split.weight_by_phase.values())
        if split is not None and total_weight > 0:
            weights = _PhaseWeights(POWER_SAMPLES, split.weight_by_phase, total_weight)
            for phase, inaccurate_weight in split.inaccurate_weight_by_phase.items():
                _add(record.inaccurate_joules, phase, joules * inaccurate_weight / total_weight)
        else:
            weights = self._time_weights(device, seconds)
        unattributed_joules = joules
        for phase, weight in weights.weight_by_phase.items():
            if phase != UNATTRIBUTED:
                phase_joules = joules * weight / weights.total_weight
                unattributed_joules -= phase_joules
                _add(record.phase_joules, PhaseEnergyLabels(phase, component, weights.method), phase_joules)
                self._count_phase(phase, phase_joules)
        unattributed_joules = max(0.0, unattributed_joules)
        method = TIME_SHARE if weights.method == EXCLUSIVE else weights.method
        _add(record.phase_joules, PhaseEnergyLabels(UNATTRIBUTED, component, method), unattributed_joules)
        _add(record.wasted_joules, "other", unattributed_joules)

    def _time_weights(self, device: str, seconds: float) -> _PhaseWeights:
        """Return the time by phase of a rank: the lowest rank that uses only this device, or the run's lowest rank if there is none.

        Without a running process, there is no time by phase, and all energy is unattributed.
        """
        spent_times = [
            spent_time for spent_time in self._spent_times if spent_time.process.device == device
        ] or self._spent_times
        if not spent_times:
            return _PhaseWeights(TIME_SHARE, {}, seconds)
        spent_time = spent_times[0]
        total_seconds = sum(spent_time.seconds_by_phase.values())
        if not spent_time.is_complete:  # the process may have started within the interval
            total_seconds = max(seconds, total_seconds)
        is_exclusive = spent_time.is_complete and len(spent_time.seconds_by_phase) == 1
        method = EXCLUSIVE if is_exclusive else TIME_SHARE
        return _PhaseWeights(method, spent_time.seconds_by_phase, total_seconds)

    def _count_phase(self, phase: str, joules: float) -> None:
        """Add the energy of a phase to the uncommitted, the productive or the wasted energy."""
        cause = CAUSE_OF_PHASE.get(phase, "other")
        if phase in WORK_PHASES:
            self.record.uncommitted_joules += joules
        elif cause == "validation" and self._is_validation_productive:
            self.record.productive_joules += joules
        else:
            _add(self.record.wasted_joules, cause, joules)


def _add(counters: dict[_Key, float], key: _Key, increment: float) -> None:
    """Increase a counter, which starts at 0. A negative increment is ignored."""
    counters[key] = counters.get(key, 0.0) + max(0.0, increment)
