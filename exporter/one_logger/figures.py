"""Figures of training loops and saves, with one-logger's names.

Durations are measured on the monotonic clock. The formulas are one-logger's, except for the corrections that `docs/one-logger.md`
lists.
"""

from __future__ import annotations

from dataclasses import dataclass

from exporter.one_logger.config import TrainingTelemetryConfig
from exporter.one_logger.names import CheckPointStrategy
from exporter.one_logger.standard_attributes import (
    CheckpointSaveSpanAttributes,
    SaveCheckpointSuccessEventAttributes,
    SyncCheckpointMetricsUpdateAttributes,
    TestingMetricsUpdateAttributes,
    TrainingLoopAttributes,
    TrainingMetricsUpdateAttributes,
    ValidationMetricsUpdateAttributes,
)
from exporter.one_logger.timers import MetricSummarizer
from exporter.recording.value_class import Value, value_class

TERA = 10**12
"""FLOPs in a TFLOP."""
MAX_PENDING_SAVES = 1000
"""Limit of unconfirmed asynchronous saves. Above the limit, the oldest save is dropped."""


@dataclass(slots=True)
class StepFacts:
    """Samples, sequence length and FLOPs of a training iteration over all ranks, and the targets of the job."""

    samples: int = 0  # global batch size; 0 if unknown
    seq_length: int | None = None  # tokens of a sample; None if unknown
    flops_per_sample: int = 0  # 0 if unknown
    is_throughput_enabled: bool = False
    iterations_target: int | None = None
    samples_target: int | None = None

    def update(self, config: TrainingTelemetryConfig) -> None:
        """Read the current values of a configuration. A fact keeps its value if the new value is unknown."""
        self.samples = config.global_batch_size or self.samples
        self.seq_length = config.seq_length or self.seq_length
        self.flops_per_sample = config.flops_per_sample or self.flops_per_sample
        is_enabled = config.is_log_throughput_enabled
        if is_enabled is not None:
            self.is_throughput_enabled = is_enabled

    @property
    def tokens(self) -> int | None:
        """Tokens of an iteration; None if the sequence length is unknown."""
        return self.samples * self.seq_length if self.seq_length else None

    @property
    def has_throughput(self) -> bool:
        """True if throughput can be computed."""
        return self.is_throughput_enabled and self.flops_per_sample > 0


@value_class
class SavedTraining(Value):
    """Training progress that a save preserves."""

    iterations: int
    samples: int
    train_seconds: float
    validation_seconds: float
    tflops: float | None


class LoopFigures:
    """Figures of a training loop: iterations, samples, tokens, FLOPs and durations since its start.

    Args:
        facts: Facts of an iteration, which the caller updates before the end of each iteration.
        iterations_start: Number of iterations before this loop.
        samples_start: Number of samples before this loop; None for *iterations_start* times the batch size.
        start_time: Unix time of the start; None before the first loop.
    """

    def __init__(
        self,
        facts: StepFacts,
        iterations_start: int = 0,
        samples_start: int | None = None,
        start_time: float | None = None,
    ) -> None:
        self.facts = facts
        self.iterations_start = self.completed_iterations = iterations_start
        self.start_time = start_time
        self.samples_start = iterations_start * facts.samples if samples_start is None else samples_start
        self.pending_iterations = 0  # iterations since the latest `update`
        self.validations: MetricSummarizer[float] = MetricSummarizer()  # durations of validation batches
        self._validated_at = iterations_start  # completed iterations at the end of the latest validation
        self._tested_at = iterations_start  # completed iterations at the end of the latest test
        self._iterations: MetricSummarizer[float] = MetricSummarizer()  # durations of iterations
        self._samples = self._flops = 0  # since the start of the loop
        self._tokens: int | None = None  # since the start of the loop
        self._flops_overall: int | None = None  # including the iterations before the loop
        if facts.has_throughput:
            self._flops_overall = iterations_start * facts.samples * facts.flops_per_sample
        # Throughput is in TFLOP/s per GPU: the mean since the start of the loop, and the values of the iterations.
        self._throughput: float | None = None
        self._throughputs: MetricSummarizer[float] = MetricSummarizer()
        self._first_finish: float | None = None  # Unix time at the end of the first iteration
        self._last_finish: float | None = None  # Unix time at the end of the latest iteration

    def attributes(self) -> TrainingLoopAttributes:
        """Return the attributes of the loop's span."""
        facts, samples_target = self.facts, self._target(self.facts.samples_target)
        tokens_target = None
        if facts.seq_length and samples_target:
            tokens_target = facts.seq_length * samples_target
        return TrainingLoopAttributes.create(
            train_iterations_start=self.iterations_start,
            train_samples_start=self.samples_start,
            train_tokens_target=tokens_target,
            completed_floating_point_operations_overall=self._flops_overall,
            train_iterations_target=self._target(facts.iterations_target),
            train_samples_target=samples_target,
        )

    def _target(self, target: int | None) -> int | None:
        """Return the target to export. If throughput is exported, a target of 0 or less is omitted, as in one-logger."""
        is_omitted = self.facts.has_throughput and target is not None and target <= 0
        return None if is_omitted else target

    def iteration_ended(self, seconds: float, end_time: float, world_size: int) -> None:
        """Count an iteration of *seconds* that ended at the Unix time *end_time*."""
        facts = self.facts
        self.completed_iterations += 1
        self.pending_iterations += 1
        self._iterations.add_value(seconds)
        self._samples += facts.samples
        if facts.tokens is not None:
            self._tokens = (self._tokens or 0) + facts.tokens
        self._last_finish = end_time
        if self._first_finish is None:
            self._first_finish = end_time
        if facts.has_throughput:
            flops = facts.samples * facts.flops_per_sample
            self._flops += flops
            self._flops_overall = (self._flops_overall or 0) + flops
            if self._iterations.total_value:
                self._throughput = self._flops / (self._iterations.total_value * TERA * world_size)
            if seconds > 0:
                self._throughputs.add_value(flops / (seconds * TERA * world_size))

    def update(self) -> TrainingMetricsUpdateAttributes:
        """Return the figures of the training since the start of the loop, and start a new interval of iterations."""
        interval, self.pending_iterations = self.pending_iterations, 0
        iterations = self._iterations
        return TrainingMetricsUpdateAttributes.create(
            train_iterations_start=self.iterations_start,
            current_iteration=self.completed_iterations - 1,
            num_iterations=iterations.count,
            train_samples_start=self.samples_start,
            num_train_samples=self._samples,
            interval=interval,
            avg_iteration_time_sec=iterations.avg_value or 0.0,
            min_iteration_time_sec=iterations.min_value or 0.0,
            max_iteration_time_sec=iterations.max_value or 0.0,
            total_iteration_time_sec=iterations.total_value or 0.0,
            train_tokens=self._tokens,
            completed_floating_point_operations_overall=self._flops_overall,
            total_flops=self._flops,
            train_throughput_per_gpu=self._throughput,
            train_throughput_per_gpu_max=self._throughputs.max_value,
            train_throughput_per_gpu_min=self._throughputs.min_value,
            first_logged_train_iterations_finish_timestamp_sec=self._first_finish,
            last_logged_train_iterations_finish_timestamp_sec=self._last_finish,
        )

    def validation_ended(self) -> ValidationMetricsUpdateAttributes:
        """Return the figures of the validations of this loop, and start a new interval of iterations for the next validation."""
        interval = self.completed_iterations - self._validated_at
        self._validated_at = self.completed_iterations
        return ValidationMetricsUpdateAttributes.create(
            current_iteration=max(0, self.completed_iterations - 1),
            interval=interval,
            avg_iteration_time_sec=self.validations.avg_value,
            min_iteration_time_sec=self.validations.min_value,
            max_iteration_time_sec=self.validations.max_value,
            total_iteration_time_sec=self.validations.total_value,
        )

    def testing_ended(self) -> TestingMetricsUpdateAttributes:
        """Return the current iteration, and the number of iterations since the previous test or the start of the loop."""
        interval = self.completed_iterations - self._tested_at
        self._tested_at = self.completed_iterations
        return TestingMetricsUpdateAttributes.create(max(0, self.completed_iterations - 1), interval)

    def snapshot(self, iterations: int) -> SavedTraining:
        """Return the progress that a save preserves if the save starts now, after *iterations* iterations."""
        flops = (self._flops_overall or 0) if self.facts.has_throughput else self._flops_overall
        return SavedTraining(
            iterations=iterations,
            samples=self.samples_start + self._samples,
            train_seconds=self._iterations.total_value or 0.0,
            validation_seconds=self.validations.total_value or 0.0,
            tflops=None if flops is None else flops / TERA,
        )


@value_class
class CheckpointFigures(Value):
    """Save of a step.

    Attributes:
        number: Number of this save among all saves of the job, from 1.
        attempt: Number of this save among the saves of the same strategy, from 1.
    """

    step: int
    strategy: CheckPointStrategy
    snapshot: SavedTraining
    number: int
    attempt: int

    def attributes(self) -> CheckpointSaveSpanAttributes:
        """Return the attributes of the save's span."""
        return CheckpointSaveSpanAttributes.create(self.strategy, self.step, self.attempt)


class SaveFigures:
    """Figures of the saves of a job."""

    def __init__(self) -> None:
        self._pending_saves: dict[int, CheckpointFigures] = {}  # unconfirmed saves by step
        self._attempts = dict.fromkeys(CheckPointStrategy, 0)
        self._blocking_durations = {strategy: MetricSummarizer[float]() for strategy in CheckPointStrategy}
        self._successes = 0
        self._first_success: float | None = None  # Unix time
        self._furthest_save: CheckpointFigures | None = None

    def loop_began(self) -> None:
        """Forget the furthest save of earlier loops. The counts and the blocking times of all saves continue."""
        self._furthest_save = None

    def begin(self, step: int, strategy: CheckPointStrategy, snapshot: SavedTraining) -> CheckpointFigures:
        """Count the start of a save and return the new save, which replaces an unconfirmed save of the same step."""
        self._attempts[strategy] += 1
        save = CheckpointFigures(
            step=step,
            strategy=strategy,
            snapshot=snapshot,
            number=sum(self._attempts.values()),
            attempt=self._attempts[strategy],
        )
        self._pending_saves.pop(step, None)  # so that the new save is the last of the mapping
        self._pending_saves[step] = save
        if len(self._pending_saves) > MAX_PENDING_SAVES:
            oldest_step = next(iter(self._pending_saves))
            del self._pending_saves[oldest_step]
        return save

    def end(
        self, save: CheckpointFigures, seconds: float, *, is_failed: bool
    ) -> SyncCheckpointMetricsUpdateAttributes:
        """Add the blocking time of a save, and return the sum, minimum and maximum of its strategy.

        A synchronous or failed save can no longer be confirmed.
        """
        if is_failed or save.strategy is CheckPointStrategy.SYNC:
            self.drop(save)
        durations = self._blocking_durations[save.strategy]
        durations.add_value(seconds)
        return SyncCheckpointMetricsUpdateAttributes.create(
            save_checkpoint_sync_time_total_sec=durations.total_value or 0.0,
            save_checkpoint_sync_time_min_sec=durations.min_value or 0.0,
            save_checkpoint_sync_time_max_sec=durations.max_value or 0.0,
        )

    def drop(self, save: CheckpointFigures) -> None:
        """Remove a save from the unconfirmed saves."""
        if self._pending_saves.get(save.step) is save:
            del self._pending_saves[save.step]

    def find_pending(self, step: object) -> CheckpointFigures | None:
        """Return the unconfirmed save of a step, or None."""
        return self._pending_saves.get(step) if isinstance(step, int) else None

    def succeed(
        self, save: CheckpointFigures, unix_seconds: float, loop_began: float | None
    ) -> SaveCheckpointSuccessEventAttributes:
        """Count the success of a save, and return the furthest progress that a successful save of this loop preserves."""
        self.drop(save)
        self._successes += 1
        if self._first_success is None:
            self._first_success = unix_seconds
        self._furthest_save = max(self._furthest_save or save, save, key=_progress)
        saved_training = self._furthest_save.snapshot
        return SaveCheckpointSuccessEventAttributes.create(
            checkpoint_strategy=save.strategy,
            current_iteration=save.step,
            first_successful_save_checkpoint_timestamp_sec=self._first_success,
            latest_successful_save_checkpoint_timestamp_sec=unix_seconds,
            save_checkpoint_success_count=self._successes,
            productive_train_iterations=saved_training.iterations,
            productive_train_samples=saved_training.samples,
            productive_train_iterations_sec=saved_training.train_seconds,
            productive_validation_iterations_sec=saved_training.validation_seconds,
            productive_train_tflops=saved_training.tflops,
            training_start_timestamp_sec=loop_began,
        )


def _progress(save: CheckpointFigures) -> tuple[int, int]:
    """Return the order of saves: by the preserved iterations, then by the order of their starts."""
    return save.snapshot.iterations, save.number
