"""Energy, carbon and cost counters of a run, by phase and by the outcome of the work.

    energy = phases + unattributed
           = productive + wasted by cause + energy of uncommitted work

Energy of work stays in a pool until goodput decides the outcome of the work: if a share of the uncommitted seconds becomes
productive or lost, the same share of the pool is moved to the matching counter. When the run starts a new task, the remaining
pool is lost. All counters start at 0, never decrease and are saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from exporter.collectors.job import EnergyReading
from exporter.families import FamilySpec
from exporter.ledger.energy import families
from exporter.ledger.energy.options import EnergyOptions, Intensity
from exporter.ledger.energy.power_split import UNATTRIBUTED, Split
from exporter.ledger.energy.records import ComponentMethod, CostKind, PhaseMethod, RunRecord, SettledWork
from exporter.ledger.energy.work import ProcessWork, WorkAccount
from exporter.ledger.goodput.accounting import BADPUT_CAUSES, CAUSE_OF_PHASE
from exporter.training.phases import WORK_PHASES

_Key = TypeVar("_Key")

POWER_SAMPLES, EXCLUSIVE, TIME_SHARE = "power_samples", "exclusive", "time_share"


@dataclass(frozen=True, slots=True)
class RunSample:
    """Value of a family of the run. The labels do not include the run."""

    spec: FamilySpec
    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True)
class _SpentTime:
    """Time of a process since the last division."""

    process: ProcessWork
    seconds: Mapping[str, float]  # by phase
    is_complete: bool  # True if the process was present at the last division


@dataclass(frozen=True, slots=True)
class _PhaseWeights:
    """Division of an amount of energy among phases."""

    method: str
    weights: Mapping[str, float]
    total: float


class RunEnergy:
    """Energy, carbon and cost counters of a run."""

    def __init__(self, boot: str) -> None:
        self.record = RunRecord(boot=boot)
        self.has_changes = False  # since the last save
        self._boot = boot
        self._reports_training = False  # True if the job reports training
        self._counts_validation = False
        self._previous_phases: dict[str, Mapping[str, float]] = {}
        self._spent_times: list[_SpentTime] = []

    @property
    def alive_at(self) -> float | None:
        """Monotonic time of the last pass in which the run was alive, in this boot."""
        return self.record.alive_at

    @property
    def session(self) -> str:
        """Session of the settled work, or an empty text before any work is settled."""
        return "" if self.record.settled_work is None else self.record.settled_work.session

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
        """Record the monotonic time of a pass in which the run is running."""
        self.record.alive_at = alive_at

    def mark_reporting(self) -> None:
        """Record that the job reports training."""
        self._reports_training = True

    def samples(self) -> Iterator[RunSample]:
        """Yield the values of all families."""
        record = self.record
        for energy, joules in record.energy.items():
            yield RunSample(families.ENERGY, (energy.component, energy.method), joules)
        for component, grams in record.carbon.items():
            yield RunSample(families.CARBON, (component,), grams)
        for cost, money in record.cost.items():
            yield RunSample(families.COST, (cost.kind, cost.currency), money)
        for key, joules in record.phases.items():
            yield RunSample(families.PHASE_ENERGY, (key.phase, key.component, key.method), joules)
            if key.method == POWER_SAMPLES and joules and key.phase != UNATTRIBUTED:
                blurred_joules = record.blurred_joules.get(key.phase, 0.0)
                yield RunSample(families.PHASE_QUALITY, (key.phase,), max(0.0, 1 - blurred_joules / joules))
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
        split: Split | None = None,
    ) -> None:
        """Add the run's share of a device's energy over *seconds*, with carbon and cost.

        *split* is the measured energy by phase if the run uses the device alone.
        """
        component, record = reading.component, self.record
        site_joules = joules * (1.0 if options.pue is None else options.pue)
        _add(record.energy, ComponentMethod(component, method), joules)
        if intensity is not None:
            _add(record.carbon, component, site_joules * intensity.grams_per_joule)
        if options.price_per_joule is not None:
            electricity = CostKind("electricity", options.currency or "")
            _add(record.cost, electricity, site_joules * options.price_per_joule)
        self.has_changes = True
        if self._reports_training:
            self._split(component, reading.device, joules, seconds, split)

    def add_gpu_cost(self, gpu_seconds: float, options: EnergyOptions) -> None:
        """Add the price of GPU time."""
        price = options.gpu_price_per_second
        if price is not None:
            _add(self.record.cost, CostKind("device_time", options.currency or ""), gpu_seconds * price)
            self.has_changes = True

    def begin_division(self, processes: Sequence[ProcessWork]) -> None:
        """Compute the time by phase of the run's processes since the last division."""
        self._spent_times = []
        for process in processes:
            previous = self._previous_phases.get(process.process, {})
            increments = {
                phase: seconds - previous.get(phase, 0.0) for phase, seconds in process.phases.items()
            }
            positive = {phase: seconds for phase, seconds in increments.items() if seconds > 0}
            self._spent_times.append(_SpentTime(process, positive, process.process in self._previous_phases))
        self._previous_phases = {process.process: process.phases for process in processes}
        self._reports_training = self._reports_training or bool(processes)

    def apply_outcomes(self, account: WorkAccount | None) -> None:
        """Move the energy of work whose outcome is known from the pool to the counters."""
        if account is None:
            return
        self._counts_validation = account.validates
        record, previous = self.record, self.record.settled_work
        current = SettledWork(
            account.session, account.productive_seconds, account.lost_seconds, account.hung_seconds
        )
        record.settled_work = current
        self.has_changes = self.has_changes or previous != current
        if previous is not None and previous.session != account.session:
            # A new task has started: the unsaved work of the previous task is lost.
            if record.pool_joules:
                _add(record.wasted_joules, "lost_progress", record.pool_joules)
            record.pool_joules = 0.0
            return
        if previous is None or not record.is_split:
            return
        productive_seconds = current.productive_seconds - previous.productive_seconds
        lost_seconds = current.lost_seconds - previous.lost_seconds
        hung_seconds = current.hung_seconds - previous.hung_seconds
        settled_seconds = productive_seconds + lost_seconds + hung_seconds
        if settled_seconds > 0 and min(productive_seconds, lost_seconds, hung_seconds) >= 0:
            per_second = record.pool_joules / (settled_seconds + account.uncommitted_seconds)
            record.pool_joules = max(0.0, record.pool_joules - settled_seconds * per_second)
            record.productive_joules += productive_seconds * per_second
            _add(record.wasted_joules, "lost_progress", lost_seconds * per_second)
            _add(record.wasted_joules, "hang", hung_seconds * per_second)

    def _split(self, component: str, device: str, joules: float, seconds: float, split: Split | None) -> None:
        """Divide energy of a device since the last division among phases."""
        record = self.record
        if not record.is_split:  # only with energy, so that a run without an energy source has no zeros
            record.is_split = True
            for cause in BADPUT_CAUSES:
                record.wasted_joules.setdefault(cause, 0.0)
        if joules <= 0:
            return
        measured_joules = 0.0 if split is None else sum(split.joules_by_phase.values())
        if split is not None and measured_joules > 0:
            division = _PhaseWeights(POWER_SAMPLES, split.joules_by_phase, measured_joules)
            for phase, amount in split.blurred_joules.items():
                _add(record.blurred_joules, phase, joules * amount / measured_joules)
        else:
            division = self._time_weights(device, seconds)
        remainder = joules
        for phase, weight in division.weights.items():
            if phase != UNATTRIBUTED:
                part_joules = joules * weight / division.total
                remainder -= part_joules
                _add(record.phases, PhaseMethod(phase, component, division.method), part_joules)
                self._count_phase(phase, part_joules)
        remainder = max(0.0, remainder)
        method = TIME_SHARE if division.method == EXCLUSIVE else division.method
        _add(record.phases, PhaseMethod(UNATTRIBUTED, component, method), remainder)
        _add(record.wasted_joules, "other", remainder)

    def _time_weights(self, device: str, seconds: float) -> _PhaseWeights:
        """Return the time by phase of the process that uses a device, otherwise of the lowest rank."""
        users = [
            spent_time for spent_time in self._spent_times if spent_time.process.device == device
        ] or self._spent_times
        if not users:
            return _PhaseWeights(TIME_SHARE, {}, seconds)
        spent = users[0]
        total = sum(spent.seconds.values())
        if not spent.is_complete:  # the process may have started within the interval
            total = max(seconds, total)
        is_exclusive = spent.is_complete and len(spent.seconds) == 1
        return _PhaseWeights(EXCLUSIVE if is_exclusive else TIME_SHARE, spent.seconds, total)

    def _count_phase(self, phase: str, joules: float) -> None:
        cause = CAUSE_OF_PHASE.get(phase, "other")
        if phase in WORK_PHASES:
            self.record.pool_joules += joules
        elif cause == "validation" and self._counts_validation:
            self.record.productive_joules += joules
        else:
            _add(self.record.wasted_joules, cause, joules)


def _add(counters: dict[_Key, float], key: _Key, amount: float) -> None:
    counters[key] = counters.get(key, 0.0) + max(0.0, amount)
