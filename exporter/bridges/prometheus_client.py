"""Bridge from prometheus_client: the job's metrics in the feed, with run and rank.

Used in the training process, where the job has loaded that library. A thread of the bridge polls every collector
periodically and at exit. An exception skips a poll of the collector. A collector that hangs is no longer polled, and the
gauges are removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from math import inf, isfinite
from operator import lt, sub
from time import monotonic
from typing import Any

from exporter.bridges.periodic import Periodic
from exporter.errors import DefinitionError
from exporter.patching import when_imported
from exporter.recording.definition import check_definition
from exporter.recording.identity import clean_text
from exporter.recording.limits import MAX_HELP_CHARACTERS
from exporter.recording.notices import log_once
from exporter.recording.recorder import RECORDER
from exporter.recording.state import StatState
from exporter.recording.values import Aggregation

POLL_SECONDS = 5.0
HANG_SECONDS = 10.0
MAX_SERIES = 2000
"""Maximum number of series of a process. Further series are dropped and logged once."""
_SIDECAR_PREFIXES = ("python_", "process_")
"""Prefixes of families that the sidecar itself exports for the job's processes."""

Key = tuple[str, str, tuple[tuple[str, str], ...]]
"""Kind, name without the kind's suffix, and labels."""


class _Series:
    """A series, and the totals in the job's library."""

    def __init__(self, state: StatState, *, is_forked: bool) -> None:
        self._state = state
        self._last: tuple[float, ...] | None = None
        self._is_forked = is_forked
        self._base: tuple[float, ...] = ()

    def set(self, value: float | None) -> None:
        """Show the value of a gauge."""
        self._state.set_foreign_reading(0 if value is None else 1, 0.0, value=value)

    def count(self, *totals: float) -> None:
        """Show the increase of totals: a count, a sum and the cumulated buckets."""
        previous, self._last = self._last, totals
        if previous is None:
            self._base = (
                totals if self._is_forked else (0.0,) * len(totals)
            )  # earlier counts are the parent's
        elif self._state.foreign_reading is None:
            self._base = previous  # the recording restarted with a new identity
        elif any(map(lt, totals, previous)):
            self._base = tuple(map(sub, self._base, previous))  # the job has reset the counter
        number, total, *buckets = map(sub, totals, self._base)
        counts = tuple(map(int, buckets))
        number = max(number, total > 0)  # a counter has none
        self._state.set_foreign_reading(
            int(number), total if isfinite(total) and total >= 0 else None, counts
        )

    def forget(self) -> None:
        """Restart in a forked child."""
        self._last, self._is_forked = None, True


class Registries(Periodic):
    """Poller of the collectors of the job's registries."""

    def __init__(self) -> None:
        self._registries: list[Any] = []
        self._series: dict[Key, _Series | None] = {}
        self._gauges: dict[int, set[Key]] = {}  # of each collector
        self._hung: set[int] = set()
        self._poll: tuple[int, float] | None = None  # the collector of the poll under way, and its start
        self._is_forked = False
        super().__init__(
            "prometheus-client", self.poll, seconds=POLL_SECONDS, after_fork=self._reset_in_child, wake=True
        )

    def add(self, registry: Any) -> None:
        """Add a registry to the poll. A second call has no effect."""
        if not any(known is registry for known in self._registries):
            self._registries.append(registry)

    def tick(self) -> None:
        """Poll if due, and stop polling a collector that hangs."""
        poll = self._poll
        if poll is not None and monotonic() - poll[1] > HANG_SECONDS:
            self._abandon(poll[0])
        else:
            super().tick()

    def _reset_in_child(self) -> None:
        """Discard the parent's counts in a forked child."""
        self._is_forked, self._poll = True, None
        for series in self._series.values():
            if series is not None:
                series.forget()

    def poll(self) -> None:
        """Poll every collector once."""
        for registry in list(self._registries):
            collectors = list(getattr(registry, "_collector_to_names", None) or (registry,))
            for collector in collectors:
                if id(collector) not in self._hung and not self._poll_collector(collector):
                    return

    def _poll_collector(self, collector: Any) -> bool:
        """Poll a collector. Return False if the poll hung and a new thread has continued."""
        self._poll = poll = (id(collector), monotonic())
        gauges: set[Key] = set()
        try:
            for family in collector.collect():
                if not family.name.startswith(_SIDECAR_PREFIXES):
                    self._record(family, gauges)
        except Exception as error:  # noqa: BLE001  # the job's own code
            name = f"the collector {type(collector).__qualname__} of prometheus_client"
            log_once(name, f"{name} raised: {error!r}")
        if self._poll is not poll:
            return False
        self._poll = None
        self._hide(self._gauges.get(id(collector), set()) - gauges)
        self._gauges[id(collector)] = gauges
        return True

    def _abandon(self, collector: int) -> None:
        self._hung.add(collector)
        self._poll = None
        message = f"did not return within {HANG_SECONDS:g} s and is no longer polled"
        log_once(f"prometheus_client hangs {collector}", f"a collector of prometheus_client {message}")
        self._hide(self._gauges.pop(collector, set()))
        self.restart()

    def _hide(self, gauges: set[Key]) -> None:
        for key in gauges:
            series = self._series[key]
            if series is not None:
                series.set(None)

    def _record(self, family: Any, gauges: set[Key]) -> None:
        if family.type in {"histogram", "summary"}:
            self._record_distributions(family)
            return
        is_counter = family.type == "counter"
        for sample in () if family.type == "gaugehistogram" else family.samples:
            if is_counter != sample.name.endswith("_total") or sample.name.endswith("_created"):
                continue
            name = sample.name.removesuffix("_total")
            key = ("counter" if is_counter else "gauge", name, _labels(sample))
            series = self._obtain(key, family.documentation)
            if series is None:
                continue
            if is_counter:
                series.count(0, float(sample.value))
            else:
                gauges.add(key)
                series.set(float(sample.value) if isfinite(sample.value) else None)

    def _record_distributions(self, family: Any) -> None:
        parts: dict[tuple[tuple[str, str], ...], dict[float | str, float]] = {}
        for sample in family.samples:
            part = parts.setdefault(_labels(sample), {})
            if sample.name.endswith("_bucket"):
                part[float(sample.labels["le"])] = sample.value
            elif sample.name.endswith(("_count", "_sum")):
                part[sample.name.rpartition("_")[2]] = sample.value
        for labels, part in parts.items():
            bounds = sorted(bound for bound in part if isinstance(bound, float) and bound < inf)
            number = part.get("count", part.get(inf))
            series = self._obtain((family.type, family.name, labels), family.documentation, bounds)
            if series is not None and number is not None:
                series.count(number, part.get("sum", 0.0), *[part[bound] for bound in bounds])

    def _obtain(self, key: Key, text: str, bounds: Iterable[float] = ()) -> _Series | None:
        """Return a series, created on first use, or None if the name or labels are invalid."""
        if key not in self._series:
            if len(self._series) >= MAX_SERIES:
                message = f"only {MAX_SERIES} series of prometheus_client are exported"
                log_once("prometheus_client most", message)
                return None
            self._series[key] = self._make(key, clean_text(text)[:MAX_HELP_CHARACTERS], tuple(bounds))
        return self._series[key]

    def _make(self, key: Key, text: str, bounds: tuple[float, ...]) -> _Series | None:
        kind, name, labels = key
        kind = "summary" if kind == "histogram" and not bounds else kind
        aggregations = {Aggregation.HISTOGRAM} if bounds else set[Aggregation]()
        try:
            definition = check_definition(
                name, aggregations, help=text, labels=dict(labels), buckets=bounds or None
            )
            state = RECORDER.stats.get_or_create(definition.replace(kind=kind))
        except DefinitionError as error:
            log_once(f"prometheus_client {name}", f"{name} of prometheus_client is not exported: {error}")
            return None
        state.is_exporter_family = True  # a helper process with a counter does not become a rank
        return _Series(state, is_forked=self._is_forked)


def _labels(sample: Any) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le" and value))


_registries = cache(Registries)


def export(registry: Any) -> None:
    """Export the metrics of a registry, in addition to the default registry."""
    _registries().add(registry)


def install() -> None:
    """Export the default registry after the import of prometheus_client."""
    when_imported("prometheus_client", lambda module: export(module.REGISTRY))
