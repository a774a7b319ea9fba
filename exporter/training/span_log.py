"""Events about spans, for event handlers: `span.start`, `span.stop`, `training.begin` and `training.end`."""

from __future__ import annotations

from exporter.recording.conversion import AttributeValue, to_number
from exporter.training.attributes import TracingTimestamp
from exporter.training.observer import ObservedBlock
from exporter.training.recorder import TRAINING
from exporter.training.records import SpanLogged
from exporter.training.spans import DURATION


def log_begin(block: ObservedBlock, *, with_parameters: bool) -> None:
    """Log the start of a span. *with_parameters* adds the event `training.begin` with the parameters of the run."""
    span, start_time = block.span, block.began.seconds_since_epoch
    parent = None if span.parent_span is None else str(span.parent_span.id)
    data: dict[str, AttributeValue | None] = dict(span.attributes.to_json())
    _log("span.start", block, data | {"parent": parent}, start_time)
    if with_parameters:
        values: dict[str, AttributeValue | None] = {}
        for name, value in block.values.items():
            values[name] = to_number(value)
        _log("training.begin", block, values, start_time, parameters=True)


def log_end(
    block: ObservedBlock, timestamp: TracingTimestamp, *, ok: bool, reason: str | None, with_parameters: bool
) -> None:
    """Log the stop of a span. *with_parameters* adds the event `training.end` with the result of the run."""
    seconds = max(timestamp.perf_counter_seconds - block.began.perf_counter_seconds, 0.0)
    result: dict[str, AttributeValue | None] = {"seconds": seconds, "ok": ok}
    attributes = block.span.updated_attributes.to_json()
    attributes.pop(DURATION, None)
    _log("span.stop", block, attributes | result, timestamp.seconds_since_epoch)
    if with_parameters:
        _log("training.end", block, result, timestamp.seconds_since_epoch, parameters=True, reason=reason)


def _log(
    type: str,
    block: ObservedBlock,
    data: dict[str, AttributeValue | None],
    unix_seconds: float,
    *,
    parameters: bool = False,
    reason: str | None = None,
) -> None:
    span = block.span
    TRAINING.append(SpanLogged(type, str(span.id), span.name_str, data, unix_seconds, parameters, reason))
