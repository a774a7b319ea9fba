"""When there is to be another NVML child, how soon, and without which GPUs.

Used in the sidecar by the supervisor, on its one thread; no clock of its own. A child that ends well, or hangs on one
GPU, is followed by another at once; one that fails after 5 s, then ever more seldom. A GPU that was left out gets a
second chance when the call on it has returned, and no third: one bad card must not cost the others their readings.
"""

from __future__ import annotations

from dataclasses import dataclass

AT_ONCE = frozenset({"memory", "gpu_lost", "devices_changed", "lib_rm_version_mismatch"})
"""Farewells after which a new child is to go on without a gap."""

HANGS_AT_ONCE = 3
"""As many times, until a child has been steady, a GPU that hangs costs the others no gap."""

CRASHED, HUNG = "crashed", "hung"

RESTART_REASONS = (CRASHED, HUNG, *sorted({*AT_ONCE, "driver_not_loaded", "unknown"}))
"""Values of the label `reason` of restarts; anything else is `unknown`."""


@dataclass(frozen=True, slots=True)
class Timings:
    """How patient the supervisor is, in seconds.

    Attributes:
        deadline: Silence of a child that serves, after which it hangs.
        start_deadline: The same between two steps of its start: without persistence mode a GPU takes seconds.
        patience: How long a child may hang before there is a replacement.
        first_backoff: Wait after a first failure.
        most_backoff: Wait after many.
        steady: A child that served for so long had no bad start.
        farewell: How long a child may take to end in order.
    """

    deadline: float = 5.0
    start_deadline: float = 30.0
    patience: float = 5.0
    first_backoff: float = 5.0
    most_backoff: float = 300.0
    steady: float = 60.0
    farewell: float = 1.5


DEFAULT_TIMINGS = Timings()


class Restarts:
    """Remembers what became of the children.

    Attributes:
        counts: By reason, how often there was another child.
        left_out: GPUs that the next child does not touch.
    """

    def __init__(self, timings: Timings) -> None:
        self.counts: dict[str, int] = dict.fromkeys(RESTART_REASONS, 0)
        self.left_out: frozenset[int] = frozenset()
        self._timings = timings
        self._failures = 0
        self._hangs: dict[int, int] = {}

    def count(self, reason: str) -> None:
        """Note that there is another one, because of this."""
        self.counts[reason if reason in self.counts else "unknown"] += 1

    def wait(self, *, at_once: int = 0) -> float:
        """How long to wait after another end; none as long as there were no more than `at_once` in a row."""
        self._failures += 1
        if self._failures <= at_once:
            return 0.0
        timings = self._timings
        return min(timings.most_backoff, timings.first_backoff * 2.0 ** min(self._failures - 1, 16))

    def forgive(self, seconds: float) -> None:
        """Forget earlier failures after a child that served for so long."""
        if seconds >= self._timings.steady:
            self._failures = 0

    def leave_out(self, gpu: int) -> None:
        """A call on this GPU hangs."""
        self._hangs[gpu] = self._hangs.get(gpu, 0) + 1
        self.left_out |= {gpu}

    def take_back(self, gpu: int | None, *, slow: bool) -> frozenset[int]:
        """A call that hung has returned, so soon that it was merely `slow` or not.

        Returns:
            The GPUs that get a second chance, as it is known now that they do not hang for good.
        """
        if slow and gpu in self._hangs:
            self._hangs[gpu] -= 1
        again = frozenset(each for each in self.left_out if self._hangs.get(each, 0) <= 1)
        self.left_out -= again
        return again

    def forget_hangs(self) -> None:
        """NVML is taken anew, and every GPU with it."""
        self.left_out = frozenset()
        self._hangs.clear()
