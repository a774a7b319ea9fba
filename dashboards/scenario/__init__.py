"""Simulated cluster for the dashboards: real exporters, real processes, the real Prometheus, described GPUs.

Six machines: two with eight H100, of which one GPU overheats and one is lost; one without GPUs, whose exporter is down for
an interval; one with A100 in MIG mode; two more with H100. On the first two machines, a run of four ranks pauses, saves,
validates, has a NaN gradient and a straggler, crashes and resumes. On the last two, a second run without faults is the
baseline. The end of the context manager ends all processes. If the parent is killed, the ranks exit because their standard
input closes; the exporters and Prometheus keep running.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_SECONDS = 240.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times of events, as shares of the duration; a pair of shares is an interval."""

    seconds: float = DEFAULT_SECONDS  # length of the scenario
    pause: tuple[float, float] = (0.22, 0.29)  # no data arrives
    straggle: float = 0.45  # one GPU is hot and its rank slow, until the crash
    nan: float = 0.38  # a gradient is NaN
    lost: tuple[float, float] = (0.5, 0.66)  # a GPU without a rank is off the bus
    down: tuple[float, float] = (0.34, 0.46)  # one exporter is down
    crash: float = 0.7  # a rank is killed; the run restarts after `restart`
    restart: float = 0.05
    saves: tuple[float, ...] = (0.1, 0.2, 0.32, 0.44, 0.56, 0.66, 0.86, 0.95)
    failing: float = 0.56  # a save that fails
    validation: float = 0.36  # start of a validation

    def at(self, share: float) -> float:
        """Return the seconds from the start."""
        return share * self.seconds

    def paused(self, seconds: float) -> bool:
        """Whether no data arrives at a time."""
        return self.at(self.pause[0]) <= seconds < self.at(self.pause[1])

    def hot(self, seconds: float) -> bool:
        """Whether the GPU of the straggler is slowed down by heat at a time."""
        return self.at(self.straggle) <= seconds < self.at(self.crash)
