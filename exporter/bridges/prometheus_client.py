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

LOOK_SECONDS = 5.0
HANGS_SECONDS = 10.0
MOST_SERIES = 2000
"""Maximum number of series of a process; further series are dropped and logged once."""
_SIDECARS = ("python_", "process_")

Key = tuple[str, str, tuple[tuple[str, str], ...]]
"""Kind, name without the kind's suffix, and labels."""


class _Series:
    """A series, and the totals in the job's library."""

    def __init__(self, state: StatState, *, forked: bool) -> None:
        self._state = state
        self._last: tuple[float, ...] | None = None
        self._forked = forked
        self._base: tuple[float, ...] = ()

    def set(self, value: float | None) -> None:
        """Show the value of a gauge."""
        self._state.set_foreign_reading(0 if value is None else 1, 0.0, value=value)

    def count(self, *now: float) -> None:
        """Show the increase of totals: a count, a sum and the cumulated buckets."""
        before, self._last = self._last, now
        if before is None:
            self._base = now if self._forked else (0.0,) * len(now)  # earlier counts are the parent's
        elif self._state.foreign_reading is None:
            self._base = before  # the recording restarted with a new identity
        elif any(map(lt, now, before)):
            self._base = tuple(map(sub, self._base, before))  # the job has reset the counter
        number, total, *buckets = map(sub, now, self._base)
        counts = tuple(map(int, buckets))
        number = max(number, total > 0)  # a counter has none
        self._state.set_foreign_reading(
            int(number), total if isfinite(total) and total >= 0 else None, counts
        )

    def forget(self) -> None:
        """Restart in a forked child."""
        self._last, self._forked = None, True


class Registries(Periodic):
    """Poller of the collectors of the job's registries."""

    def __init__(self) -> None:
        self._registries: list[Any] = []
        self._series: dict[Key, _Series | None] = {}
        self._gauges: dict[int, set[Key]] = {}  # of each collector
        self._hung: set[int] = set()
        self._asked: tuple[int, float] | None = None  # a collector, and since when
        self._forked = False
        super().__init__(
            "prometheus-client", self.look, seconds=LOOK_SECONDS, after_fork=self._begin_anew, wake=True
        )

    def add(self, registry: Any) -> None:
        """Add a registry to the poll; a repeated call is harmless."""
        if not any(each is registry for each in self._registries):
            self._registries.append(registry)

    def tick(self) -> None:
        """Poll if due; stop polling a collector that hangs."""
        asked = self._asked
        if asked is not None and monotonic() - asked[1] > HANGS_SECONDS:
            self._leave(asked[0])
        else:
            super().tick()

    def _begin_anew(self) -> None:
        """In a forked child: discard the parent's counts."""
        self._forked, self._asked = True, None
        for series in self._series.values():
            if series is not None:
                series.forget()

    def look(self) -> None:
        """Poll every collector once."""
        for registry in list(self._registries):
            collectors = list(getattr(registry, "_collector_to_names", None) or (registry,))
            for collector in collectors:
                if id(collector) not in self._hung and not self._ask(collector):
                    return

    def _ask(self, collector: Any) -> bool:
        """Poll a collector. Return False if the poll hung and a new thread has continued."""
        self._asked = asked = (id(collector), monotonic())
        gauges: set[Key] = set()
        try:
            for family in collector.collect():
                if not family.name.startswith(_SIDECARS):
                    self._take(family, gauges)
        except Exception as error:  # noqa: BLE001  # the job's own code
            name = f"the collector {type(collector).__qualname__} of prometheus_client"
            log_once(name, f"{name} has raised: {error!r}")
        if self._asked is not asked:
            return False
        self._asked = None
        self._hide(self._gauges.get(id(collector), set()) - gauges)
        self._gauges[id(collector)] = gauges
        return True

    def _leave(self, collector: int) -> None:
        self._hung.add(collector)
        self._asked = None
        message = f"has not answered within {HANGS_SECONDS:g} s and is not asked any more"
        log_once(f"prometheus_client hangs {collector}", f"a collector of prometheus_client {message}")
        self._hide(self._gauges.pop(collector, set()))
        self.restart()

    def _hide(self, gauges: set[Key]) -> None:
        for key in gauges:
            series = self._series[key]
            if series is not None:
                series.set(None)

    def _take(self, family: Any, gauges: set[Key]) -> None:
        if family.type in {"histogram", "summary"}:
            self._take_distributions(family)
            return
        is_counter = family.type == "counter"
        for sample in () if family.type == "gaugehistogram" else family.samples:
            if is_counter != sample.name.endswith("_total") or sample.name.endswith("_created"):
                continue
            name = sample.name.removesuffix("_total")
            key = ("counter" if is_counter else "gauge", name, _labels(sample))
            series = self._of(key, family.documentation)
            if series is None:
                continue
            if is_counter:
                series.count(0, float(sample.value))
            else:
                gauges.add(key)
                series.set(float(sample.value) if isfinite(sample.value) else None)

    def _take_distributions(self, family: Any) -> None:
        parts: dict[tuple[tuple[str, str], ...], dict[float | str, float]] = {}
        for sample in family.samples:
            part = parts.setdefault(_labels(sample), {})
            if sample.name.endswith("_bucket"):
                part[float(sample.labels["le"])] = sample.value
            elif sample.name.endswith(("_count", "_sum")):
                part[sample.name.rpartition("_")[2]] = sample.value
        for labels, part in parts.items():
            bounds = sorted(each for each in part if isinstance(each, float) and each < inf)
            number = part.get("count", part.get(inf))
            series = self._of((family.type, family.name, labels), family.documentation, bounds)
            if series is not None and number is not None:
                series.count(number, part.get("sum", 0.0), *[part[bound] for bound in bounds])

    def _of(self, key: Key, text: str, bounds: Iterable[float] = ()) -> _Series | None:
        """Return a series, created on first use, or None if the name or labels are invalid."""
        if key not in self._series:
            if len(self._series) >= MOST_SERIES:
                message = f"only {MOST_SERIES} series of prometheus_client are exported"
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
            state = RECORDER.stats.obtain(definition.replace(kind=kind))
        except DefinitionError as error:
            log_once(f"prometheus_client {name}", f"{name} of prometheus_client is not exported: {error}")
            return None
        state.is_own = True  # a helper process with a counter does not become a rank
        return _Series(state, forked=self._forked)


def _labels(sample: Any) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le" and value))


_registries = cache(Registries)


def export(registry: Any) -> None:
    """Have a registry's metrics exported, besides the default one."""
    _registries().add(registry)


def install() -> None:
    """Export the default registry, from when prometheus_client is imported."""
    when_imported("prometheus_client", lambda module: export(module.REGISTRY))
