"""Measurement of passive Stats by callbacks of the job, on a worker thread."""

from __future__ import annotations

from collections.abc import Iterable
from time import time

from exporter.recording.conversion import safe_repr
from exporter.recording.notices import log_once
from exporter.recording.stat_state import StatState
from exporter.recording.worker import Worker

STUCK_SECONDS = 5.0
"""Duration of a measurement of all passive Stats from which a callback counts as hung."""


class PassiveStats(Worker):
    """Worker that measures the passive Stats once per flush. A callback that hangs pauses all measurements."""

    def __init__(self) -> None:
        super().__init__(_measure, name="passive", bound=1)

    def tick(self, states: Iterable[StatState]) -> None:
        """Start a measurement, unless the last one is still running."""
        passive_states = [state for state in states if state.measure is not None]
        if passive_states and self.busy_since is None:
            self.put(passive_states)
        elif self.busy_since is not None and time() - self.busy_since > STUCK_SECONDS:
            log_once("passive stuck", "a passive Stat callback has not returned; passive Stats are paused")


def _measure(passive_states: list[StatState]) -> None:
    """Call the callbacks of the enabled passive Stats, on the worker's thread."""
    for state in passive_states:
        if state.measure is not None and state.enabled:
            try:
                state.buffer.append(state.measure())
            except BaseException as error:  # noqa: BLE001  # the callback belongs to the job and may raise SystemExit
                state.refusals.append("error")
                name = state.definition.name
                log_once(
                    f"passive {name}", f"the callback of the passive Stat {name!r} failed: {safe_repr(error)}"
                )
