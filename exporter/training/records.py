"""Records of a job's training, appended by the job's threads and applied in order by the recording thread.

Blocks update the phase clock directly; finished steps and rare events create records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from exporter.recording.conversion import AttributeValue


@dataclass(frozen=True, slots=True)
class Expectation:
    """Samples and tokens of this rank in a step, as configured; None if unknown."""

    samples: float | None
    tokens: float | None


class IterationEnded(NamedTuple):
    """Training iteration; a named tuple for speed, created in every step."""

    began: float  # monotonic seconds, as all times of records
    ended: float
    work: float  # seconds of the phases that are work
    waits: float | None  # seconds of waiting; None on threads other than the main thread
    failed: bool
    expected: Expectation | None


@dataclass(frozen=True, slots=True)
class EvaluationStepEnded:
    """Batch of a validation or test."""

    mode: str
    seconds: float | None
    ended: float


@dataclass(frozen=True, slots=True)
class StepReported:
    """Step that the job reports after the end of the step."""

    number: int | None
    seconds: float | None
    ended: float
    possible_work: float  # seconds of the process that may have been work
    expected: Expectation | None


@dataclass(frozen=True, slots=True)
class LoopBegan:
    """Begin of a training loop."""

    start: int
    target: int | None
    began: float
    inferred: bool


@dataclass(frozen=True, slots=True)
class LoopEnded:
    """End of the training loop; `failure` is one of `END_REASONS`, or empty."""

    failure: str


@dataclass(frozen=True, slots=True)
class ApplicationBegan:
    """Begin of the application."""


@dataclass(frozen=True, slots=True)
class ApplicationEnded:
    """End of the application; `in_order` is False if a training loop was open."""

    failure: str
    in_order: bool


@dataclass(frozen=True, slots=True)
class SaveBegan:
    """Begin of a save; `key` identifies the save."""

    key: int
    call: str
    step: object
    strategy: str
    began: float


@dataclass(frozen=True, slots=True)
class SaveEnded:
    """End of the blocking part of a save."""

    key: int
    ended: float
    wall: float
    succeeded: bool | None  # None if ended by a callback, which has no result


@dataclass(frozen=True, slots=True)
class SaveSucceeded:
    """Confirmation of a save."""

    call: str
    step: object
    at: float
    wall: float


@dataclass(frozen=True, slots=True)
class SaveReported:
    """Save that the job reports after the end of the save."""

    step: object
    kind: object
    ok: object
    seconds: object
    blocking_seconds: object
    bytes: object
    at: float
    wall: float


@dataclass(frozen=True, slots=True)
class RunDescribed:
    """Facts about the run, converted to plain values, and parameters of the job's own names."""

    values: Mapping[str, object]
    parameters: Mapping[str, AttributeValue | None]


@dataclass(frozen=True, slots=True)
class StepSkipped:
    """Step that did not change the model."""

    reason: object


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Reason why the process is about to end."""

    reason: str


@dataclass(frozen=True, slots=True)
class BackgroundEnded:
    """Background work of the job."""

    task: object
    seconds: float


@dataclass(frozen=True, slots=True)
class SpanEnded:
    """End of a span without a phase."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SpanLogged:
    """Event about a span, for event handlers; `parameters` adds the run's facts."""

    type: str
    span_id: str
    name: str
    data: Mapping[str, AttributeValue | None]
    at: float  # Unix seconds
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
