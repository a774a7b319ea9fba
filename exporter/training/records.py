"""Records of the training, appended by the job's threads and applied in order by the recording thread.

The time of phases needs no records, because blocks update the phase clock. All times are in seconds; times without *unix* in their
name are monotonic.
"""

from __future__ import annotations

from collections.abc import Mapping

from exporter.recording.conversion import AttributeValue
from exporter.recording.value_class import Value, value_class


@value_class
class Expectation(Value):
    """Samples and tokens of this rank in a step, as configured; None if unknown."""

    samples: float | None
    tokens: float | None


IterationEnded = tuple[
    float,  # start time
    float,  # end time
    float,  # seconds of the phases that are work
    float | None,  # seconds of the phases that are waiting; None on a thread other than the main thread
    bool,  # True if the iteration has failed
    Expectation | None,
]
"""End of a training iteration. A plain tuple, because every step creates one, and other types take twice as long."""


@value_class
class EvaluationStepEnded(Value):
    """End of a batch of a validation or test."""

    mode: str
    seconds: float | None
    end_time: float


@value_class
class StepReported(Value):
    """Step that the job reports after the end of the step."""

    number: int | None  # completed steps including this step; None for one more than before
    seconds: float | None  # None for the time since the previous step
    end_time: float
    possible_work_seconds: float  # `PhaseClock.possible_work_seconds` of the process up to this step
    expected: Expectation | None


@value_class
class LoopBegan(Value):
    """Start of a training loop."""

    start: int  # completed steps before the loop
    target: int | None  # completed steps at which the loop is expected to end
    start_time: float
    is_inferred: bool


@value_class
class LoopEnded(Value):
    """End of the training loop. `failure` is one of `END_REASONS`, or empty."""

    failure: str


@value_class
class ApplicationBegan(Value):
    """Start of the application."""


@value_class
class ApplicationEnded(Value):
    """End of the application. `is_orderly` is False if a training loop was still open."""

    failure: str
    is_orderly: bool


@value_class
class SaveBegan(Value):
    """Start of a save, which `key` identifies in the process."""

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
    is_success: bool | None  # None if a callback ended the save: a callback reports no result


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
    """Converted facts about the run, and parameters with user-defined names."""

    values: Mapping[str, object]
    parameters: Mapping[str, AttributeValue | None]


@value_class
class NonfiniteBegan(Value):
    """First of consecutive losses or gradient norms of the training that are not finite."""

    kind: str  # a value of `NONFINITE_KINDS`
    unix_seconds: float
    is_iteration_open: (
        bool  # True if the value belongs to the open iteration, False if it belongs to the latest
    )


@value_class
class StepSkipped(Value):
    """Step that did not change the model."""

    reason: object


@value_class
class Interrupted(Value):
    """Announcement of the job that the process is about to end, with the reason."""

    reason: str


@value_class
class BackgroundEnded(Value):
    """End of a block for background work."""

    task: object
    seconds: float


@value_class
class SpanEnded(Value):
    """End of a span without a phase."""

    name: str
    seconds: float


@value_class
class SpanLogged(Value):
    """Event about a span, for event handlers.

    `parameters` requests that the facts of the run (`training.begin`) or its result (`training.end`) are added.
    """

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
    | NonfiniteBegan
    | StepSkipped
    | Interrupted
    | BackgroundEnded
    | SpanEnded
    | SpanLogged
)
