"""Calls: the marks that carry more than a time, and the spans that begin and end with them, on the job's threads.

A span that is rare (the application, a loop, a save, one with a name of the job's own) is made here, at once, so that the
job can change it. What the job passes is made plain here, so that the recording thread never runs the job's code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from time import monotonic, time
from typing import Any

from exporter.recording.recorder import RECORDER
from exporter.training import buffers
from exporter.training.attributes import AHEAD_SECONDS, Attributes, SpanName, TracingTimestamp, shown, taken
from exporter.training.buffers import MOST_OPEN, Hooks
from exporter.training.metrics import report
from exporter.training.progress import reason_of
from exporter.training.span_kinds import BEGAN, BEGIN, CALL, CHECKPOINT_SAVE, ENDED, Kind
from exporter.training.spans import Event, Span

LOOP_FIELDS = ("global_batch_size", "seq_length", "flops_per_sample", "is_log_throughput_enabled")
"""What every iteration of a loop needs of a configuration."""


@dataclass(slots=True, kw_only=True)
class Call:
    """A mark of something else than a block's begin or end: the function, what it was given, and the monotonic time."""

    name: str
    values: dict[str, Any]
    time: float = field(default_factory=monotonic)


@dataclass(slots=True, kw_only=True)
class Began(Call):
    """The begin of a rare span; `entered` as a block, else by a callback."""

    span: Span
    entered: bool


@dataclass(slots=True, kw_only=True)
class Ended(Call):
    """The end of a rare span, or of any by a callback that says when: `at` may be before the call.

    The span is None for the one of its kind that is open; an exception's `reason` to end the job is one of `END_REASONS`.
    """

    at: TracingTimestamp
    span: Span | None = None
    entered: bool = False
    failed: bool = False
    reason: str = ""
    attributes: Attributes | None = None


def moment_of(milliseconds: object, call: str) -> TracingTimestamp:
    """Turn an explicit time, in milliseconds since the epoch, into a moment; now where there is none, or far ahead."""
    wall, now = time(), monotonic()
    number = taken(milliseconds)
    try:
        at = float(number or 0) / 1000  # type: ignore[arg-type]  # anything may come
    except (TypeError, ValueError, OverflowError):
        at = -1.0
    if not isfinite(at) or at < 0:
        report(call, "time", f"milliseconds since the epoch, not {shown(milliseconds)}"[:200])
    if not 0 < at <= wall + AHEAD_SECONDS:
        at = wall
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
    """Begin a rare span, for a call of the job's that was given these values too; the parent is else the innermost open."""
    start = at or TracingTimestamp(time(), monotonic())
    name = kind.name if name is None else name
    span = Span.create(name, parent, span_attributes, start_event_attributes, start)
    place = buffers.here()
    if buffers.is_on():
        span.listener = tell_event
        _note(place, kind.code + BEGAN, Began(name=call, values=values or {}, span=span, entered=entered))
        if Hooks.gpu is not None:
            Hooks.gpu.begin(kind, asynchronous=(values or {}).get("strategy") == "async")
        place.opened.append(span)
        del place.opened[:-MOST_OPEN]
        Hooks.settle(buffers.here().buffer, False)  # nothing is failing
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
    place = buffers.here()
    if not buffers.is_on():
        if span is not None:
            span.stop(attributes, at)
        return
    if Hooks.gpu is not None:
        Hooks.gpu.end(kind)
    opened = place.opened
    for index in range(len(opened) - 1, -1, -1):
        if opened[index] is span or (span is None and opened[index].name == kind.name):
            del opened[index]
            break
    ended = Ended(
        name=call,
        values=values or {},
        at=at or TracingTimestamp(time(), monotonic()),
        span=span,
        entered=entered,
        failed=exception is not None,
        reason="" if exception is None else reason_of(exception),
        attributes=attributes,
    )
    _note(place, kind.code + ENDED, ended)
    Hooks.settle(buffers.here().buffer, exception is not None)
    if kind is CHECKPOINT_SAVE and exception is None:
        RECORDER.flush_soon()


def say(name: str, **values: Any) -> None:
    """Put the mark of any other call."""
    place = buffers.here()
    if buffers.is_on():
        _note(place, CALL, Call(name=name, values=values))
        Hooks.settle(buffers.here().buffer, False)  # nothing is failing


def note_time(kind: Kind, what: int) -> None:
    """Put the mark of a callback that says no time."""
    place = buffers.here()
    _note(place, kind.code + what, monotonic())
    if Hooks.gpu is not None:
        (Hooks.gpu.begin if what == BEGIN else Hooks.gpu.end)(kind)
    if buffers.limit < 0:
        Hooks.full(place.buffer, False)  # nothing is failing


def _note(place: Any, code: int, value: object) -> None:
    place.extend((code, value))
    if len(place.buffer.items) > buffers.limit >= 0:
        Hooks.full(place.buffer, False)  # nothing is failing


def tell_event(span: Span, event: Event) -> None:
    """Say that the job has added an event to a span."""
    say("add_event", span=span, event=event)


# What a configuration adds to a call ---------------------------------------------------------------------------


def loop_values(
    call: str, start: object, samples: object, iterations_target: object, samples_target: object
) -> dict[str, Any]:
    """Give what the begin of a training loop tells, callables asked."""
    values = Hooks.telemetry.ask(*LOOP_FIELDS)
    targets = {"train_iterations_target": iterations_target, "train_samples_target": samples_target}
    for name, given in targets.items():
        values |= Hooks.telemetry.ask(name) if given is None else {name: _target(given, call, name)}
    return values | {"train_iterations_start": taken(start), "train_samples_start": taken(samples)}


def _target(given: object, call: str, field_name: str) -> int | None:
    """Take a whole number, or ask the callable that gives it; None, and a misuse, where there is none."""
    if callable(given):
        try:
            given = given()
        except Exception as error:  # noqa: BLE001  # the user's callable
            report(call, "callable_raised", f"{field_name} to give a number, but it raised {shown(error)}")
            return None
    found = taken(given)
    if isinstance(found, float) and found.is_integer():
        found = int(found)  # 1e5, as a file of settings may say it
    if found is None or (isinstance(found, int) and not isinstance(found, bool)):
        return found
    report(call, field_name, f"{field_name} to be a whole number, not {shown(found)}"[:200])
    return None


def save_values(global_step: object) -> dict[str, Any]:
    """Give what the begin and the success of a save tell, callables asked."""
    asked = Hooks.telemetry.ask("is_save_checkpoint_enabled", "save_checkpoint_strategy")
    strategy = str(asked.pop("save_checkpoint_strategy", None) or "sync")
    return {"global_step": taken(global_step), "strategy": strategy, **asked}


def save_name(values: dict[str, Any]) -> str:
    """Name the span of a save."""
    return f"checkpoint_save_{values['strategy']}"
