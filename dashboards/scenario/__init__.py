"""A small cluster to try dashboards on: real exporters, real processes, the real Prometheus, described GPUs.

Six machines in one: two with eight H100 of which one becomes hot and one is lost, one without GPUs whose exporter is
killed for a while, one with divided A100, two more with H100. On the first two a run of four ranks pauses, saves,
validates, meets a number that is none, has a straggler, crashes and goes on; on the last two a second run, the baseline,
has none of that. Everything is ended by leaving the context manager. When it is killed instead, the ranks see their
standard input close; the exporters and Prometheus go on until somebody ends them.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_SECONDS = 240.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """When what happens; of two shares, from the first to the second."""

    seconds: float = DEFAULT_SECONDS  # length of the scenario
    pause: tuple[float, float] = (0.22, 0.29)  # no data arrives
    straggle: float = 0.45  # from here on one GPU is hot, and its rank slow, until the crash
    nan: float = 0.38  # around here a gradient is no number
    lost: tuple[float, float] = (0.5, 0.66)  # a GPU without a rank is off the bus
    down: tuple[float, float] = (0.34, 0.46)  # an exporter is dead
    crash: float = 0.7  # a rank is killed here; the run starts again `restart` later
    restart: float = 0.05
    saves: tuple[float, ...] = (0.1, 0.2, 0.32, 0.44, 0.56, 0.66, 0.86, 0.95)
    failing: float = 0.56  # a checkpoint that cannot be written
    validation: float = 0.36  # one begins here

    def at(self, share: float) -> float:
        """Seconds from the beginning."""
        return share * self.seconds

    def paused(self, seconds: float) -> bool:
        """Whether no data arrives at a time."""
        return self.at(self.pause[0]) <= seconds < self.at(self.pause[1])

    def hot(self, seconds: float) -> bool:
        """Whether the GPU of the straggler is slowed down by heat at a time."""
        return self.at(self.straggle) <= seconds < self.at(self.crash)
