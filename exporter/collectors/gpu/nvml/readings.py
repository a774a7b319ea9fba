"""Readings of a pass over a GPU, as sent by the NVML child.

A reading has a name, and a value for each combination of labels; None means absent. A message contains the readings of a slower tier only
in the passes of this tier; the sidecar keeps the latest readings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Labels = tuple[str, ...]

ENERGY = "energy_millijoules"
"""Reading of the GPU's energy counter, which has a separate key in the message."""


@dataclass(slots=True)
class PassReadings:
    """Readings of a pass over a GPU: gauges in base units, counters in NVML's units."""

    values: dict[str, dict[Labels, float | None]] = field(default_factory=dict)  # by name and labels
    replaced: dict[str, dict[Labels, float]] = field(default_factory=dict)  # complete readings, see `set_all`
    energy_delay: float = 0.0  # seconds from the time of the pass to the reading of the energy counter
    power: dict[str, Any] | None = None  # fields of PassPower
    processes: list[dict[str, Any]] | None = None  # None if the driver does not list processes
    has_process_list: bool = False  # True if `processes` was read in this pass
    instances: list[dict[str, Any]] | None = None  # fields of MigInstance; None if not read in this pass

    def set_value(self, reading: str, value: float | None, *labels: str) -> None:
        """Set the value of a reading for one combination of labels."""
        self.values.setdefault(reading, {})[labels] = value

    def set_all(self, reading: str, values: Mapping[Labels, float]) -> None:
        """Set the values of a reading for all labels; a combination that is not in `values` becomes absent."""
        self.replaced[reading] = dict(values)

    def get(self, reading: str) -> float | None:
        """Return the value of a reading without labels, or None if absent or not read in this pass."""
        return self.values.get(reading, {}).get(())

    def message(self) -> dict[str, Any]:
        """Return the entry of the GPU in a message. Removes the energy counter from `values`."""
        millijoules = self.values.pop(ENERGY, {}).get(())
        entry: dict[str, Any] = {
            "values": {name: list(values.items()) for name, values in self.values.items()},
            "replaced": {name: list(values.items()) for name, values in self.replaced.items()},
        }
        if millijoules is not None:
            entry["energy_millijoules"] = millijoules
            entry["energy_delay"] = self.energy_delay
        if self.power is not None:
            entry["power"] = self.power
        if self.has_process_list:
            entry["processes"] = self.processes
        if self.instances is not None:
            entry["instances"] = self.instances
        return entry
