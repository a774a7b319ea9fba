"""Readings of a pass over a GPU, as sent by the NVML child.

A reading has a name and labels; None means absent. The messages contain readings of a slower tier only in the passes of
that tier; the sidecar stores the latest reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Labels = tuple[str, ...]

ENERGY = "energy_millijoules"
"""The card's energy counter, which the sidecar treats separately."""


@dataclass(slots=True)
class PassReadings:
    """Readings of a pass over a GPU, in base units; counters as NVML returns them."""

    values: dict[str, dict[Labels, float | None]] = field(default_factory=dict)
    replaced: dict[str, dict[Labels, float]] = field(default_factory=dict)  # with all their labels
    power: dict[str, Any] | None = None  # fields of PowerBlock
    processes: list[dict[str, Any]] | None = None
    read_processes: bool = False
    instances: list[dict[str, Any]] | None = None

    def put(self, reading: str, value: float | None, *labels: str) -> None:
        """Set one reading."""
        self.values.setdefault(reading, {})[labels] = value

    def replace(self, reading: str, values: Mapping[Labels, float]) -> None:
        """Set a reading for all labels; labels that are not in `values` become absent."""
        self.replaced[reading] = dict(values)

    def get(self, reading: str) -> float | None:
        """Return a reading without labels; None if absent or not read in this pass."""
        return self.values.get(reading, {}).get(())

    def message(self) -> dict[str, Any]:
        """Return the entry of the message."""
        energy = self.values.pop(ENERGY, {}).get(())
        entry: dict[str, Any] = {
            "values": {name: list(values.items()) for name, values in self.values.items()},
            "replaced": {name: list(values.items()) for name, values in self.replaced.items()},
        }
        if energy is not None:
            entry["energy_millijoules"] = energy
        if self.power is not None:
            entry["power"] = self.power
        if self.read_processes:
            entry["processes"] = self.processes
        if self.instances is not None:
            entry["instances"] = self.instances
        return entry
