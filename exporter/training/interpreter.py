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
from exporter.training.events import Event
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
from exporter.training.names import StandardTrainingJobEventName
from exporter.training.opened import Open, Stack
from exporter.training.phase_clock import PhaseClock
from exporter.training.phases import PHASES
from exporter.training.records import Records
from exporter.training.runs import BEGIN_CODE, Plan, Runs
from exporter.training.saving import is_untold_save
from exporter.training.tree import Tree
from exporter.training.types import Attributes, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from exporter.training.misuse import Misuse
    from exporter.training.provider import Configured

FIRST_CODE = FIRST_KIND * 8
AT_ONCE = 32
"""Marks interpreted between two looks at the clock."""
MOST_REFUSED = 1000
"""Begins that are refused inside one open span of their kind, which nobody will end then."""


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
        tree: What is open.
        records: The way to the exporters.
        now: Time of the latest mark.
    """

    def __init__(self, job: Job, clock: PhaseClock, misuse: Misuse) -> None:
        self.job = job
        self.clock = clock
        self.misuse = misuse
        self.tree = Tree()
        self.records = Records()
        self._runs = Runs(self)
        self.now = clock.last
        self._numbers_of: dict[int, tuple[str, str]] = {
            NUMBERS + 8 * row + place: (field, mode)
            for row, mode in enumerate(MODES)
            for place, field in enumerate(FIELDS)
        }

    def configure(self, configured: Configured | None) -> None:
        """Take what the job has configured."""
        self.records.send_to(None if configured is None else configured.sink)
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
        stack = self.tree.stack_of(track)
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
        self._safely(self.tree.stack_of(track), code, value)

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
            if PHASES[block.phase].waiting and block.enter < plan.end
        ]
        self.job.looping.fold(durations[0], waits, work, finished, self)

    def mark(self, stack: Stack, code: int, value: Any) -> None:
        """Interpret one mark."""
        if code >= FIRST_CODE:
            kind = KINDS[(code >> 3) - FIRST_KIND]
            what = code & 7
            if what < BEGAN:
                self.now = value
                if what == ENTER:
                    self._begin(stack, kind, value, kind.call, entered=True)
                elif what == BEGIN:
                    self._begin(stack, kind, value, kind.begin, entered=False)
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
        self._begin(stack, kind, mark.at.perf_counter_seconds, mark.name, mark, entered=mark.entered)

    def _ended(self, stack: Stack, kind: Kind, mark: Ended) -> None:
        self.now = mark.time
        at = mark.at.perf_counter_seconds
        if mark.span is not None and not mark.entered:
            found = self.tree.open_of(mark.span)
            if found is None:
                self.job.rule(mark.name, "S5", f"a span that is open, not {mark.span.name_str}")
            else:
                self._end(found, at, mark)
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
        self._end(opened, at, mark, failed=failed)

    def _end_named(self, stack: Stack, kind: Kind, at: float, mark: Ended | None) -> None:
        """End the span of a kind that is open, in this thread or else in another."""
        opened = stack.latest(kind) or self.tree.find(kind)
        if opened is None:
            if is_untold_save(mark):
                return
            call = kind.end if mark is None else mark.name
            self.job.rule(call, kind.end_rule, f"{kind.begin} before it")
            return
        self._end(opened, at, mark)

    def _begin(
        self, stack: Stack, kind: Kind, at: float, call: str, mark: Began | None = None, *, entered: bool
    ) -> None:
        """Begin a span, unless that cannot be meant so."""
        allowed = self._allow(stack, kind, call, mark)
        opened = Open(kind, at, stack, known=self.job.tells) if allowed else None
        if entered:
            stack.blocks.append((kind, opened))
        if opened is None:
            return
        self.tree.begins_in(stack)
        opened.parent = stack.innermost()
        if mark is not None:
            opened.span = mark.span
            if mark.span.parent_span is None and opened.known:
                mark.span.set_parent(self.records.parent_span(opened))
        elif opened.known and self.records.wants(kind):
            self.records.span(opened)
        stack.add(opened)
        self._begin_phase(stack, opened, mark)
        self.job.begins(opened, mark, self)

    def _allow(self, stack: Stack, kind: Kind, call: str, mark: Began | None) -> bool:
        """Whether a span can begin; if not, the misuse is counted."""
        job = self.job
        earlier = stack.single.get(kind) if kind.single else None
        if earlier is None and kind in _ONE_OF_A_PROCESS:
            earlier = self.tree.find(kind)
        if kind is kinds.CHECKPOINT_SAVE and is_untold_save(mark):
            return earlier is None and not job.closed
        if earlier is not None:
            if not job.tells or earlier.known:
                job.rule(call, kind.rule, f"the {kind.call} that is open to end before")
                earlier.refused += 1
                if kind in _ONE_OF_A_PROCESS or earlier.refused < MOST_REFUSED:
                    return False
            self._discard(earlier)
        if job.closed and kind is not kinds.APPLICATION and job.tells:
            job.rule(call, "S12", "on_app_start before it, since the application has ended")
            return False
        refusal = None if mark is None else job.refusal(mark, kind)
        if refusal is not None:
            job.wrong(call, *refusal)
        return refusal is None

    def _begin_phase(self, stack: Stack, opened: Open, mark: Began | None) -> None:
        if not stack.main:
            return
        if opened.kind is kinds.TRAINING_ITERATION or opened.kind is kinds.TRAINING_LOOP:
            self.clock.training_begins(self.now)
        phase = self.job.phase_of(opened, mark)
        if phase is not None:
            opened.entry = self.clock.begin(phase, self.now)
        if opened.kind is kinds.TRAINING_ITERATION and self.job.looping.iteration is None:
            opened.work = self.clock.work
            opened.waits = self.clock.waits

    def _end(self, opened: Open, at: float, mark: Ended | None, *, failed: bool = False) -> None:
        """End a span."""
        opened.stack.remove(opened)
        if opened.entry is not None:
            self.clock.end(opened.entry, self.now)
        elif opened.work is not None:
            self.clock.advance(self.now)
        self.job.ends(opened, at, mark, self, failed=failed)
        self.records.stop(opened, at, mark)

    # What else happens -----------------------------------------------------------------------------------

    def _called(self, call: Call) -> None:
        if call.name in {"add_event", "span_event", "span_error"}:
            opened = self.tree.open_of(call.values["span"])
            if opened is None:
                self.job.rule(call.name, "stopped_span", "a span that is open")
            else:
                self.records.pass_on(opened, call)
        elif call.name == "configured":
            self.configure(call.values["configured"])
        else:
            self.job.called(call, self)

    def _told(self, stack: Stack, kind: Kind, told: Told) -> None:
        """Take what the job says of a short block."""
        opened = stack.latest(kind)
        if opened is None:
            self.job.rule(kind.call, "stopped_span", "attributes and events while it is open")
        else:
            self.records.tell(opened, told)

    def dropped(self, track: Track, number: int) -> None:
        """Begin anew after marks were dropped: what was open in that thread may have ended."""
        self.misuse.count("marks", "dropped", f"fewer of them: {number} were dropped")
        stack = self.tree.stack_of(track)
        for opened in reversed([each for each in stack.opens if each.kind.single]):
            if opened.kind not in _ONE_OF_A_PROCESS:
                self._discard(opened)
        stack.blocks.clear()

    def forget(self, track: Track) -> None:
        """Let go of a thread or task that has ended: nobody can tell any more when the blocks entered there end."""
        if track.state is not None:
            for kind, opened in track.state.blocks:
                if opened is not None and not (opened.closed or opened.recorded or kind in _ONE_OF_A_PROCESS):
                    self._discard(opened)
        self.tree.forget(track)

    def _discard(self, opened: Open) -> None:
        """Forget a span that nobody will end."""
        opened.stack.remove(opened)
        if self.job.looping.iteration is opened:
            self.job.looping.iteration = None
        if opened.entry is not None:
            self.clock.end(opened.entry, self.now)

    # What the job asks -----------------------------------------------------------------------------------

    def event(self, opened: Open, name: StandardTrainingJobEventName, attributes: Attributes) -> None:
        """Tell an event of what is open, now."""
        self.records.event(opened, Event.create(name, attributes, self.records.moment(self.now)))

    def close_all(self, at: float) -> None:
        """End what is open when the application ends, the innermost first; of an iteration, nothing is counted."""
        for opened in reversed(self.tree.all()):
            if opened.kind is kinds.APPLICATION or not opened.known:
                continue
            opened.stack.remove(opened)
            if opened.entry is not None:
                self.clock.end(opened.entry, self.now)
            self.job.cut_short(opened, self)
            self.records.cut_short(opened, at)


_ONE_OF_A_PROCESS = frozenset({kinds.APPLICATION, kinds.TRAINING_LOOP})
