"""Schedule: which collectors run and how often, as the configuration says, also when another takes its place.

Used in the sidecar by `serve`; called on the main thread at the start, and on the thread of a reload, one at a time.
What stays as it was keeps its block, its verdict and a pass under way.
"""

from __future__ import annotations

from dataclasses import replace

from exporter.cli.configuration import CollectorSettings, Configuration
from exporter.cli.gpu_settings import GpuSection
from exporter.cli.gpu_wiring import KeptGpus
from exporter.cli.job_wiring import ENERGY, ENERGY_DEADLINE_SECONDS, Wiring
from exporter.collectors.catalogue import CATALOGUE, EXTRA, CollectorEntry
from exporter.collectors.extra import extra_collectors
from exporter.collectors.scheduler import Scheduler
from exporter.families import AnyCollector

FEED = "feed"
"""The collector that reads the feed; not in the catalogue, since it is made elsewhere and cannot be switched off."""

FEED_DEADLINE_SECONDS = 10.0


class Schedule:
    """Puts collectors into the scheduler, and takes them out.

    Args:
        scheduler: Calls them.
        wiring: Makes them.
        feed: Reads the feed.
    """

    def __init__(self, scheduler: Scheduler, wiring: Wiring, feed: AnyCollector) -> None:
        self._scheduler = scheduler
        self._wiring = wiring
        self._feed = feed
        self._extra: list[str] = []

    def begin(self, configuration: Configuration) -> None:
        """Schedule all that is enabled."""
        self._scheduler.add(
            self._feed,
            interval_seconds=configuration.feed.interval,
            deadline_seconds=FEED_DEADLINE_SECONDS,
            eases=True,
        )
        for entry in CATALOGUE:
            if configuration.collectors[entry.name].enabled:
                self._add(entry, configuration.collectors[entry.name])
        self._add_extra(configuration.collectors[EXTRA.name])
        if configuration.gpu.enabled:
            self._add_gpus(configuration.gpu)
        if configuration.energy.enabled:
            self._add_energy(configuration)

    def change(self, old: Configuration, new: Configuration) -> None:
        """Follow from one configuration to the next."""
        if new.feed.interval != old.feed.interval:
            self._scheduler.reschedule(
                FEED, interval_seconds=new.feed.interval, deadline_seconds=FEED_DEADLINE_SECONDS
            )
        for entry in CATALOGUE:
            self._change(entry, old.collectors[entry.name], new.collectors[entry.name])
        if old.collectors[EXTRA.name] != new.collectors[EXTRA.name]:
            for name in self._extra:
                self._scheduler.remove(name)
            self._add_extra(new.collectors[EXTRA.name])
        self._change_gpus(old.gpu, new.gpu)
        if new.energy != old.energy:
            self._wiring.configure(new.energy)
            self._scheduler.remove(ENERGY)
            if new.energy.enabled:
                self._add_energy(new)

    def _change(self, entry: CollectorEntry, old: CollectorSettings, new: CollectorSettings) -> None:
        if old == new:
            return
        if old.enabled and new.enabled and old.own_options() == new.own_options():
            self._scheduler.reschedule(
                entry.name, interval_seconds=new.interval, deadline_seconds=new.deadline
            )
            return
        self._scheduler.remove(entry.name)
        self._wiring.forget(entry.name)
        if new.enabled:
            self._add(entry, new)

    def _change_gpus(self, old: GpuSection, new: GpuSection) -> None:
        if old == new:
            return
        if old.enabled and new.enabled and replace(old, interval=new.interval, deadline=new.deadline) == new:
            self._scheduler.reschedule(
                KeptGpus.name, interval_seconds=new.interval, deadline_seconds=new.deadline
            )
            return
        self._scheduler.remove(KeptGpus.name)
        if new.enabled:
            self._add_gpus(new)
        else:
            self._wiring.replace_gpus(None)

    def _add(self, entry: CollectorEntry, settings: CollectorSettings) -> None:
        self._scheduler.add(
            self._wiring.make(entry, settings.own_options()),
            interval_seconds=settings.interval,
            deadline_seconds=settings.deadline,
        )

    def _add_extra(self, settings: CollectorSettings) -> None:
        found = extra_collectors(**settings.own_options()) if settings.enabled else []
        self._extra = [each.name for each in found]
        for each in found:
            self._scheduler.add(each, interval_seconds=settings.interval, deadline_seconds=settings.deadline)

    def _add_gpus(self, settings: GpuSection) -> None:
        made = self._wiring.make_gpus(settings, on_change=lambda: self._scheduler.run_soon(KeptGpus.name))
        self._wiring.replace_gpus(made)
        # Its process and its counters go on by themselves; what befalls a GPU is published at once.
        self._scheduler.add(
            made, interval_seconds=settings.interval, deadline_seconds=settings.deadline, eases=True
        )

    def _add_energy(self, configuration: Configuration) -> None:
        self._scheduler.add(
            self._wiring.energy,
            interval_seconds=configuration.energy.interval,
            deadline_seconds=ENERGY_DEADLINE_SECONDS,
        )
