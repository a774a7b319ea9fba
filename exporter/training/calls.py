"""Calls: the marks that carry more than a time, and the spans that begin and end with them.

Used in the training process, on the job's threads. A span that is rare (the application, a loop, a save, one with a name
of the job's own) is made here, at once, so that the job can change it; what becomes of it is up to the interpreter.
"""

from __future__ import annotations

from math import isfinite
from time import monotonic, time

from exporter.training import hot
from exporter.training.arguments import taken
from exporter.training.events import Event
from exporter.training.failures import Failure
from exporter.training.kinds import BEGAN, CALL, ENDED, Kind
from exporter.training.names import CheckPointStrategy, SpanName
from exporter.training.provider import current
from exporter.training.reports import report
from exporter.training.spans import Span
from exporter.training.types import Attributes, TracingTimestamp, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_OPEN = 64
"""Rare spans of one thread that are known to be open: a job that never ends them does not fill the memory."""
LOOP_FIELDS = ("global_batch_size", "seq_length", "flops_per_sample", "is_log_throughput_enabled")
"""What every iteration of a loop needs."""
TRAINING_FIELDS = (
    *LOOP_FIELDS,
    "perf_tag",
    "log_every_n_train_iterations",
    "micro_batch_size",
    "train_iterations_target",
    "train_samples_target",
    "is_train_iterations_enabled",
    "is_validation_iterations_enabled",
    "is_test_iterations_enabled",
    "is_save_checkpoint_enabled",
    "custom_metadata",
)


class Call:
    """A mark of something else than the begin or end of a span.

    Attributes:
        time: Monotonic, seconds.
        wall: Unix seconds of the same moment.
        name: The function that was called.
        values: What it was given.
    """

    __slots__ = ("time", "wall", "name", "values")

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        self.time = monotonic()
        self.wall = time()
        self.name = name
        self.values = values


class Began(Call):
    """The begin of a rare span.

    Attributes:
        at: When it began, which may be before the call.
        span: What the job was given.
        entered: Whether it is a block; else it was begun by a callback.
    """

    __slots__ = ("at", "span", "entered")

    def __init__(
        self,
        name: str,
        values: dict[str, Any],
        span: Span,
        *,
        entered: bool,
    ) -> None:
        super().__init__(name, values)
        self.at = span.start_event.timestamp
        self.span = span
        self.entered = entered


class Ended(Call):
    """The end of a rare span, or of any by a callback that says when.

    Attributes:
        at: When it ended, which may be before the call.
        span: Which; None for the one of its kind that is open.
        entered: Whether it was a block.
        failure: What ended it, where an exception did.
        attributes: Of the stop event.
    """

    __slots__ = ("at", "span", "entered", "failure", "attributes")

    def __init__(
        self,
        name: str,
        values: dict[str, Any],
        at: TracingTimestamp,
        *,
        span: Span | None = None,
        entered: bool = False,
        failure: Failure | None = None,
        attributes: Attributes | None = None,
    ) -> None:
        super().__init__(name, values)
        self.at = at
        self.span = span
        self.entered = entered
        self.failure = failure
        self.attributes = attributes


def moment(milliseconds: object, call: str) -> TracingTimestamp:
    """Turn an explicit time, in milliseconds since the epoch, into a moment; now where there is none.

    A time ahead of now becomes now; what is no time is a misuse, and becomes now too.
    """
    wall, now = time(), monotonic()
    if milliseconds is None:
        return TracingTimestamp(wall, now)
    number = taken(milliseconds)
    if number == 0:
        return TracingTimestamp(wall, now)
    try:
        at = float(number) / 1000  # type: ignore[arg-type]  # anything may come
    except (TypeError, ValueError, OverflowError):
        at = -1.0
    if not isfinite(at) or at < 0:
        report(call, "time", f"milliseconds since the epoch, not {shown(milliseconds)}"[:200])
        return TracingTimestamp(wall, now)
    at = min(at, wall)
    return TracingTimestamp(at, now - (wall - at))


def begin(
    kind: Kind,
    call: str,
    *,
    at: TracingTimestamp | None = None,
    entered: bool = False,
    name: SpanName | None = None,
    span_attributes: Attributes | None = None,
    start_event_attributes: Attributes | None = None,
    parent: Span | None = None,
    values: dict[str, Any] | None = None,
) -> Span:
    """Begin a rare span.

    Args:
        kind: Of it.
        call: The function that the job called.
        at: When; None for now.
        entered: Whether it is a block.
        name: None for the kind's.
        span_attributes: The job's.
        start_event_attributes: The job's.
        parent: None for the innermost open one.
        values: What else the call was given, callables asked.
    """
    start = at or TracingTimestamp(time(), monotonic())
    span = Span.create(
        kind.name if name is None else name, parent, span_attributes, start_event_attributes, start
    )
    place = hot.here()
    if hot.is_on():
        span.listener = _tell_event
        place.say(kind.code + BEGAN, Began(call, values or {}, span, entered=entered))
        place.opened.append(span)
        del place.opened[:-MOST_OPEN]
        settle(failing=False)
    return span


def end(
    kind: Kind,
    call: str,
    *,
    at: TracingTimestamp | None = None,
    span: Span | None = None,
    entered: bool = False,
    exception: BaseException | None = None,
    attributes: Attributes | None = None,
    values: dict[str, Any] | None = None,
) -> None:
    """End a rare span; the arguments are those of `Ended`."""
    place = hot.here()
    if not hot.is_on():
        if span is not None:
            span.stop(attributes, at)
        return
    _close(place.opened, kind, span)
    moment_ = at or TracingTimestamp(time(), monotonic())
    failure = None if exception is None else Failure.of(exception)
    place.say(
        kind.code + ENDED,
        Ended(
            call,
            values or {},
            moment_,
            span=span,
            entered=entered,
            failure=failure,
            attributes=attributes,
        ),
    )
    settle(failing=exception is not None)


def _close(opened: list[Span], kind: Kind, span: Span | None) -> None:
    """Forget a span that ends: this one, or the innermost of its kind."""
    for index in range(len(opened) - 1, -1, -1):
        if opened[index] is span or (span is None and opened[index].name == kind.name):
            del opened[index]
            return


def say(name: str, **values: Any) -> None:
    """Put the mark of any other call."""
    place = hot.here()
    if hot.is_on():
        place.say(CALL, Call(name, values))
        settle(failing=False)


def settle(*, failing: bool) -> None:
    """Have rare calls looked at soon: at once where nothing is in the way, for certain where misuse raises."""
    hot.Hooks.settle(hot.here().track, failing)


def asked(*fields: str) -> dict[str, Any]:
    """Give what the configuration of the training says of some fields now, callables asked."""
    configured = current()
    if configured is None or configured.training is None or not configured.enabled:
        return {}
    training = configured.training
    return {name: training.value(name) for name in fields}


def _target(given: object, call: str, field: str) -> int | None:
    """Take a whole number, or ask the callable that gives it; None, and a misuse, where there is none."""
    if callable(given):
        try:
            given = given()
        except Exception as error:  # noqa: BLE001  # the user's callable
            report(call, "callable_raised", f"{field} to give a number, but it raised {shown(error)}")
            return None
    found = taken(given)
    if isinstance(found, float) and found.is_integer():
        found = int(found)  # 1e5, as a file of settings may say it
    if found is None or (isinstance(found, int) and not isinstance(found, bool)):
        return found
    report(call, field, f"{field} to be a whole number, not {shown(found)}"[:200])
    return None


def application_values() -> dict[str, Any]:
    """Give what the begin of an application tells, callables asked."""
    configured = current()
    if configured is None or not configured.enabled:
        return {}
    settings = configured.settings
    fields = ("world_size", "session_tag", "is_baseline_run")
    return {"settings": {name: settings.value(name) for name in fields}, "training": training_values()}


def training_values() -> dict[str, Any]:
    """Give all that the configuration of the training says now, callables asked."""
    return asked(*TRAINING_FIELDS)


def loop_values(
    call: str, start: object, samples: object, iterations_target: object, samples_target: object
) -> dict[str, Any]:
    """Give what the begin of a training loop tells, callables asked."""
    values = asked(*LOOP_FIELDS)
    for name, given in (
        ("train_iterations_target", iterations_target),
        ("train_samples_target", samples_target),
    ):
        if given is not None:
            values[name] = _target(given, call, name)
        else:
            values |= asked(name)
    return values | {"train_iterations_start": taken(start), "train_samples_start": taken(samples)}


def save_values(global_step: object) -> dict[str, Any]:
    """Give what the begin and the success of a save tell, callables asked."""
    return {
        "global_step": taken(global_step),
        "strategy": save_strategy(),
        **asked("is_save_checkpoint_enabled"),
    }


def save_strategy() -> CheckPointStrategy:
    """Tell whether a save is done when its span ends; so it is where nothing is configured."""
    configured = current()
    if configured is None or configured.training is None:
        return CheckPointStrategy.SYNC
    return configured.training.save_checkpoint_strategy


def _tell_event(span: Span, event: Event) -> None:
    say("add_event", span=span, event=event)
