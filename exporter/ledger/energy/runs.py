"""What one run has used and cost, what its energy went into, and what became of that; arithmetic and rows.

    energy = phases + unattributed
           = productive + wasted by cause + that of uncommitted work

Energy of work waits in a pool until goodput says what has become of that work: the share of the uncommitted seconds that
became productive, or was lost, takes the same share of the pool with it. What is left when the run begins another task
was lost. All counters begin at 0, only grow and are kept:

    ("energy", component, method)         joules     ("water", scope)            litres
    ("carbon", component)                 grams      ("cost", kind, currency)    money
    ("embodied", component)               grams      ("alive", boot)             monotonic time of the last pass
    ("phase", phase, component, method)   joules     ("productive",), ("wasted", cause)   joules
    ("blurred", phase)                    joules of those in stays too short to be told apart
    ("pool",)                             joules of uncommitted work
    ("flow", session)                     productive, lost and hung seconds that have been taken out of it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from exporter.collectors.job import EnergyReading, Rows
from exporter.families import FamilySpec
from exporter.ledger.energy import families
from exporter.ledger.energy.attribution import UNATTRIBUTED, Flows, ProcessWork, Split
from exporter.ledger.energy.tariffs import JOULES_PER_KWH, NODE, EnergyOptions, Intensity
from exporter.ledger.goodput.task import CAUSE_OF_PHASE, CAUSES
from exporter.training.phases import WORK

FAMILIES: Mapping[str, FamilySpec] = {
    "energy": families.ENERGY,
    "carbon": families.CARBON,
    "embodied": families.EMBODIED,
    "water": families.WATER,
    "cost": families.COST,
    "phase": families.PHASE_ENERGY,
    "productive": families.PRODUCTIVE_ENERGY,
    "wasted": families.WASTED_ENERGY,
}
"""The first word of a row, and the family whose labels are the others, after `run`."""

POWER_SAMPLES, EXCLUSIVE, TIME_SHARE = "power_samples", "exclusive", "time_share"


class RunEnergy:
    """The counters of one run."""

    def __init__(self, boot: str) -> None:
        self.alive_at: float | None = None  # monotonic time of the last pass in which it lived, in this boot
        self.changed = False  # there is something that was not yet saved
        self._boot = boot
        self._counters: dict[tuple[str, ...], float] = {}
        self._tells = False  # of its training
        self._began = False  # to split its energy
        self._pool = 0.0
        self._flow: tuple[str, float, float, float] | None = None
        self._validates = False
        self._before: dict[str, Mapping[str, float]] = {}
        # since the last division: whose, seconds by phase, and whether that is all that it did since
        self._spent: list[tuple[ProcessWork, dict[str, float], bool]] = []

    @property
    def session(self) -> str:
        """Whose work it was last; "" before that is known."""
        return "" if self._flow is None else self._flow[0]

    def samples(self) -> Iterator[tuple[FamilySpec, tuple[str, ...], float]]:
        """Give everything: its family, its labels without the run, its value."""
        for (kind, *labels), value in sorted(self._counters.items()):
            if kind in FAMILIES:
                yield FAMILIES[kind], tuple(labels), value
            if kind == "phase" and labels[2] == POWER_SAMPLES and value and labels[0] != UNATTRIBUTED:
                blurred = self._counters.get(("blurred", labels[0]), 0.0)
                yield families.PHASE_QUALITY, (labels[0],), max(0.0, 1 - blurred / value)

    # What is used ---------------------------------------------------------------------------------------

    def use(
        self,
        reading: EnergyReading,
        method: str,
        joules: float,
        seconds: float,
        tariffs: EnergyOptions,
        intensity: Intensity | None = None,
        split: Split | None = None,
    ) -> None:
        """Add the run's share of a device's energy over some seconds, and what it emits, drinks and costs now.

        The split is what was measured of its phases, where the device was the run's alone.
        """
        component, at_site = reading.component, joules * (1.0 if tariffs.pue is None else tariffs.pue)
        self._add(joules, "energy", component, method)
        if intensity is not None:
            self._add(at_site * intensity.grams_per_joule, "carbon", component)
        if tariffs.site_water is not None:
            self._add(joules / JOULES_PER_KWH * tariffs.site_water, "water", "site")
        if tariffs.source_water is not None:
            self._add(at_site / JOULES_PER_KWH * tariffs.source_water, "water", "source")
        if tariffs.price_per_joule is not None:
            self._add(at_site * tariffs.price_per_joule, "cost", "electricity", tariffs.currency or "")
        if self._tells:
            self._split(component, reading.device, joules, seconds, split)

    def hold(
        self, reading: EnergyReading | None, ratio: float, seconds: float, tariffs: EnergyOptions
    ) -> None:
        """Add the rent and the making of the run's share of a device for some seconds; None is the machine as a whole."""
        price, rate = tariffs.device_price(reading), tariffs.embodied_rate(reading)
        if price is not None:
            self._add(seconds * ratio * price, "cost", "device_time", tariffs.currency or "")
        if rate is not None:
            self._add(seconds * ratio * rate, "embodied", NODE if reading is None else reading.component)

    # What it went into ----------------------------------------------------------------------------------

    def begin(self, processes: Sequence[ProcessWork]) -> None:
        """Take what the processes of the run have done since the last division."""
        self._spent = []
        for each in processes:
            before = self._before.get(each.process, {})
            grown = {phase: seconds - before.get(phase, 0.0) for phase, seconds in each.phases.items()}
            spent = {phase: seconds for phase, seconds in grown.items() if seconds > 0}
            self._spent.append((each, spent, each.process in self._before))
        self._before = {each.process: each.phases for each in processes}
        self._tells = self._tells or bool(processes)

    def _split(self, component: str, device: str, joules: float, seconds: float, split: Split | None) -> None:
        """Split what the run has used of one device since the last division."""
        if not self._began:  # only now: without any source of energy there is nothing to be zero
            self._began = True
            self._add(0.0, "productive")
            for cause in CAUSES:
                self._add(0.0, "wasted", cause)
        if joules <= 0:
            return
        measured = 0.0 if split is None else sum(split.joules.values())
        if split is not None and measured > 0:
            method, weights, total = POWER_SAMPLES, split.joules, measured
            for phase, part in split.blurred.items():
                self._add(joules * part / measured, "blurred", phase)
        else:
            method, weights, total = self._by_time(device, seconds)
        rest = joules
        for phase, weight in weights.items():
            if phase != UNATTRIBUTED:
                part = joules * weight / total
                rest -= part
                self._add(part, "phase", phase, component, method)
                self._spend(phase, part)
        rest = max(0.0, rest)
        self._add(rest, "phase", UNATTRIBUTED, component, TIME_SHARE if method == EXCLUSIVE else method)
        self._add(rest, "wasted", "other")

    def _by_time(self, device: str, seconds: float) -> tuple[str, Mapping[str, float], float]:
        """Give the method, the seconds in each phase and those in all; of the process that did most to a device."""
        # By the process that holds it, else by the lowest rank.
        holders = [each for each in self._spent if each[0].device == device] or self._spent
        if not holders:
            return TIME_SHARE, {}, seconds
        _, spent, known = holders[0]
        total = sum(spent.values())
        if not known:  # it may have begun within the interval
            total = max(seconds, total)
        return EXCLUSIVE if known and len(spent) == 1 else TIME_SHARE, spent, total

    def _spend(self, phase: str, joules: float) -> None:
        cause = CAUSE_OF_PHASE.get(phase, "other")
        if phase in WORK:
            self._pool += joules
            self.changed = True
        elif cause == "validation" and self._validates:
            self._add(joules, "productive")
        else:
            self._add(joules, "wasted", cause)

    def settle(self, flows: Flows | None) -> None:
        """Take out of the pool what is known by now not to be in it."""
        if flows is None:
            return
        self._validates = flows.validates
        before, self._flow = self._flow, (flows.session, flows.productive, flows.lost, flows.hung)
        self.changed = self.changed or before != self._flow
        if before is not None and before[0] != flows.session:
            # Another task has begun: whatever the one before had not saved, nobody goes on with it here.
            if self._pool:
                self._add(self._pool, "wasted", "lost_progress")
            self._pool = 0.0
            return
        if before is None or not self._began:
            return
        productive, lost, hung = (new - old for new, old in zip(self._flow[1:], before[1:], strict=True))
        gone = productive + lost + hung
        if gone > 0 and min(productive, lost, hung) >= 0:
            per_second = self._pool / (gone + flows.uncommitted)
            self._pool = max(0.0, self._pool - gone * per_second)
            self._add(productive * per_second, "productive")
            self._add(lost * per_second, "wasted", "lost_progress")
            self._add(hung * per_second, "wasted", "hang")

    # Rows -----------------------------------------------------------------------------------------------

    def _add(self, amount: float, *name: str) -> None:
        if name not in self._counters or amount > 0:
            self._counters[name] = self._counters.get(name, 0.0) + max(0.0, amount)
            self.changed = True

    def rows(self) -> Rows:
        """Write everything."""
        rows: Rows = {name: (value,) for name, value in self._counters.items()}
        if self._began:
            rows["pool",] = (self._pool,)
        if self._flow is not None:
            rows["flow", self._flow[0]] = self._flow[1:]
        if self.alive_at is not None:
            rows["alive", self._boot] = (self.alive_at,)
        return rows

    def resume(self, rows: Rows) -> None:
        """Go on from what was written; to be called before anything is counted."""
        for name, values in rows.items():
            kind, first = name[0], values[0] or 0.0
            if name == ("alive", self._boot):
                self.alive_at = first
            elif kind == "pool":
                self._tells = self._began = True
                self._pool = first
            elif kind == "flow":
                _, lost, hung = values
                self._flow = (name[1], first, lost or 0.0, hung or 0.0)
            elif kind in FAMILIES or kind == "blurred":
                self._counters[name] = first
