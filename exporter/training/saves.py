"""Saves: checkpoints under way, those that are safe, and what they took.

Used by the recording thread of the training process. A save is known by its step. One that is asynchronous may be
confirmed at any time, in any order; what was trained when the save began is what it makes safe.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from exporter.training.attributes import (
    CheckpointSaveSpanAttributes,
    SaveCheckpointSuccessEventAttributes,
    SyncCheckpointMetricsUpdateAttributes,
)
from exporter.training.loops import Durations, Loop
from exporter.training.medians import median
from exporter.training.names import CheckPointStrategy
from exporter.training.series import Families

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MOST_PENDING = 1000
"""Asynchronous saves that may wait to be confirmed; beyond it the oldest is forgotten."""
INTERVALS = 5
"""Successes of whose distances the median is told."""
KINDS = ("sync", "async", "local")


class Save:
    """A save.

    Attributes:
        step: As the job calls it.
        began: Monotonic time.
        completed: Steps completed when it began.
        commit: Makes the work safe that was done before it began.
        confirmed: Whether it has succeeded.
        order: Of its begin among all of the job.
    """

    __slots__ = (
        "step",
        "strategy",
        "began",
        "completed",
        "samples",
        "train_seconds",
        "validation_seconds",
        "tera",
        "commit",
        "confirmed",
        "order",
    )

    def __init__(
        self,
        step: int,
        strategy: CheckPointStrategy,
        began: float,
        loop: Loop,
        commit: Callable[[], None],
        order: int,
    ) -> None:
        self.step = step
        self.strategy = strategy
        self.began = began
        self.completed = loop.completed
        self.samples = loop.samples
        self.train_seconds = loop.iterations.total
        self.validation_seconds = loop.validations.total
        self.tera = loop.overall_tera
        self.commit = commit
        self.confirmed = False
        self.order = order


class Saves:
    """The saves of one job, one-logger's figures of them."""

    def __init__(self) -> None:
        self._pending: dict[int, Save] = {}
        self._attempts = dict.fromkeys(CheckPointStrategy, 0)
        self._times = {strategy: Durations() for strategy in CheckPointStrategy}
        self._successes = 0
        self._order = 0
        self._first_success: float | None = None
        self._furthest: Save | None = None

    def loop_begins(self) -> None:
        """Begin anew what counts by loop."""
        self._furthest = None

    def begin(
        self,
        step: int,
        strategy: CheckPointStrategy,
        at: float,
        loop: Loop,
        commit: Callable[[], None],
    ) -> Save:
        """Note that a save begins."""
        self._attempts[strategy] += 1
        self._order += 1
        save = Save(step, strategy, at, loop, commit, self._order)
        self._pending.pop(step, None)
        self._pending[step] = save
        if len(self._pending) > MOST_PENDING:
            del self._pending[next(iter(self._pending))]
        return save

    def attributes(self, save: Save) -> CheckpointSaveSpanAttributes:
        """Describe a save at its begin."""
        return CheckpointSaveSpanAttributes.create(save.strategy, save.step, self._attempts[save.strategy])

    def pending(self, step: object) -> Save | None:
        """Give the save of a step that was not confirmed yet."""
        return self._pending.get(step) if isinstance(step, int) else None

    def confirm(self, save: Save, wall: float, loop: Loop | None) -> SaveCheckpointSuccessEventAttributes:
        """Note that a save is safe.

        Args:
            save: It.
            wall: Unix time.
            loop: The latest training loop.
        """
        self._pending.pop(save.step, None)
        save.confirmed = True
        self._successes += 1
        if self._first_success is None:
            self._first_success = wall
        before = self._furthest
        if before is None or (save.completed, save.order) > (before.completed, before.order):
            self._furthest = save
        furthest = self._furthest or save
        return SaveCheckpointSuccessEventAttributes.create(
            checkpoint_strategy=save.strategy,
            current_iteration=save.step,
            first_successful_save_checkpoint_timestamp_sec=self._first_success,
            latest_successful_save_checkpoint_timestamp_sec=wall,
            save_checkpoint_success_count=self._successes,
            productive_train_iterations=furthest.completed,
            productive_train_samples=furthest.samples,
            productive_train_iterations_sec=furthest.train_seconds,
            productive_validation_iterations_sec=furthest.validation_seconds,
            productive_train_tflops=furthest.tera,
            training_start_timestamp_sec=None if loop is None else loop.began,
        )

    def end(self, save: Save, seconds: float) -> SyncCheckpointMetricsUpdateAttributes:
        """Note that a save holds up the training no more."""
        times = self._times[save.strategy]
        times.add(seconds)
        return SyncCheckpointMetricsUpdateAttributes.create(
            times.total, times.shortest or 0.0, times.longest or 0.0
        )

    def abandon(self, save: Save) -> None:
        """Note that a save has failed."""
        if self._pending.get(save.step) is save:
            del self._pending[save.step]


class SaveFamilies:
    """The saves of this process, as families.

    Args:
        families: Where they are counted.
    """

    def __init__(self, families: Families) -> None:
        self._families = families
        self._successes: deque[float] = deque(maxlen=INTERVALS)
        self._furthest: int | None = None

    def loop_begins(self) -> None:
        """Note that steps count from somewhere else."""
        self._furthest = None

    def expect(self, kind: str) -> None:
        """Begin to count saves of a kind, so that the first that fails is seen to rise."""
        for result in ("ok", "failed"):
            self._families.counter("training.checkpoints", kind=kind, result=result)

    def blocked(self, kind: str, seconds: float) -> None:
        """Count for how long a save held up the training."""
        self._families.histogram("training.checkpoint_duration", kind=kind, part="blocking").observe(seconds)

    def failed(self, kind: str) -> None:
        """Count a save that failed."""
        self.expect(kind)
        self._families.counter("training.checkpoints", kind=kind, result="failed").add()

    def succeeded(
        self, kind: str, step: int, at: float, wall: float, seconds: float | None, size: float | None = None
    ) -> None:
        """Count a save that succeeded.

        Args:
            kind: sync, async or local.
            step: Its step.
            at: Monotonic time of the success.
            wall: Unix time of it.
            seconds: From its begin until it was safe; None where that is not known.
            size: Bytes; None where that is not known.
        """
        families = self._families
        self.expect(kind)
        families.counter("training.checkpoints", kind=kind, result="ok").add()
        if seconds is not None:
            families.histogram("training.checkpoint_duration", kind=kind, part="total").observe(seconds)
        if kind == "local":
            return  # it does not survive the node
        families.gauge("training.checkpoint_last_success_timestamp", "seconds").set(wall)
        # Saves in the background may succeed out of order: the training goes on from the furthest.
        self._furthest = step if self._furthest is None else max(step, self._furthest)
        families.gauge("training.checkpoint_last_step").set(self._furthest)
        if size is not None:
            families.gauge("training.checkpoint_last", "bytes").set(size)
        self._successes.append(at)
        times = list(self._successes)
        if len(times) > 1:
            gaps = [max(later - earlier, 0.0) for earlier, later in pairwise(times)]
            families.gauge("training.checkpoint_interval", "seconds").set(median(gaps))
