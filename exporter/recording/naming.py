"""From a Stat's name to the names of its families: the one place where metric names are made.

Used in the training process, to refuse names that would collide, and in the sidecar, to publish. Pure
functions, standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from exporter.recording.aggregations import AGGREGATIONS, Aggregation
from exporter.recording.values import StatDefinition


@dataclass(frozen=True, slots=True)
class StatFamilies:
    """The families that one Stat becomes.

    Attributes:
        main: The histogram or summary: `training_batch_latency_seconds`.
        windows: A gauge for each windowed aggregation: `training_batch_latency_window_mean_seconds`.
        samples: Gauge, samples of the last closed window; "" for a plain family, which has no windows.
        last_sample: Gauge, Unix time of the latest sample; "" likewise.
    """

    main: str
    windows: tuple[tuple[Aggregation, str], ...]
    samples: str
    last_sample: str

    def names(self) -> frozenset[str]:
        """Every family and sample name, as they collide in an exposition."""
        main = {
            self.main,
            f"{self.main}_bucket",
            f"{self.main}_sum",
            f"{self.main}_count",
            f"{self.main}_created",
        }
        names = main | {name for _, name in self.windows} | {self.samples, self.last_sample}
        if self.main.endswith("_total"):
            base = self.main.removesuffix("_total")
            names |= {base, f"{base}_created"}
        return frozenset(names - {""})


def families_of(definition: StatDefinition) -> StatFamilies:
    """Name the families of a Stat.

    A unit that the name already carries (`step_seconds`, unit `seconds`) is not written twice.
    """
    base, unit = definition.name.replace(".", "_"), definition.unit
    suffix = f"_{unit}" if unit else ""
    if suffix and base.endswith(suffix):
        base = base.removesuffix(suffix)
    if definition.kind != "stat":
        total = "_total" if definition.kind == "counter" else ""
        return StatFamilies(main=base + suffix + total, windows=(), samples="", last_sample="")
    windowed = sorted(
        (each for each in definition.aggregations if AGGREGATIONS[each].word), key=lambda each: each.value
    )
    return StatFamilies(
        main=base + suffix,
        windows=tuple((each, f"{base}_window_{AGGREGATIONS[each].word}{suffix}") for each in windowed),
        samples=f"{base}_window_samples",
        last_sample=f"{base}_last_sample_timestamp_seconds",
    )
