"""Runs whose energy is counted, with their saved counters."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from exporter.collectors.job import MAX_EXITED_RUNS
from exporter.families import Collected
from exporter.ledger.energy.records import RunRecord, decode_run
from exporter.ledger.energy.run_energy import RunEnergy
from exporter.ledger.state.store import StateRecord, StateStore

PASS_TOLERANCE_SECONDS = 60.0
"""Tolerance in the decision whether a run was running when the previous sidecar ended. The last pass with the run must not be longer
before the last pass of that sidecar."""


@dataclass(slots=True, eq=False)
class CountedRun:
    """Counters of a run, with their state record."""

    state: StateRecord[RunRecord]
    counters: RunEnergy
    is_loaded: bool = False  # the saved counters are included
    is_saved: bool = False  # the counters may be published
    spans_restart: bool = False  # the run was running at the last pass of the previous sidecar


class CountedRuns:
    """Counted runs by name. Iteration yields the names with the runs.

    Attributes:
        previous_sidecar_pass: Monotonic time of the last pass of the previous sidecar; None without such a pass in this boot.
    """

    def __init__(self, store: StateStore, boot: str) -> None:
        self.previous_sidecar_pass: float | None = None
        self._store = store
        self._boot = boot
        self._runs: dict[str, CountedRun] = {}

    def __iter__(self) -> Iterator[tuple[str, CountedRun]]:
        return iter(self._runs.items())

    def load(self, name: str, collected: Collected) -> CountedRun:
        """Return a run, with the saved counters unless a different sidecar holds them. Raises CollectError if the state is unreadable."""
        run = self._runs.get(name)
        if run is None:
            state = self._store.record("energy", decode_run, run=name)
            run = self._runs[name] = CountedRun(state, RunEnergy(self._boot))
        if not run.is_loaded:
            if run.state.claim():
                run.counters.resume(run.state.load() or RunRecord(boot=self._boot))
                alive_at, last_pass = run.counters.alive_at, self.previous_sidecar_pass
                if alive_at is not None and last_pass is not None:
                    run.spans_restart = 0 <= last_pass - alive_at <= PASS_TOLERANCE_SECONDS
                run.is_loaded = True
            else:
                collected.unsupported.append(
                    f"a different sidecar counts the energy of run {name!r}; the energy of the run is absent here"
                )
        return run

    def save(self, collected: Collected, *, are_devices_saved: bool) -> None:
        """Save the changed counters. Counters that are not saved, or whose devices are not, are not published."""
        for run in self._runs.values():
            run.is_saved = run.is_saved and are_devices_saved and not run.counters.has_changes
            if run.is_loaded and are_devices_saved and not run.is_saved:
                with collected.part():
                    run.state.save(run.counters.record)
                    run.is_saved, run.counters.has_changes = True, False

    def release_ended(self, alive_runs: Collection[str] | None, *, linger_seconds: float, now: float) -> None:
        """Release the runs that were last alive longer ago than *linger_seconds*, and exited runs beyond `MAX_EXITED_RUNS`."""
        alive_at = {name: run.counters.alive_at or 0.0 for name, run in self._runs.items()}
        exited_runs = (
            [] if alive_runs is None else sorted(alive_at.keys() - alive_runs, key=alive_at.__getitem__)
        )
        earlier_runs = exited_runs[:-MAX_EXITED_RUNS]
        for name, run_alive_at in alive_at.items():
            if now - run_alive_at > linger_seconds or name in earlier_runs:
                self._runs.pop(name).state.release()

    def release_all(self) -> None:
        """Release all runs for other sidecars."""
        for run in self._runs.values():
            run.state.release()
        self._runs.clear()
        self.previous_sidecar_pass = None
