"""The interpreter: from marks to spans, phases, figures and families.

Used by whoever holds the lock of `exporter.training.recording`: the recording thread, mostly. It runs no code of the job's.
Each thread and task has a stack of blocks and a list of open spans; an application, its loop and its saves are the
process's. A call that cannot be meant so is counted, told once and changes nothing; what follows it is right again.
"""

from __future__ import annotations

from math import inf
from time import perf_counter

from exporter.recording.marks import Track
from exporter.recording.notices import tell_once
from exporter.training import kinds
from exporter.training.calls import Began, Call, Ended
from exporter.training.events import ErrorEvent, Event
from exporter.training.hot import Told
from exporter.training.job import Job
from exporter.training.kinds import (
    BEGAN,
    BEGIN,
    CALL,
    ENDED,
    ENTER,
    FAIL,
    FIELDS,
    FIRST_KIND,
    KINDS,
    MODES,
    NUMBERS,
    TOLD,
    VALUES,
    Kind,
)
from exporter.training.opened import Open, Stack
from exporter.training.phases import PhaseClock
from exporter.training.runs import BEGIN_CODE, Plan, Runs
from exporter.training.spans import Span
from exporter.training.types import Attribute, Attributes, TracingTimestamp, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from exporter.training.misuse import Misuse
    from exporter.training.provider import Configured

FIRST_CODE = FIRST_KIND * 8
AT_ONCE = 32
"""Marks interpreted between two looks at the clock."""


def time_of(code: int, value: Any) -> float | None:
    """Give the time of a mark; None for a number, which belongs to the mark before it."""
    if code >= FIRST_CODE:
        return value if code & 7 < BEGAN else value.time  # type: ignore[no-any-return]  # floats and calls
    return value.time if code == CALL else None


class Interpreter:
    """What is known of one process.

    Args:
        job: What the marks are about.
        clock: The phases of the main thread.
        misuse: Takes what cannot be meant so.

    Attributes:
        main_thread: The thread that made the first mark; its time is what phases divide.
        now: Time of the latest mark.
        offset: Of the wall clock from the monotonic one, at present.
        started: Whether any mark was interpreted.
    """

    def __init__(self, job: Job, clock: PhaseClock, misuse: Misuse) -> None:
        self.job = job
        self.clock = clock
        self.misuse = misuse
        self.main_thread: int | None = None
        self.offset = 0.0
        self.started = False
        self._stacks: list[Stack] = []
        self._wanted: dict[Kind, bool] = {}
        self._runs = Runs(self)
        self.now = clock.last
        self._numbers_of: dict[int, tuple[str, str]] = {
            NUMBERS + 8 * row + place: (field, mode)
            for row, mode in enumerate(MODES)
            for place, field in enumerate(FIELDS)
        }

    def configure(self, configured: Configured | None) -> None:
        """Take what the job has configured."""
        self._wanted.clear()
        self.job.configured = configured

    def reset(self, now: float) -> None:
        """Count from zero from now on; what is open stays open."""
        self.job.reset()
        self.clock.restart(now)

    # Marks -----------------------------------------------------------------------------------------------

    def take(self, track: Track, items: list[Any], seconds: float = inf) -> int:
        """Interpret the marks of one track.

        Args:
            track: Whose.
            items: Codes and values in turn.
            seconds: After so long the rest is left.

        Returns:
            How many items were interpreted.
        """
        stack = self.stack_of(track)
        try:
            codes = bytes(items[::2])
        except ValueError:  # kinds beyond the first few of the job's own
            codes = b""
        position, total, until = 0, len(items) // 2, perf_counter() + seconds
        while position < total:
            if codes and codes[position] == BEGIN_CODE and kinds.TRAINING_ITERATION not in stack.single:
                taken = self._runs.take(stack, items, codes, position)
                if taken:
                    position += taken
                    if perf_counter() > until:
                        break
                    continue
            end = codes.find(BEGIN_CODE, position + 1)
            end = min(position + AT_ONCE if end < 0 else end, position + AT_ONCE, total)
            for place in range(2 * position, 2 * end, 2):
                self._safely(stack, items[place], items[place + 1])
            position = end
            if perf_counter() > until:
                break
        return 2 * position

    def take_one(self, track: Track, code: int, value: Any) -> None:
        """Interpret one mark of a track."""
        self._safely(self.stack_of(track), code, value)

    def _safely(self, stack: Stack, code: int, value: Any) -> None:
        """Interpret one mark; a defect of ours costs this one, not those after it."""
        try:
            self.mark(stack, code, value)
        except Exception as error:  # noqa: BLE001  # see above
            tell_once(f"mark {error!r}", f"a defect in the recording of training: {error!r}")

    def fold(
        self,
        plan: Plan,
        durations: list[list[float]],
        began: float,
        ended: float,
        finished: list[float],
    ) -> None:
        """Take iterations that look alike.

        Args:
            plan: What their marks mean.
            durations: Of each block of the plan, in each of them.
            began: When the first began.
            ended: When what belongs to the last ended.
            finished: When each ended.
        """
        self.now = ended
        # Blocks outside the iteration may be longer than it.
        longest = max(map(max, durations)) if plan.last > plan.end else max(durations[0])
        work = self.clock.fold(plan, durations, began, ended, longest)
        waits = [
            times
            for block, times in zip(plan.blocks, durations, strict=True)
            if block.phase in kinds.WAITS and block.enter < plan.end
        ]
        self.job.looping.fold(durations[0], waits, work, finished, self)

    def stack_of(self, track: Track) -> Stack:
        """Give the open spans of a track."""
        stack: Stack | None = track.state
        if stack is None:
            if self.main_thread is None:
                self.main_thread = track.thread
            parent = None if track.parent is None else self.stack_of(track.parent)
            stack = track.state = Stack(parent, main=track.thread == self.main_thread)
            self._stacks.append(stack)
            self.started = True
        return stack

    def forget(self, track: Track) -> None:
        """Let go of a track whose thread has ended, once nothing is open in it."""
        stack = track.state
        if stack is not None and not stack.opens and stack in self._stacks:
            self._stacks.remove(stack)

    def mark(self, stack: Stack, code: int, value: Any) -> None:
        """Interpret one mark."""
        if code >= FIRST_CODE:
            kind = KINDS[(code >> 3) - FIRST_KIND]
            what = code & 7
            if what < BEGAN:
                self.now = value
                if what == ENTER:
                    stack.blocks.append((kind, self._begin(stack, kind, value, kind.call)))
                elif what == BEGIN:
                    self._begin(stack, kind, value, kind.begin)
                elif what > ENTER:
                    self._leave(stack, kind, value, None, failed=what == FAIL)
                else:
                    self._end_named(stack, kind, value, None)
            elif what == BEGAN:
                self._began(stack, kind, value)
            elif what == ENDED:
                self._ended(stack, kind, value)
            elif what == TOLD:
                self._told(stack, kind, value)
        elif code >= NUMBERS:
            field, mode = self._numbers_of[code]
            wrong = self.job.progress.number(field, mode, value)
            if wrong is not None:
                self.misuse.count("record", field, f"{field} {wrong}, not {shown(value)}"[:200])
        elif code == VALUES:
            self.job.ask(value)
        elif code == CALL:
            self.now = value.time
            self._called(value)

    def _began(self, stack: Stack, kind: Kind, mark: Began) -> None:
        self.now = mark.time
        opened = self._begin(stack, kind, mark.at.perf_counter_seconds, mark.name, mark)
        if mark.entered:
            stack.blocks.append((kind, opened))

    def _ended(self, stack: Stack, kind: Kind, mark: Ended) -> None:
        self.now = mark.time
        at = mark.at.perf_counter_seconds
        if mark.span is not None and not mark.entered:
            found = self.open_of(mark.span)
            if found is None:
                self.job.rule(mark.name, "S5", f"a span that is open, not {mark.span.name_str}")
            else:
                self._end(found[0], found[1], at, mark)
        elif mark.entered:
            self._leave(stack, kind, at, mark, failed=mark.failure is not None)
        else:
            self._end_named(stack, kind, at, mark)

    def _leave(self, stack: Stack, kind: Kind, at: float, mark: Ended | None, *, failed: bool) -> None:
        """End what a block has begun, which is the innermost of its kind that was entered."""
        blocks = stack.blocks
        for position in range(len(blocks) - 1, -1, -1):
            if blocks[position][0] is kind:
                opened = blocks.pop(position)[1]
                break
        else:
            return  # its begin was lost, or belongs to the time before a fork
        if opened is None:
            return  # it was refused when it began
        if opened.closed:
            if opened.known:
                self.job.rule(kind.call, kind.end_rule, "to be ended once")
            return
        self._end(stack, opened, at, mark, failed=failed)

    def _end_named(self, stack: Stack, kind: Kind, at: float, mark: Ended | None) -> None:
        """End the span of a kind that is open, in this thread or else in another."""
        opened, owner = stack.latest(kind), stack
        if opened is None:
            for other in self._stacks:
                opened = other.latest(kind)
                if opened is not None:
                    owner = other
                    break
        if opened is None:
            call = kind.end if mark is None else mark.name
            self.job.rule(call, kind.end_rule, f"{kind.begin} before it")
            return
        self._end(owner, opened, at, mark)

    def _begin(
        self, stack: Stack, kind: Kind, at: float, call: str, mark: Began | None = None
    ) -> Open | None:
        """Begin a span, unless that cannot be meant so."""
        job = self.job
        earlier = stack.single.get(kind) if kind.single else None
        if earlier is None and kind in _ONE_OF_A_PROCESS:
            earlier = self._anywhere(kind)
        if earlier is not None:
            if not job.tells or earlier.known:
                job.rule(call, kind.rule, f"the {kind.call} that is open to end before")
                return None
            self._discard(earlier)
        if job.closed and kind is not kinds.APPLICATION and job.tells:
            job.rule(call, "S12", "on_app_start before it, since the application has ended")
            return None
        if mark is not None:
            refusal = job.refusal(mark, kind)
            if refusal is not None:
                job.wrong(call, *refusal)
                return None
        opened = Open(kind, at, stack, known=job.tells)
        opened.parent = stack.innermost()
        if mark is not None:
            opened.span = mark.span
            if mark.span.parent_span is None and opened.known:
                mark.span.set_parent(self._parent_span(opened))
        elif job.tells and self.wants(kind):
            opened.span = self._span(opened)
        stack.add(opened)
        self._begin_phase(stack, opened, mark)
        job.begins(opened, mark, self)
        return opened

    def _span(self, opened: Open) -> Span:
        """Give the span of what is open, made when somebody asks for it."""
        if opened.span is None:
            start = TracingTimestamp(opened.began + self.offset, opened.began)
            opened.span = Span.create(opened.kind.name, self._parent_span(opened), None, None, start)
        return opened.span

    def _parent_span(self, opened: Open) -> Span | None:
        """Give the span around; what began before the configuration is none."""
        parent = opened.parent
        return None if parent is None or not parent.known else self._span(parent)

    def _begin_phase(self, stack: Stack, opened: Open, mark: Began | None) -> None:
        if not stack.main:
            return
        if opened.kind is kinds.TRAINING_ITERATION or opened.kind is kinds.TRAINING_LOOP:
            self.clock.training_begins(self.now)
        phase = self.job.phase_of(opened, mark)
        if phase is not None:
            opened.entry = self.clock.begin(phase, self.now)
        if opened.kind is kinds.TRAINING_ITERATION:
            opened.work = self.clock.work
            opened.waits = self.clock.waits

    def _end(
        self, stack: Stack, opened: Open, at: float, mark: Ended | None, *, failed: bool = False
    ) -> None:
        """End a span."""
        stack.remove(opened)
        if opened.entry is not None:
            self.clock.end(opened.entry, self.now)
        elif opened.work is not None:
            self.clock.advance(self.now)
        self.job.ends(opened, at, mark, self, failed=failed)
        self.stop(opened, at, mark)

    def stop(self, opened: Open, at: float, mark: Ended | None = None) -> None:
        """Stop the span of what has ended, and tell it."""
        span = opened.span
        if span is None:
            return
        attributes = None if mark is None else mark.attributes
        when = TracingTimestamp(at + self.offset, at) if mark is None else mark.at
        span.stop(attributes, when)
        if opened.recorded:
            self.job.sink.stop(span)

    # What else happens -----------------------------------------------------------------------------------

    def _called(self, call: Call) -> None:
        if call.name in {"add_event", "span_event", "span_error"}:
            self._tell_event(call)
        elif call.name == "configured":
            self.configure(call.values["configured"])
        else:
            self.job.called(call, self)

    def _tell_event(self, call: Call) -> None:
        span, event = call.values["span"], call.values["event"]
        found = self.open_of(span)
        if found is None or not found[1].recorded:
            if found is None and self.job.tells:
                self.job.rule(call.name, "stopped_span", "a span that is open")
            return
        if isinstance(event, ErrorEvent):
            self.job.sink.error(span, event)
        else:
            self.job.sink.event(span, event)

    def _told(self, stack: Stack, kind: Kind, told: Told) -> None:
        """Take what the job says of a short block."""
        opened = stack.latest(kind)
        if opened is None:
            self.job.rule(kind.call, "stopped_span", "attributes and events while it is open")
            return
        span, item = self._span(opened), told.item
        if isinstance(item, Attribute):
            span.add_attribute(item.name, item.value)
        elif isinstance(item, Attributes):
            span.add_attributes(item)
        else:
            span.keep(item)
            if opened.recorded:
                self.job.sink.event(span, item)

    def dropped(self, track: Track, number: int) -> None:
        """Begin anew after marks were dropped: what was open in that thread may have ended."""
        self.misuse.count("marks", "dropped", f"fewer of them: {number} were dropped")
        stack = self.stack_of(track)
        for opened in reversed([each for each in stack.opens if each.kind.single]):
            if opened.kind not in _ONE_OF_A_PROCESS:
                self._discard(opened)
        stack.blocks.clear()

    def _discard(self, opened: Open) -> None:
        """Forget a span that nobody will end."""
        opened.stack.remove(opened)
        if opened.entry is not None:
            self.clock.end(opened.entry, self.now)

    # The tree --------------------------------------------------------------------------------------------

    def record(self, opened: Open) -> None:
        """Tell the exporters that a span has begun, if anybody wants it."""
        if opened.known and self.wants(opened.kind, opened.span):
            opened.recorded = True
            self.job.sink.start(self._span(opened))

    def event(self, opened: Open, event: Event) -> None:
        """Tell an event of what is open."""
        if not opened.known:
            return
        span = self._span(opened)
        span.keep(event)
        if opened.recorded:
            self.job.sink.event(span, event)

    def moment(self) -> TracingTimestamp:
        """Give the time of the present mark."""
        return TracingTimestamp(self.now + self.offset, self.now)

    def wall(self, at: float) -> float:
        """Turn a monotonic time into Unix time."""
        return at + self.offset

    def find(self, kind: Kind, stack: Stack | None = None) -> Open | None:
        """Give the open span of a kind, of a thread first."""
        found = None if stack is None else stack.latest(kind)
        return found or self._anywhere(kind)

    def open_spans(self) -> list[Open]:
        """Give all that is open, in the order of its begins."""
        return sorted((opened for stack in self._stacks for opened in stack.opens), key=_order_of)

    def open_of(self, span: Span) -> tuple[Stack, Open] | None:
        """Find a span that is open."""
        for stack in self._stacks:
            for opened in stack.opens:
                if opened.span is span:
                    return stack, opened
        return None

    def span_of(self, track: Track, kind: Kind) -> Span | None:
        """Give the span of the innermost open block of a kind."""
        opened = None if track.state is None else track.state.latest(kind)
        return None if opened is None else self._span(opened)

    def close_all(self, at: float) -> None:
        """End what is open when the application ends, the innermost first; of an iteration, nothing is counted."""
        for opened in reversed(self.open_spans()):
            if opened.kind is kinds.APPLICATION or not opened.known:
                continue
            opened.stack.remove(opened)
            if opened.entry is not None:
                self.clock.end(opened.entry, self.now)
            self.job.cut_short(opened, self)
            if opened.span is not None:
                text = f"{opened.span.name_str} was open when the application ended"
                error = ErrorEvent.create(text, timestamp=TracingTimestamp(at + self.offset, at))
                opened.span.keep(error)
                if opened.recorded:
                    self.job.sink.error(opened.span, error)
                self.stop(opened, at)

    def _anywhere(self, kind: Kind) -> Open | None:
        for stack in self._stacks:
            found = stack.latest(kind)
            if found is not None:
                return found
        return None

    def wants(self, kind: Kind, span: Span | None = None) -> bool:
        """Whether the exporters take spans of a kind, or one span."""
        if span is not None and span.name != kind.name:
            return self.job.sink.wants(span.name)
        wanted = self._wanted.get(kind)
        if wanted is None:
            wanted = self._wanted[kind] = self.job.sink.wants(kind.name)
        return wanted


_ONE_OF_A_PROCESS = frozenset({kinds.APPLICATION, kinds.TRAINING_LOOP})


def _order_of(opened: Open) -> int:
    return opened.number
