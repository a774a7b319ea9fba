"""RunEnergy: what one run has used and cost, added up over time with the tariffs in force.

Runs in the sidecar, on the energy ledger's thread; arithmetic and rows, no I/O. All of it begins at 0, only grows
and is kept in a page of the ledger's state.

    ("energy", component, method)   joules        ("water", scope)            litres
    ("carbon", component)           grams         ("cost", kind, currency)    money
    ("embodied", component)         grams         ("alive", boot)             monotonic time of the last pass
    ("phase", phase, component, method)   joules  ("productive",), ("wasted", cause)   joules
    and the rows of `WorkEnergy`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from exporter.collectors.family import FamilySpec
from exporter.collectors.job import EnergyReading
from exporter.collectors.keeping import Rows
from exporter.ledger.energy_families import (
    CARBON,
    COST,
    EMBODIED,
    ENERGY,
    PHASE_ENERGY,
    PRODUCTIVE_ENERGY,
    WASTED_ENERGY,
    WATER,
)
from exporter.ledger.tariffs import JOULES_PER_KWH, NODE, TariffsInForce
from exporter.ledger.work_energy import WorkEnergy

FAMILIES: Mapping[str, FamilySpec] = {
    "energy": ENERGY,
    "carbon": CARBON,
    "embodied": EMBODIED,
    "water": WATER,
    "cost": COST,
    "phase": PHASE_ENERGY,
    "productive": PRODUCTIVE_ENERGY,
    "wasted": WASTED_ENERGY,
}
"""The first word of a row, and the family whose labels are the others, after `run`."""


class RunEnergy:
    """The counters of one run.

    Attributes:
        alive_at: Monotonic time of the last pass in which the run lived, in this boot; None when it did not.
        work: What the energy went into.
        changed: Whether there is something that was not yet saved.
    """

    def __init__(self, boot: str) -> None:
        self.alive_at: float | None = None
        self.work = WorkEnergy(self._add)
        self.changed = False
        self._boot = boot
        self._counters: dict[tuple[str, ...], float] = {}

    def samples(self) -> Iterator[tuple[FamilySpec, tuple[str, ...], float]]:
        """Give every counter: its family, its labels without the run, its value."""
        for (kind, *labels), value in sorted(self._counters.items()):
            yield FAMILIES[kind], tuple(labels), value

    def use(self, component: str, method: str, joules: float, tariffs: TariffsInForce) -> None:
        """Add energy, and what it emits, drinks and costs now; with 0 joules the counters begin."""
        self._add(joules, "energy", component, method)
        settings = tariffs.tariffs
        at_site = joules * (1.0 if settings.pue is None else settings.pue)
        intensity = tariffs.intensity
        if intensity is not None:
            self._add(at_site * intensity.grams_per_joule, "carbon", component)
        if settings.site_water is not None:
            self._add(joules / JOULES_PER_KWH * settings.site_water, "water", "site")
        if settings.source_water is not None:
            self._add(at_site / JOULES_PER_KWH * settings.source_water, "water", "source")
        if tariffs.price_per_joule is not None:
            self._add(at_site * tariffs.price_per_joule, "cost", "electricity", settings.currency)

    def hold(
        self, reading: EnergyReading | None, ratio: float, seconds: float, tariffs: TariffsInForce
    ) -> None:
        """Add the rent and the making of a device for a time.

        Args:
            reading: The device; None for the machine as a whole.
            ratio: The run's share of it.
            seconds: The time.
            tariffs: In force.
        """
        price = tariffs.device_price(reading)
        if price is not None:
            self._add(seconds * ratio * price, "cost", "device_time", tariffs.tariffs.currency)
        rate = tariffs.embodied_rate(reading)
        if rate is not None:
            component = NODE if reading is None else reading.component
            self._add(seconds * ratio * rate, "embodied", component)

    def _add(self, amount: float, *name: str) -> None:
        if name not in self._counters or amount > 0:
            self._counters[name] = self._counters.get(name, 0.0) + max(0.0, amount)
            self.changed = True

    def rows(self) -> Rows:
        """Write everything."""
        rows: Rows = {name: (value,) for name, value in self._counters.items()} | self.work.rows()
        if self.alive_at is not None:
            rows["alive", self._boot] = (self.alive_at,)
        return rows

    def resume(self, rows: Rows) -> None:
        """Go on from what was written; what was counted since is added."""
        for name, values in rows.items():
            value = values[0] if values else None
            if value is None:
                continue
            if name == ("alive", self._boot):
                self.alive_at = value if self.alive_at is None else self.alive_at
            elif name[0] in FAMILIES and len(name) == len(FAMILIES[name[0]].labels):
                self._counters[name] = self._counters.get(name, 0.0) + value
            else:
                self.work.resume(name, values)
