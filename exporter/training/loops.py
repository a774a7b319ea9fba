"""Loops: the figures of one training loop, by one-logger's names and formulas, its defects mended.

Used by the recording thread of the training process. Every figure begins anew with a loop. Durations are the monotonic
clock's; what is no number, or infinite, is left out.
"""

from __future__ import annotations

from exporter.training.attributes import (
    TestingMetricsUpdateAttributes,
    TrainingLoopAttributes,
    TrainingMetricsUpdateAttributes,
    ValidationMetricsUpdateAttributes,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

TERA = 10**12


class Durations:
    """Count, sum and extremes of durations.

    Attributes:
        count: How many.
        total: Their sum, seconds.
        shortest: None while there is none.
        longest: None while there is none.
    """

    __slots__ = ("count", "total", "shortest", "longest")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.shortest: float | None = None
        self.longest: float | None = None

    def add(self, seconds: float) -> None:
        """Add one."""
        self.count += 1
        self.total += seconds
        self.shortest = seconds if self.shortest is None else min(self.shortest, seconds)
        self.longest = seconds if self.longest is None else max(self.longest, seconds)

    def add_all(self, durations: list[float], total: float) -> None:
        """Add several, whose sum is known."""
        self.count += len(durations)
        self.total += total
        shortest, longest = min(durations), max(durations)
        self.shortest = shortest if self.shortest is None else min(self.shortest, shortest)
        self.longest = longest if self.longest is None else max(self.longest, longest)

    @property
    def mean(self) -> float | None:
        """None while there is none."""
        return self.total / self.count if self.count else None


class Loop:
    """One training loop.

    Args:
        number: Of the loop in this process, from 1.
        start: Steps that the job had done before.
        samples_start: Samples that it had trained on before; None for steps times the global batch size.
        began: Unix time of its begin.
        values: What the configuration says: `global_batch_size`, `seq_length`, `flops_per_sample`,
            `is_log_throughput_enabled`, `train_iterations_target`, `train_samples_target`.
    """

    def __init__(
        self,
        number: int,
        start: int,
        samples_start: int | None,
        began: float,
        values: Mapping[str, Any],
    ) -> None:
        self.number = number
        self.start = start
        self.began = began
        self._values = dict(values)
        batch = values.get("global_batch_size") or 0
        self.samples_start = start * batch if samples_start is None else samples_start
        self.completed = start
        self.pending = 0
        self.validated_at = self.tested_at = start
        self.iterations = Durations()
        self.validations = Durations()
        self._samples = 0
        self._tokens: int | None = None
        self._flops = 0
        self._overall: int | None = start * batch * self._flops_of_sample if self._measures else None
        self._throughput: float | None = None
        self._throughput_max: float | None = None
        self._throughput_min: float | None = None
        self._first_finish: float | None = None
        self._last_finish: float | None = None

    def ask(self, values: Mapping[str, Any]) -> None:
        """Take what the configuration says now; what it does not know stays as it was."""
        self._values.update({name: value for name, value in values.items() if value is not None})

    @property
    def target(self) -> int | None:
        """The step at which it is to end."""
        return self._target("train_iterations_target")

    @property
    def samples(self) -> int:
        """Samples of all ranks, those before this process included."""
        return self.samples_start + self._samples

    @property
    def overall_tera(self) -> float | None:
        """FLOP since the job's first step, in 10^12; None where they are not asked for."""
        overall = 0 if self._overall is None and self._measures else self._overall
        return None if overall is None else overall / TERA

    def attributes(self) -> TrainingLoopAttributes:
        """Describe the loop at its begin."""
        samples_target = self._target("train_samples_target")
        length = self._values.get("seq_length")
        return TrainingLoopAttributes.create(
            train_iterations_start=self.start,
            train_samples_start=self.samples_start,
            train_tokens_target=length * samples_target if length and samples_target else None,
            completed_floating_point_operations_overall=self._overall,
            train_iterations_target=self.target,
            train_samples_target=samples_target,
        )

    def complete(self, seconds: float, finished: float, world_size: int | None) -> tuple[int, int | None]:
        """Count an iteration.

        Args:
            seconds: What it took.
            finished: Unix time of its end.
            world_size: Ranks; None where that is not known.

        Returns:
            Its samples and tokens, of all ranks together; no tokens where the sequence length is not known.
        """
        return self.complete_all([seconds], finished, finished, world_size)

    def complete_all(
        self, durations: list[float], first: float, last: float, world_size: int | None
    ) -> tuple[int, int | None]:
        """Count iterations that came one after another.

        Args:
            durations: What each took, seconds.
            first: Unix time of the end of the first.
            last: Unix time of the end of the last.
            world_size: Ranks; None where that is not known.

        Returns:
            Samples and tokens of each, as `complete` gives them.
        """
        count = len(durations)
        samples = self._values.get("global_batch_size") or 0
        length = self._values.get("seq_length")
        tokens = samples * length if length else None
        self.completed += count
        self.pending += count
        self.iterations.add_all(durations, sum(durations))
        self._samples += samples * count
        if tokens is not None:
            self._tokens = (self._tokens or 0) + tokens * count
        self._last_finish = last
        if self._first_finish is None:
            self._first_finish = first
        if self._measures:
            self._measure(samples * self._flops_of_sample, durations, world_size or 1)
        return samples, tokens

    def update(self) -> TrainingMetricsUpdateAttributes:
        """Tell all figures; the next interval begins."""
        interval, self.pending = self.pending, 0
        iterations = self.iterations
        return TrainingMetricsUpdateAttributes.create(
            train_iterations_start=self.start,
            current_iteration=self.completed - 1,
            num_iterations=iterations.count,
            train_samples_start=self.samples_start,
            num_train_samples=self._samples,
            interval=interval,
            avg_iteration_time_sec=iterations.mean or 0.0,
            min_iteration_time_sec=iterations.shortest or 0.0,
            max_iteration_time_sec=iterations.longest or 0.0,
            total_iteration_time_sec=iterations.total,
            train_tokens=self._tokens,
            completed_floating_point_operations_overall=self._overall,
            total_flops=self._flops,
            train_throughput_per_gpu=self._throughput,
            train_throughput_per_gpu_max=self._throughput_max,
            train_throughput_per_gpu_min=self._throughput_min,
            first_logged_train_iterations_finish_timestamp_sec=self._first_finish,
            last_logged_train_iterations_finish_timestamp_sec=self._last_finish,
        )

    def validation_update(self) -> ValidationMetricsUpdateAttributes:
        """Tell the figures of the validations of this loop; the next interval begins."""
        interval, self.validated_at = self.completed - self.validated_at, self.completed
        return ValidationMetricsUpdateAttributes.create(
            current_iteration=max(0, self.completed - 1),
            interval=interval,
            avg_iteration_time_sec=self.validations.mean,
            min_iteration_time_sec=self.validations.shortest,
            max_iteration_time_sec=self.validations.longest,
            total_iteration_time_sec=self.validations.total if self.validations.count else None,
        )

    def testing_update(self) -> TestingMetricsUpdateAttributes:
        """Tell where the tests are; the next interval begins."""
        interval, self.tested_at = self.completed - self.tested_at, self.completed
        return TestingMetricsUpdateAttributes.create(max(0, self.completed - 1), interval)

    def _target(self, name: str) -> int | None:
        """Give a target as it was stated; throughput has no use for one of 0 or less."""
        found: int | None = self._values.get(name)
        return None if self._measures and found is not None and found <= 0 else found

    @property
    def _flops_of_sample(self) -> int:
        return self._values.get("flops_per_sample") or 0

    @property
    def _measures(self) -> bool:
        return bool(self._values.get("is_log_throughput_enabled")) and self._flops_of_sample > 0

    def _measure(self, flops: int, durations: list[float], world_size: int) -> None:
        self._flops += flops * len(durations)
        self._overall = (self._overall or 0) + flops * len(durations)
        if self.iterations.total > 0:
            self._throughput = self._flops / (self.iterations.total * TERA * world_size)
        measured = [seconds for seconds in durations if seconds > 0]
        if measured:
            fastest = flops / (min(measured) * TERA * world_size)
            slowest = flops / (max(measured) * TERA * world_size)
            self._throughput_max = max(fastest, self._throughput_max or fastest)
            low = self._throughput_min
            self._throughput_min = slowest if low is None else min(slowest, low)
