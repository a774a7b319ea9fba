"""Progress: steps and their durations, and the samples, tokens and FLOPs of the training."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass

from exporter.recording.windows import median
from exporter.training.durations import CELLS, classic_buckets, native_buckets
from exporter.training.facts import Facts
from exporter.training.metrics import STEP_BUCKETS, Families, to_amount
from exporter.training.numbers import Numbers
from exporter.training.records import Expectation

LONGEST_STEP_WINDOW, IDEAL_STEP_WINDOW, COMPUTE_WINDOW = 100, 200, 50
"""Numbers of latest steps from which the longest step, the ideal duration and the compute time (without waiting) are computed."""
MIN_COMPARED_STEPS = 5
"""Number of durations from which the ideal duration is known, so that later steps can be recognized as slow."""
SKIPPED = ("overflow", "nonfinite")
"""Reasons for which a step does not change the model."""


def is_count(value: object) -> bool:
    """Return True for an int that is a possible number of steps or samples."""
    return type(value) is int and to_amount(value) is not None


@dataclass(eq=False, slots=True)
class Loop:
    """Training loop of a process."""

    number: int  # number of the loop in this process, from 1
    start: int  # number of steps before the loop
    completed_steps: int  # including the steps before the loop


@dataclass(frozen=True, slots=True)
class NonfiniteStart:
    """First of consecutive losses or gradient norms that are not finite."""

    step: int | None  # step of the value, counted from 1; None before the training loop
    unix_seconds: float


class Progress:
    """Completed steps of a process with their durations, samples, tokens and FLOPs."""

    def __init__(self, families: Families, facts: Facts, numbers: Numbers) -> None:
        self._families = families
        self._facts = facts
        self._numbers = numbers
        self._recent_durations: deque[float] = deque(maxlen=IDEAL_STEP_WINDOW)
        self._compute_seconds: deque[float] = deque(maxlen=COMPUTE_WINDOW)
        self.ideal_seconds = 0.0  # mean duration of an ordinary step; 0 if unknown
        self._slow_seconds = 0.0  # duration above which a step is slow; 0 if unknown
        self._has_new_durations = False  # since the latest `publish`
        self._created_gauges: set[tuple[str, ...]] = set()  # name and label values
        self.expected: Expectation | None = None  # of the latest step, not counted yet
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.steps = 0  # completed training steps
        self.last_progress: float | None = None  # end of the latest step or validation batch, monotonic time
        # True after the training loop, where no progress is expected, for example while the job exports the model
        self.is_over = False
        self._cells = [0] * (len(CELLS) + 1)  # number of training steps by duration
        self._duration_seconds = 0.0
        # Totals of recorded numbers that are already published: by name and mode, or by kind and value if not finite.
        self.published_totals: dict[tuple[str, str], float] = {}
        self.nonfinite_starts: dict[str, NonfiniteStart] = {}  # by kind, also if the latest value is finite

    def count_evaluation_batch(self, mode: str, seconds: float | None, end_time: float) -> None:
        """Count a completed batch of a validation or test."""
        if mode != "test":
            self.last_progress = end_time
        self._families.counter("training.steps", mode=mode).add()
        if seconds is not None:
            self._families.histogram("training.step_duration", mode=mode).observe(seconds)

    def count_training_steps(
        self, steps: int, end_time: float, durations: list[float], compute: list[float]
    ) -> None:
        """Count consecutive training steps.

        Args:
            steps: Number of steps.
            end_time: Monotonic time at the end of the last step.
            durations: Durations of the steps whose duration is known.
            compute: Durations without waiting, of the steps whose waiting is known.
        """
        is_first = not self.steps
        self.last_progress = end_time
        self.is_over = False
        self.steps += steps
        self._duration_seconds += sum(durations)
        cells = self._cells
        for seconds in durations:
            cells[bisect_left(CELLS, seconds)] += 1
        self._compute_seconds.extend(compute)
        steady_durations = durations[1:] if is_first else durations  # the first step compiles and warms up
        if steady_durations:
            self._has_new_durations = True
            self._compare(steady_durations)

    def _compare(self, durations: list[float]) -> None:
        """Count the time of slow steps above the ideal duration, and append all durations to the recent durations.

        The first `MIN_COMPARED_STEPS` durations are not compared: the ideal duration is computed from them.
        """
        recent = self._recent_durations
        missing_steps = max(MIN_COMPARED_STEPS - len(recent), 0)
        if missing_steps:
            recent.extend(durations[:missing_steps])
            if len(recent) == MIN_COMPARED_STEPS:
                self._update_ideal()
            durations = durations[missing_steps:]
        excesses = [seconds - self.ideal_seconds for seconds in durations if seconds > self._slow_seconds]
        if excesses:
            self._families.counter("training.slow_step_excess", "seconds").add(sum(excesses))
        recent.extend(durations)

    def _publish_steps(self) -> None:
        families = self._families
        # These counters exist from the first step, so that the first problem is a visible increase.
        for reason in SKIPPED:
            families.counter("training.skipped_steps", reason=reason)
        families.counter("training.slow_step_excess", "seconds")
        families.counter("training.steps", mode="train").raise_to(self.steps)
        durations = families.histogram("training.step_duration", mode="train")
        counts = classic_buckets(self._cells, STEP_BUCKETS)
        durations.replace(self._duration_seconds, counts, native_buckets(self._cells))

    def _update_ideal(self) -> None:
        """Recompute the ideal duration, and the duration above which a step is slow.

        A step is slow above the median plus three times the median absolute deviation. The ideal duration is the mean of all other steps.
        """
        sorted_durations = sorted(self._recent_durations)
        median_seconds = median(sorted_durations)
        deviations = [abs(seconds - median_seconds) for seconds in sorted_durations]
        self._slow_seconds = median_seconds + 3 * median(deviations)
        ordinary_durations = sorted_durations[: bisect_right(sorted_durations, self._slow_seconds)]
        self.ideal_seconds = sum(ordinary_durations) / len(ordinary_durations)

    def expect(self, expected: Expectation | None) -> None:
        """Set the configured samples and tokens of the latest step, and count the configured numbers of the previous step.

        The numbers of a step are counted one step later, because the job may still record its own numbers of the latest step.
        """
        self.count_expected()
        self.expected = expected

    def count_expected(self) -> None:
        """Count the configured samples and tokens of the latest step. A number that the job records itself is not counted."""
        expected, self.expected = self.expected, None
        if expected is None:
            return
        for field, number in (("samples", expected.samples), ("tokens", expected.tokens)):
            if number and field not in self._numbers.recorded_counters:
                self._add(field, number, "train")

    def _add(self, field: str, number: float, mode: str) -> None:
        """Count samples or tokens, and the FLOPs of the training with them. FLOPs per token take precedence over FLOPs per sample."""
        self._families.counter(f"training.{field}", mode=mode).add(number)
        if mode != "train":
            return
        facts = self._facts
        model = hardware = None
        if field == "tokens":
            model, hardware = facts.flops_per_token, facts.hardware_flops_per_token
        elif facts.flops_per_token is None:
            model = facts.flops_per_sample
        if model is not None:
            self._families.counter("training.model_flops").add(model * number)
            if hardware is not None:
                self._families.counter("training.hardware_flops").add(hardware * number)

    @property
    def longest_seconds(self) -> float | None:
        """Duration of the longest of the latest 100 steps without the first step; None before the second step."""
        return max(list(self._recent_durations)[-LONGEST_STEP_WINDOW:], default=None)

    def publish(self, wall_clock_offset: float) -> None:
        """Update the series. *wall_clock_offset* is the wall clock minus the monotonic clock, in seconds."""
        self._publish_numbers()
        if self.steps:
            self._publish_steps()
        if self.last_progress is not None:
            gauge = self._families.gauge("training.last_progress_timestamp", "seconds")
            gauge.set(None if self.is_over else round(self.last_progress + wall_clock_offset, 3))
        if not self._has_new_durations:
            return
        self._has_new_durations = False
        if len(self._recent_durations) >= MIN_COMPARED_STEPS:
            self._update_ideal()
            self._families.gauge("training.step_ideal", "seconds").set(self.ideal_seconds)
        self._families.gauge("training.step_longest", "seconds").set(self.longest_seconds)
        if self._compute_seconds:
            self._families.gauge("training.rank_compute", "seconds").set(median(self._compute_seconds))

    def _publish_numbers(self) -> None:
        families, numbers = self._families, self._numbers
        for mode, mode_numbers in numbers.modes.items():
            self._gauge("training.loss", mode_numbers.loss, mode=mode)
            self._count("samples", mode, mode_numbers.samples)
            self._count("tokens", mode, mode_numbers.tokens)
        self._gauge("training.grad_norm", numbers.grad_norm)
        self._gauge("training.learning_rate", numbers.learning_rate)
        self._gauge("training.loss_scale", numbers.loss_scale)
        self._gauge("training.epoch", numbers.epoch)
        if numbers.epochs is not None:
            families.counter("training.epochs").raise_to(numbers.epochs)
        microbatches = numbers.microbatches  # read once, because the job's threads add to it
        if microbatches:
            self.published_totals["microbatches", "train"] = microbatches
            families.counter("training.microbatches").raise_to(microbatches)
        for (kind, name), count in list(numbers.nonfinite.items()):
            self.published_totals[kind, name] = count
            families.counter("training.nonfinite", kind=kind, value=name).raise_to(count)
        for kind, start in self.nonfinite_starts.items():
            is_nonfinite = kind in numbers.nonfinite_kinds
            step = families.gauge("training.nonfinite_since_step", kind=kind)
            step.set(float(start.step) if is_nonfinite and start.step is not None else None)
            timestamp = families.gauge("training.nonfinite_since_timestamp", "seconds", kind=kind)
            timestamp.set(round(start.unix_seconds, 3) if is_nonfinite else None)

    def _gauge(self, name: str, value: float | None, **labels: str) -> None:
        """Set a gauge. A gauge without a first value is not created."""
        key = (name, *labels.values())
        if value is not None:
            self._created_gauges.add(key)
        if key in self._created_gauges:
            self._families.gauge(name, **labels).set(value)

    def _count(self, field: str, mode: str, total: float) -> None:
        """Count the increase of a total since it was last published."""
        published = self.published_totals.get((field, mode), 0.0)
        if total > published:
            self.published_totals[field, mode] = total
            self._add(field, total - published, mode)
