"""Records of a job's training, appended by the job's threads and applied in order by the recording thread.

Blocks update the phase clock directly; finished steps and rare events create records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from exporter.recording.conversion import AttributeValue
from exporter.recording.value_class import Value, value_class


@value_class
class Expectation(Value):
    """Samples and tokens of this rank in a step, as configured; None if unknown."""

    samples: float | None
    tokens: float | None


class IterationEnded(NamedTuple):
    """Training iteration. A named tuple, because one is created in every step."""

    start_time: float  # monotonic seconds, as all times of records
    end_time: float
    work: float  # seconds of the phases that are work
    waits: float | None  # seconds of waiting; None on threads other than the main thread
    is_failed: bool
    expected: Expectation | None


@value_class
class EvaluationStepEnded(Value):
    """Batch of a validation or test."""

    mode: str
    seconds: float | None
    end_time: float


@value_class
class StepReported(Value):
    """Step that the job reports after the end of the step."""

    number: int | None
    seconds: float | None
    end_time: float
    possible_work: float  # seconds of the process that may have been work
    expected: Expectation | None


@value_class
class LoopBegan(Value):
    """Begin of a training loop."""

    start: int
    target: int | None
    start_time: float
    is_inferred: bool


@value_class
class LoopEnded(Value):
    """End of the training loop; `failure` is one of `END_REASONS`, or empty."""

    failure: str


@value_class
class ApplicationBegan(Value):
    """Begin of the application."""


@value_class
class ApplicationEnded(Value):
    """End of the application; `is_orderly` is False if a training loop was open."""

    failure: str
    is_orderly: bool


@value_class
class SaveBegan(Value):
    """Begin of a save; `key` identifies the save."""

    key: int
    call: str
    step: object
    strategy: str
    start_time: float


@value_class
class SaveEnded(Value):
    """End of the blocking part of a save."""

    key: int
    end_time: float
    unix_seconds: float  # the same time on the wall clock
    is_success: bool | None  # None if a callback ended the save, which has no result


@value_class
class SaveSucceeded(Value):
    """Confirmation of a save."""

    call: str
    step: object
    end_time: float
    unix_seconds: float  # the same time on the wall clock


@value_class
class SaveReported(Value):
    """Save that the job reports after the end of the save."""

    step: object
    kind: object
    ok: object
    seconds: object
    blocking_seconds: object
    bytes: object
    end_time: float
    unix_seconds: float  # the same time on the wall clock


@value_class
class RunDescribed(Value):
    """Facts about the run, converted to plain values, and parameters of the job's own names."""

    values: Mapping[str, object]
    parameters: Mapping[str, AttributeValue | None]


@value_class
class StepSkipped(Value):
    """Step that did not change the model."""

    reason: object


@value_class
class Interrupted(Value):
    """Reason why the process is about to end."""

    reason: str


@value_class
class BackgroundEnded(Value):
    """Background work of the job."""

    task: object
    seconds: float


@value_class
class SpanEnded(Value):
    """End of a span without a phase."""

    name: str
    seconds: float


@value_class
class SpanLogged(Value):
    """Event about a span, for event handlers; `parameters` adds the run's facts."""

    type: str
    span_id: str
    name: str
    data: Mapping[str, AttributeValue | None]
    unix_seconds: float
    parameters: bool = False
    reason: str | None = None


Record = (
    IterationEnded
    | EvaluationStepEnded
    | StepReported
    | LoopBegan
    | LoopEnded
    | ApplicationBegan
    | ApplicationEnded
    | SaveBegan
    | SaveEnded
    | SaveSucceeded
    | SaveReported
    | RunDescribed
    | StepSkipped
    | Interrupted
    | BackgroundEnded
    | SpanEnded
    | SpanLogged
)
