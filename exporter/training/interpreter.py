"""The interpreter: from marks to open spans, and from their begins and ends to what they mean; none of the job's code runs.

Used by whoever holds the lock of `exporter.training.recording`. A call that cannot be meant so is counted, told once and
changes nothing; what follows it is right again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic_ns, time
from typing import Any

from exporter.recording.event_values import RawEvent, convert_data
from exporter.recording.events import EVENTS
from exporter.recording.identity import clean_text
from exporter.recording.notices import tell_once
from exporter.training import span_kinds as kinds
from exporter.training.attributes import name_of, shown
from exporter.training.buffers import SpanBuffer
from exporter.training.calls import Began, Call, Ended, tell_event
from exporter.training.job import Job, is_untold_save
from exporter.training.open_spans import OpenSpan, OpenSpans, SpanStack
from exporter.training.span_kinds import BEGAN, BEGIN, END, ENTER, FAIL, FIRST_CODE, FIRST_KIND, KINDS, Kind
from exporter.training.spans import DURATION, ErrorEvent, Span, Telemetry

MOST_NAME = 100
"""Characters of the label `span`."""
_ONE_OF_A_PROCESS = kinds.LOOPS | {kinds.APPLICATION}
_TOLD = frozenset({kinds.TRAINING_LOOP, kinds.TRAINING_ITERATION})


def time_of(code: int, value: Any) -> float | None:
    """Give the time of a mark; None for a number, which belongs to the mark before it."""
    if code >= FIRST_CODE:
        return value if code & 7 < BEGAN else value.time  # type: ignore[no-any-return]  # floats and calls
    return value.time if code == kinds.CALL else None


class Interpreter:
    """What is known of one process."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.open = OpenSpans()
        self.clock = job.clock
        self.now = job.clock.last  # the time of the latest mark
        self.trains = False  # whether the job has told of a phase, a step or a number
        self.traced = False  # a handler asks for spans by name: those of an iteration are in the stream too
        self._wanted: dict[Kind, bool] = {}

    # Marks -----------------------------------------------------------------------------------------------

    def take(self, buffer: SpanBuffer, items: Sequence[Any]) -> None:
        """Interpret marks of one buffer, codes and values in turn."""
        stack = self.open.stack_of(buffer)
        for place in range(0, len(items), 2):
            self._mark(stack, items[place], items[place + 1])

    def _mark(self, stack: SpanStack, code: int, value: Any) -> None:
        """Interpret one mark; a defect of ours costs this one, not those after it."""
        try:
            if code >= FIRST_CODE:
                kind, what = KINDS[(code >> 3) - FIRST_KIND], code & 7
                self.now = value if what < BEGAN else value.time
                if what == ENTER:
                    self._begin(stack, kind, value, kind.call, entered=True)
                elif ENTER < what <= FAIL:
                    self._leave(stack, kind, value, None, failed=what == FAIL)
                elif what == BEGIN:
                    self._begin(stack, kind, value, kind.begin, entered=False)
                elif what == END:
                    self._end_latest(stack, kind, value, None)
                elif what == BEGAN:
                    at = value.span.start_event.timestamp.perf_counter_seconds
                    self._begin(stack, kind, at, value.name, value, entered=value.entered)
                else:
                    self._ended(stack, kind, value)
            elif code >= kinds.NUMBERS:
                self.trains = True
                number = code - kinds.NUMBERS
                field, mode = kinds.FIELDS[number & 7], kinds.MODES[number >> 3]
                wrong = self.job.progress.number(field, mode, value)
                if wrong is not None:
                    self.job.wrong("record", field, f"{field} {wrong}, not {shown(value)}")
            elif code == kinds.VALUES:
                self.job.ask(value)
            else:
                self.now = value.time
                self._called(value)
        except Exception as error:  # noqa: BLE001  # see above
            tell_once(f"mark {error!r}", f"a defect in the recording of training: {error!r}")

    # Threads that end or lose marks ---------------------------------------------------------------------

    def forget(self, buffer: SpanBuffer) -> None:
        """Let go of a thread or task that has ended: nobody can tell any more when the blocks entered there end."""
        stack: SpanStack | None = buffer.state
        if stack is not None:
            for opened in reversed(stack.spans):
                kept = opened.over or opened.recorded or opened.kind in _ONE_OF_A_PROCESS
                if opened.entered and not kept:
                    self._discard(opened)
            self.open.forget(stack)

    def dropped(self, buffer: SpanBuffer, number: int) -> None:
        """Begin anew after marks were dropped: what was open in that thread may have ended."""
        self.job.wrong("marks", "dropped", f"fewer of them: {number} were dropped")
        stack = self.open.stack_of(buffer)
        for opened in reversed(stack.spans):
            if opened.kind.single and not opened.over and opened.kind not in _ONE_OF_A_PROCESS:
                self._discard(opened)
            opened.entered = False
        stack.spans = [opened for opened in stack.spans if not opened.over]

    def _discard(self, opened: OpenSpan) -> None:
        """Forget a span that nobody will end."""
        opened.refused = True
        opened.stack.close(opened)
        self.job.discarded(opened)
        self.clock.end(opened, self.now)
        if opened.logged:
            self._log_end(opened, self.now, None, ok=False)

    # Begins ----------------------------------------------------------------------------------------------

    def _begin(
        self, stack: SpanStack, kind: Kind, at: float, call: str, mark: Began | None = None, *, entered: bool
    ) -> None:
        """Begin a span, unless that cannot be meant so."""
        job = self.job
        if kind in _TOLD and not job.tells:
            self._take_over()
        opened = OpenSpan(kind, at, stack, known=job.telemetry.configured)
        opened.entered = entered
        if not self._allows(stack, kind, call, mark):
            if entered:
                opened.over = opened.refused = True
                stack.spans.append(opened)
            return
        self.open.begins_in(stack)
        opened.parent = stack.innermost()
        if mark is not None:
            opened.span = mark.span
            if mark.span.parent_span is None and opened.known:
                mark.span.parent_span = mark.span.exported_parent = self._parent_span(opened)
        elif opened.known and self._wants(kind):
            self.span_of(opened)
        stack.spans.append(opened)
        if stack.main:
            self._begin_phase(opened, mark)
        job.span_began(opened, mark)
        if opened.span is not None and opened.known and not (opened.save is None and is_untold_save(mark)):
            if self._wants(kind, opened.span):
                opened.recorded = True
                job.telemetry.span_began(opened.span)
            if mark is not None and kind is kinds.APPLICATION:
                job.application_began(opened, mark.values)
        if self.traced if mark is None else opened.save is not None or not is_untold_save(mark):
            self._log_begin(opened, mark)

    def _begin_phase(self, opened: OpenSpan, mark: Began | None) -> None:
        kind, phase = opened.kind, opened.kind.phase
        if kind in kinds.ITERATIONS or kind in kinds.LOOPS:
            self.clock.training_begins(self.now)
        if phase is not None:
            if kind is kinds.CHECKPOINT_SAVE and mark is not None:
                phase = f"checkpoint_save_{mark.values.get('strategy', 'sync')}"
            self.clock.begin(phase, opened, self.now)
            self.trains = True

    def _allows(self, stack: SpanStack, kind: Kind, call: str, mark: Began | None) -> bool:
        """Tell whether a span can begin; if not, the misuse is counted."""
        job, earlier = self.job, None
        if kind.guessed and (job.tells or (kind is kinds.GUESSED_LOOP and job.open_loop is not None)):
            return False
        if kind.single:
            earlier = stack.latest(kind)
            if earlier is None and kind in _ONE_OF_A_PROCESS:
                earlier = self.open.find(kind)
        if kind is kinds.CHECKPOINT_SAVE and is_untold_save(mark):
            return earlier is None and not job.closed
        if earlier is not None:
            if not job.telemetry.configured or earlier.known:
                job.rule(call, kind.rule, f"the {kind.call} that is open to end before")
                return False
            self._discard(earlier)
        if job.closed and kind is not kinds.APPLICATION and job.telemetry.configured:
            job.rule(call, "S12", "on_app_start before it, since the application has ended")
            return False
        refusal = None if mark is None else job.refusal(kind, mark.values)
        if refusal is not None:
            job.wrong(call, *refusal)
        return refusal is None

    def _take_over(self) -> None:
        """Have what the job tells itself take the place of what a bridge has guessed."""
        self.job.tells = True
        for opened in reversed(self.open.all()):
            if opened.kind.guessed:
                self._discard(opened)

    # Ends ------------------------------------------------------------------------------------------------

    def _leave(self, stack: SpanStack, kind: Kind, at: float, mark: Ended | None, *, failed: bool) -> None:
        """End what a block has begun, which is the innermost of its kind that was entered."""
        for opened in reversed(stack.spans):
            if opened.kind is kind and opened.entered:
                break
        else:
            return  # its begin was lost, or belongs to the time before a fork
        over = opened.over
        stack.close(opened, left=True)
        if not over:
            self._end(opened, at, mark, failed=failed)
        elif opened.known and not opened.refused:
            self.job.rule(kind.call, kind.end_rule, "to be ended once")

    def _ended(self, stack: SpanStack, kind: Kind, mark: Ended) -> None:
        at = mark.at.perf_counter_seconds
        if mark.entered:
            self._leave(stack, kind, at, mark, failed=mark.failed)
        elif mark.span is None:
            self._end_latest(stack, kind, at, mark)
        else:
            found = self.open.open_of(mark.span)
            if found is None:
                self.job.rule(mark.name, "S5", f"a span that is open, not {mark.span.name_str}")
            else:
                found.stack.close(found)
                self._end(found, at, mark)

    def _end_latest(self, stack: SpanStack, kind: Kind, at: float, mark: Ended | None) -> None:
        """End the span of a kind that is open, in this thread or else in another."""
        opened = stack.latest(kind) or self.open.find(kind)
        if opened is None and kind is kinds.TRAINING_LOOP:
            opened = self.open.find(kinds.GUESSED_LOOP)
        if opened is not None:
            opened.stack.close(opened)
            self._end(opened, at, mark)
        elif not is_untold_save(mark):
            self.job.rule(kind.end if mark is None else mark.name, kind.end_rule, f"{kind.begin} before it")

    def _end(self, opened: OpenSpan, at: float, mark: Ended | None, *, failed: bool = False) -> None:
        """Take the end of a span that was closed."""
        if opened.phase is not None:
            self.clock.end(opened, self.now)
        elif opened.kind in kinds.ITERATIONS:
            self.clock.advance(self.now)
        if opened.kind is kinds.APPLICATION:
            self._end_application(at, mark)
        else:
            self.job.span_ended(opened, at, mark, failed=failed)
        self._stop(opened, at, mark, ok=not failed and not (mark is not None and mark.failed))

    def _stop(self, opened: OpenSpan, at: float, mark: Ended | None = None, *, ok: bool) -> None:
        """Stop the span of what has ended, and tell it."""
        if opened.span is not None:
            attributes = None if mark is None else mark.attributes
            opened.span.stop(attributes, self.job.moment(at) if mark is None else mark.at)
            if opened.recorded:
                self.job.telemetry.span_ended(opened.span)
        if opened.logged:
            self._log_end(opened, at, mark, ok=ok)

    def _end_application(self, at: float, mark: Ended | None) -> None:
        """End what is open when the application ends, the innermost first."""
        job = self.job
        job.progress.count_expected()
        in_order = job.open_loop is None
        for opened in reversed(self.open.all()):
            if opened.kind is kinds.APPLICATION or not opened.known:
                continue
            opened.stack.close(opened)
            self.clock.end(opened, self.now)
            job.cut_short(opened)
            if opened.span is not None:
                text = (
                    f"Timer for span {opened.span.name_str} was automatically stopped: the application ended, so"
                    " the span is being stopped, and its on_xxx_end method was not called correctly"
                )
                error = ErrorEvent.create(text, timestamp=job.moment(at))
                opened.span.keep(error)
                if opened.recorded:
                    job.telemetry.span_error(opened.span, error)
                self._stop(opened, at, ok=False)
        job.application_ended(mark, in_order=in_order)

    # The event stream --------------------------------------------------------------------------------------

    def _log_begin(self, opened: OpenSpan, mark: Began | None) -> None:
        """Log that a span begins, and of an application or a loop what is known of the training."""
        parent = opened.parent
        while parent is not None and not parent.logged:
            parent = parent.parent
        opened.logged = True
        attributes = self.span_of(opened).attributes.to_json()
        around = None if parent is None else str(self.span_of(parent).id)
        self._log("span.start", opened, opened.began, attributes | {"parent": around})
        if mark is not None and opened.kind in _ONE_OF_A_PROCESS:
            self._log("training.begin", opened, opened.began, self.job.parameters(mark.values))

    def _log_end(self, opened: OpenSpan, at: float, mark: Ended | None, *, ok: bool) -> None:
        """Log that a span ends, and count it where no family of phases does."""
        job, span, seconds = self.job, self.span_of(opened), max(at - opened.began, 0.0)
        if opened.kind.phase is None:
            name = clean_text(span.name_str)[:MOST_NAME]
            job.families.summary("training.span_duration", span=name or kinds.OTHER).observe(seconds)
        told: dict[str, Any] = {"seconds": seconds, "ok": ok}
        attributes = {name: each.value for name, each in list(span.updated_attributes.items())}
        attributes.pop(DURATION, None)
        self._log("span.stop", opened, at, attributes | told)
        if opened.kind in _ONE_OF_A_PROCESS:
            step = None if job.loop is None else job.loop.completed
            reason = (None if mark is None else mark.reason) or job.failure or None
            told |= {"reason": reason, "step": step, "steps": job.progress.steps}
            self._log("training.end", opened, at, told)

    def _log(self, type: str, opened: OpenSpan, at: float, data: Mapping[str, Any]) -> None:
        kind = EVENTS.kind(type, "info")
        if kind.enabled:
            span, wall = self.span_of(opened), at + self.job.offset
            told = convert_data({**data, "name": span.name_str}, lambda _name: None)
            raw = RawEvent(type, None, "info", told, wall, time(), monotonic_ns(), str(span.id))
            EVENTS.record(kind, raw, wall)

    # Spans -----------------------------------------------------------------------------------------------

    def _wants(self, kind: Kind, span: Span | None = None) -> bool:
        """Tell whether spans of a kind, or one span, are exported."""
        if span is not None and span.name_str != kind.name:
            return self.job.telemetry.wants(span.name_str)
        wanted = self._wanted.get(kind)
        if wanted is None:
            wanted = self._wanted[kind] = self.job.telemetry.wants(name_of(kind.name))
        return wanted

    def span_of(self, opened: OpenSpan) -> Span:
        """Give the span of what is open, made when somebody asks for it."""
        if opened.span is None:
            start = self.job.moment(opened.began)
            opened.span = Span.create(opened.kind.name, self._parent_span(opened), None, None, start)
            opened.span.listener = tell_event
        return opened.span

    def _parent_span(self, opened: OpenSpan) -> Span | None:
        """Give the span around; what began before the configuration is none."""
        parent = opened.parent
        while parent is not None and parent.kind is kinds.CHECKPOINT_SAVE and parent.save is None:
            parent = parent.parent  # saves are switched off: nothing is told of it
        return None if parent is None or not parent.known else self.span_of(parent)

    # What else happens -----------------------------------------------------------------------------------

    def _called(self, call: Call) -> None:
        values, job = call.values, self.job
        if call.name in {"add_event", "span_error"}:
            opened = self.open.open_of(values["span"])
            tell = job.telemetry.span_event if call.name == "add_event" else job.telemetry.span_error
            if opened is None:
                job.rule(call.name, "stopped_span", "a span that is open")
            elif opened.recorded:
                tell(values["span"], values["event"])
        elif call.name == "discard_iteration":
            found = self.open.find(kinds.GUESSED_ITERATION) or self.open.find(kinds.TRAINING_ITERATION)
            if found is not None:
                self._discard(found)
        elif call.name == "configured":
            self.configure(values["telemetry"])
        elif call.name == "set_training_telemetry_config":
            application = self.open.find(kinds.APPLICATION)
            if application is not None and application.known:
                job.training_configured(application, values["training"])
        elif call.name == "on_save_checkpoint_success":
            self._save_succeeded(call)
        else:
            if call.name == "step" and values["mode"] == "train":
                self.trains = True
                if not job.tells and job.iteration is None:  # else the step is that of the guessed iteration
                    self._take_over()
            job.called(call)

    def configure(self, telemetry: Telemetry) -> None:
        """Take what the job has configured."""
        self.job.telemetry = telemetry
        telemetry.now = lambda: self.job.moment(self.now)
        self._wanted.clear()

    def _save_succeeded(self, call: Call) -> None:
        """Take the job's word that a save is safe."""
        if is_untold_save(call):
            return
        asynchronous = call.values["strategy"] == "async"
        holder = self.open.find(kinds.APPLICATION if asynchronous else kinds.CHECKPOINT_SAVE)
        if self.job.telemetry.configured and (holder is None or not holder.known):
            what = "the application to run" if asynchronous else "on_save_checkpoint_start before it"
            self.job.rule(call.name, "S5", what)
        else:
            self.job.save_succeeded(call.values["global_step"], holder, call.values["at"], call.name)
