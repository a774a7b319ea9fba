"""Bridge to prometheus_client: the job's own metrics in the feed, with run and rank.

Used in the training process. A thread of the bridge polls the collectors of the job's registries periodically and at exit. If a
collector raises, its remaining families are skipped until the next poll. A collector that hangs is no longer polled. Gauges that
a collector no longer returns are removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from math import inf, isfinite
from operator import lt, sub
from time import monotonic
from typing import Any, NamedTuple

from exporter.bridges.periodic import Periodic
from exporter.errors import DefinitionError
from exporter.patching import when_imported
from exporter.recording.definition import check_definition
from exporter.recording.identity import clean_text
from exporter.recording.limits import MAX_HELP_CHARACTERS
from exporter.recording.notices import log_once
from exporter.recording.recorder import RECORDER
from exporter.recording.stat_state import StatState
from exporter.recording.values import Aggregation

POLL_SECONDS = 5.0
"""Interval between two polls of the collectors."""
HANG_SECONDS = 10.0
"""Duration of a poll above which a collector counts as hanging."""
MAX_SERIES = 2000
"""Maximum number of series of a process. Further series are not exported, which is logged once."""
_SIDECAR_PREFIXES = ("python_", "process_")
"""Prefixes of families that are not exported, because the sidecar has metrics of the job's processes."""


class ForeignSeriesKey(NamedTuple):
    """Identity of a series."""

    kind: str
    name: str  # without the suffix of the kind
    labels: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Poll:
    """Poll of a collector in progress."""

    collector_id: int  # `id()`
    started_at: float  # monotonic
    gauges: set[ForeignSeriesKey] = field(default_factory=set)  # exported so far


class _Series:
    """Exported series, computed from the values in prometheus_client."""

    def __init__(self, state: StatState, *, is_forked: bool) -> None:
        self._state = state
        # Totals are the sum and, for a summary or histogram, the count and the cumulative buckets.
        self._last_totals: tuple[float, ...] | None = None  # at the latest poll
        self._is_forked = is_forked  # True if the first totals belong to the parent process
        # Totals from the time before the recording, which are not exported. After a reset of the counter by the job, these numbers are
        # negative, so that the totals before the reset are added to the new totals.
        self._subtracted_totals: tuple[float, ...] = ()
        self._is_summable = True  # False after a negative observation: the sum is not exported, because a counter never decreases

    def set(self, value: float | None) -> None:
        """Set the value of a gauge; None removes the series."""
        self._state.set_foreign_reading(0 if value is None else 1, 0.0, value=value)

    def set_totals(self, value_sum: float, *counts: float) -> None:
        """Set the total of a counter, or the sum, the count and the cumulative buckets of a summary or histogram.

        If the job resets the counter, the exported totals continue. In a forked child and after a change of the recorded identity, they
        start at zero.
        """
        totals = (value_sum, *counts)
        previous, self._last_totals = self._last_totals, totals
        if previous is None:
            # In a forked child, the counts up to the first poll belong to the parent.
            self._subtracted_totals = totals if self._is_forked else (0.0,) * len(totals)
        elif self._state.foreign_reading is None:
            self._subtracted_totals = previous  # the recording has restarted with a new identity
        elif _is_reset(previous, totals):
            self._subtracted_totals = tuple(map(sub, self._subtracted_totals, previous))
        else:
            previous_sum, *_ = previous
            if value_sum < previous_sum:  # after a negative observation
                self._is_summable = False
        value_sum, *remaining_counts = map(sub, totals, self._subtracted_totals)
        count, *buckets = remaining_counts or (value_sum > 0,)  # a counter has no count
        is_valid = self._is_summable and isfinite(value_sum) and value_sum >= 0
        self._state.set_foreign_reading(int(count), value_sum if is_valid else None, tuple(map(int, buckets)))

    def restart_in_child(self) -> None:
        """Start the totals at zero. Called in a forked child."""
        self._last_totals, self._is_forked = None, True


def _is_reset(previous: tuple[float, ...], totals: tuple[float, ...]) -> bool:
    """Return True if the job has reset a counter, a summary or a histogram since the previous totals.

    A smaller sum of a summary or histogram is no reset, because negative observations lower the sum.
    """
    (previous_sum, *previous_counts), (value_sum, *counts) = previous, totals
    return any(map(lt, counts, previous_counts)) if counts else value_sum < previous_sum


class Registries(Periodic):
    """Poller of the collectors of the job's registries."""

    def __init__(self) -> None:
        self._registries: list[Any] = []
        self._series: dict[ForeignSeriesKey, _Series | None] = {}
        self._gauges: dict[
            int, set[ForeignSeriesKey]
        ] = {}  # gauges exported at the latest poll, by id of the collector
        self._hung_ids: set[int] = set()  # of collectors
        self._poll: _Poll | None = None
        self._is_forked = False
        super().__init__(
            "prometheus-client", self.poll, seconds=POLL_SECONDS, after_fork=self._reset_in_child, wake=True
        )

    def add(self, registry: Any) -> None:
        """Poll the collectors of a registry from now on. A second call has no effect."""
        if not any(other is registry for other in self._registries):
            self._registries.append(registry)

    def tick(self) -> None:
        """Poll if due, and stop polling a collector that hangs."""
        poll = self._poll
        if poll is not None and monotonic() - poll.started_at > HANG_SECONDS:
            self._abandon(poll)
        else:
            super().tick()

    def _reset_in_child(self) -> None:
        """Discard the counts of the parent. Called in a forked child."""
        self._is_forked, self._poll = True, None
        for series in self._series.values():
            if series is not None:
                series.restart_in_child()

    def poll(self) -> None:
        """Poll each collector once, and remove the gauges of collectors that are no longer registered."""
        registered_ids: set[int] = set()
        for registry in list(self._registries):
            collectors = list(getattr(registry, "_collector_to_names", None) or (registry,))
            for collector in collectors:
                registered_ids.add(id(collector))
                if id(collector) not in self._hung_ids and not self._poll_collector(collector):
                    return
        for collector_id in self._gauges.keys() - registered_ids:
            gauges = self._gauges.pop(collector_id)
            self._hide(gauges.difference(*self._gauges.values()))

    def _poll_collector(self, collector: Any) -> bool:
        """Poll a collector. Return False if the call took so long that another thread has taken over the polling."""
        self._poll = poll = _Poll(id(collector), monotonic())
        try:
            for family in collector.collect():
                if self._poll is not poll:  # the collector has hung, and its series are hidden
                    return False
                if not family.name.startswith(_SIDECAR_PREFIXES):
                    self._record(family, poll.gauges)
        except Exception as error:  # noqa: BLE001  # the collector is code of the job
            name = f"the collector {type(collector).__qualname__} of prometheus_client"
            log_once(name, f"{name} raised: {error!r}")
        if self._poll is not poll:
            return False
        self._poll = None
        self._hide(self._gauges.get(id(collector), set()) - poll.gauges)
        self._gauges[id(collector)] = poll.gauges
        return True

    def _abandon(self, poll: _Poll) -> None:
        """Stop polling a collector that hangs, hide its gauges, and continue on a new thread."""
        self._hung_ids.add(poll.collector_id)
        self._poll = None
        message = f"did not return within {HANG_SECONDS:g} s and is no longer polled"
        log_once(
            f"prometheus_client hangs {poll.collector_id}", f"a collector of prometheus_client {message}"
        )
        self._hide(self._gauges.pop(poll.collector_id, set()) | poll.gauges)
        self.restart()

    def _hide(self, gauges: set[ForeignSeriesKey]) -> None:
        """Remove gauges from the export until they are set again."""
        for key in gauges:
            series = self._series[key]
            if series is not None:
                series.set(None)

    def _record(self, family: Any, gauges: set[ForeignSeriesKey]) -> None:
        """Export the samples of a family, and add the exported gauges to *gauges*.

        Gauge histograms, `_created` samples, and samples that do not fit the type of the family are not exported.
        """
        if family.type in {"histogram", "summary"}:
            self._record_distributions(family)
            return
        is_counter = family.type == "counter"
        for sample in () if family.type == "gaugehistogram" else family.samples:
            if is_counter != sample.name.endswith("_total") or sample.name.endswith("_created"):
                continue
            name = sample.name.removesuffix("_total")
            key = ForeignSeriesKey("counter" if is_counter else "gauge", name, _labels(sample))
            series = self._series_of(key, family.documentation)
            if series is None:
                continue
            if is_counter:
                series.set_totals(float(sample.value))
            else:
                gauges.add(key)
                series.set(float(sample.value) if isfinite(sample.value) else None)

    def _record_distributions(self, family: Any) -> None:
        """Export the series of a summary or a histogram."""
        # The values of a series, by "count", "sum" or the upper bound of a bucket.
        values_by_labels: dict[tuple[tuple[str, str], ...], dict[float | str, float]] = {}
        for sample in family.samples:
            values = values_by_labels.setdefault(_labels(sample), {})
            if sample.name.endswith("_bucket"):
                values[float(sample.labels["le"])] = sample.value
            elif sample.name.endswith(("_count", "_sum")):
                values[sample.name.rpartition("_")[2]] = sample.value
        for labels, values in values_by_labels.items():
            bounds = sorted(bound for bound in values if isinstance(bound, float) and bound < inf)
            count = values.get("count", values.get(inf))
            series = self._series_of(
                ForeignSeriesKey(family.type, family.name, labels), family.documentation, bounds
            )
            if series is not None and count is not None:
                buckets = [values[bound] for bound in bounds]
                series.set_totals(values.get("sum", 0.0), count, *buckets)

    def _series_of(
        self, key: ForeignSeriesKey, documentation: str, bounds: Iterable[float] = ()
    ) -> _Series | None:
        """Return a series, created on first use. Return None for a series that is invalid or above the limit of series."""
        if key not in self._series:
            if len(self._series) >= MAX_SERIES:
                message = f"only {MAX_SERIES} series of prometheus_client are exported"
                log_once("prometheus_client series", message)
                return None
            help_text = clean_text(documentation)[:MAX_HELP_CHARACTERS]
            self._series[key] = self._create_series(key, help_text, tuple(bounds))
        return self._series[key]

    def _create_series(
        self, key: ForeignSeriesKey, help_text: str, bounds: tuple[float, ...]
    ) -> _Series | None:
        """Return a new series, or None, which is logged once, if the name, the labels or the buckets are invalid."""
        name = key.name
        kind = "summary" if key.kind == "histogram" and not bounds else key.kind
        aggregations = {Aggregation.HISTOGRAM} if bounds else set[Aggregation]()
        try:
            definition = check_definition(
                name, aggregations, help=help_text, labels=dict(key.labels), buckets=bounds or None
            )
            state = RECORDER.stats.get_or_create(definition.replace(kind=kind))
        except DefinitionError as error:
            log_once(f"prometheus_client {name}", f"{name} of prometheus_client is not exported: {error}")
            return None
        state.is_exporter_family = True  # so that a helper process with a counter does not become a rank
        return _Series(state, is_forked=self._is_forked)


def _labels(sample: Any) -> tuple[tuple[str, str], ...]:
    """Return the labels of a sample except `le`, sorted by name. A label with an empty value is the same as no label."""
    return tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le" and value))


_registries = cache(Registries)  # created at the first call, because the constructor starts a thread


def export(registry: Any) -> None:
    """Export the metrics of a registry, in addition to the default registry."""
    _registries().add(registry)


def install() -> None:
    """Export the default registry as soon as prometheus_client is imported."""
    when_imported("prometheus_client", lambda module: export(module.REGISTRY))
