"""Records: what the exporters of spans are told of what is open.

Used by the interpreter. A span that nobody wants is not made, unless the job asks for it or another that is wanted lies
inside it.
"""

from __future__ import annotations

from exporter.training.calls import Call, Ended
from exporter.training.delivery import Sink
from exporter.training.events import ErrorEvent, Event
from exporter.training.hot import Told
from exporter.training.kinds import CHECKPOINT_SAVE, Kind
from exporter.training.opened import Open
from exporter.training.spans import Span
from exporter.training.types import Attribute, Attributes, TracingTimestamp

_NOBODY = Sink(())


class Records:
    """The way to the exporters.

    Attributes:
        sink: Takes what they want.
        offset: Of the wall clock from the monotonic one, at present.
    """

    def __init__(self) -> None:
        self.sink = _NOBODY
        self.offset = 0.0
        self._wanted: dict[Kind, bool] = {}

    def send_to(self, sink: Sink | None) -> None:
        """Tell other exporters from now on."""
        self.sink = sink or _NOBODY
        self._wanted.clear()

    def wall(self, at: float) -> float:
        """Turn a monotonic time into Unix time."""
        return at + self.offset

    def moment(self, at: float) -> TracingTimestamp:
        """Give a monotonic time on both clocks."""
        return TracingTimestamp(at + self.offset, at)

    def wants(self, kind: Kind, span: Span | None = None) -> bool:
        """Whether the exporters take spans of a kind, or one span."""
        if span is not None and span.name_str != kind.name:
            return self.sink.wants(span.name)
        wanted = self._wanted.get(kind)
        if wanted is None:
            wanted = self._wanted[kind] = self.sink.wants(kind.name)
        return wanted

    def span(self, opened: Open) -> Span:
        """Give the span of what is open, made when somebody asks for it."""
        if opened.span is None:
            start = self.moment(opened.began)
            opened.span = Span.create(opened.kind.name, self.parent_span(opened), None, None, start)
        return opened.span

    def parent_span(self, opened: Open) -> Span | None:
        """Give the span around; what began before the configuration is none."""
        parent = opened.parent
        while parent is not None and parent.kind is CHECKPOINT_SAVE and parent.save is None:
            parent = parent.parent  # saves are switched off: nothing is told of it
        return None if parent is None or not parent.known else self.span(parent)

    def start(self, opened: Open) -> None:
        """Tell that a span has begun, if anybody wants it."""
        if opened.known and self.wants(opened.kind, opened.span):
            opened.recorded = True
            self.sink.start(self.span(opened))

    def event(self, opened: Open, event: Event) -> None:
        """Tell an event of what is open."""
        if not opened.known:
            return
        span = self.span(opened)
        span.keep(event)
        if opened.recorded:
            self.sink.event(span, event)

    def stop(self, opened: Open, at: float, mark: Ended | None = None) -> None:
        """Stop the span of what has ended, and tell it."""
        span = opened.span
        if span is None:
            return
        span.stop(None if mark is None else mark.attributes, self.moment(at) if mark is None else mark.at)
        if opened.recorded:
            self.sink.stop(span)

    def cut_short(self, opened: Open, at: float) -> None:
        """Stop a span that was open when the application ended, and tell that it is an error."""
        span = opened.span
        if span is None:
            return
        text = f"{span.name_str} was open when the application ended"
        error = ErrorEvent.create(text, timestamp=self.moment(at))
        span.keep(error)
        if opened.recorded:
            self.sink.error(span, error)
        self.stop(opened, at)

    def tell(self, opened: Open, told: Told) -> None:
        """Take what the job says of a short block."""
        span, item = self.span(opened), told.item
        if isinstance(item, Attribute):
            span.add_attribute(item.name, item.value)
        elif isinstance(item, Attributes):
            span.add_attributes(item)
        else:
            span.keep(item)
            if opened.recorded:
                self.sink.event(span, item)

    def pass_on(self, opened: Open, call: Call) -> None:
        """Tell an event or an error that the job has added to its span."""
        span, event = call.values["span"], call.values["event"]
        if not opened.recorded:
            return
        if isinstance(event, ErrorEvent):
            self.sink.error(span, event)
        else:
            self.sink.event(span, event)
