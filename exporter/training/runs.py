"""Runs: iterations that look alike, interpreted column by column instead of mark by mark.

Used by the interpreter. A training loop repeats itself: the same blocks in the same order, thousands of times. What the
marks of one iteration mean is worked out once, as a plan; then the times of many are subtracted and added up by loops in
C. The result is that of the interpreter, a hundred times as fast; where anything is out of the ordinary (a block left by
an exception, a span that is exported, a number that is none), there is no plan, and each mark is interpreted by itself.
"""

from __future__ import annotations

from bisect import bisect_left
from math import isfinite
from operator import le, sub

from exporter.training import kinds
from exporter.training.kinds import ENTER, EXIT, FIELDS, FIRST_KIND, KINDS, MODES, NUMBERS
from exporter.training.series import LARGEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from exporter.training.interpreter import Interpreter
    from exporter.training.opened import Stack

FEWEST = 3
"""Iterations that are worth a plan."""
MOST_PLANS = 64
LONGEST_PATTERN = 256
_FIRST_CODE = FIRST_KIND * 8
BEGIN_CODE = kinds.TRAINING_ITERATION.code + ENTER
END_CODE = kinds.TRAINING_ITERATION.code + EXIT


class Block:
    """A block of the pattern.

    Attributes:
        phase: What its time counts as.
        enter: Place of its begin in the pattern.
        exit: Place of its end.
        inner: The blocks right inside it that count as phases of their own.
    """

    __slots__ = ("phase", "enter", "exit", "inner")

    def __init__(self, phase: str, enter: int) -> None:
        self.phase = phase
        self.enter = enter
        self.exit = -1
        self.inner: list[Block] = []


class Plan:
    """What the marks of one iteration mean.

    Attributes:
        blocks: All that count as phases, the iteration first.
        end: Place of the end of the iteration.
        last: Place of the last mark that has a time.
        numbers: Places of numbers, with field and mode.
        used: The kinds of all blocks.
    """

    __slots__ = ("blocks", "end", "last", "numbers", "used")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.end = -1
        self.last = -1
        self.numbers: list[tuple[int, str, str]] = []
        self.used: set[kinds.Kind] = set()

    @classmethod
    def of(cls, pattern: bytes) -> Plan | None:
        """Work out the marks from the begin of one iteration to that of the next; None where they are not plain."""
        plan = cls()
        opened: list[tuple[kinds.Kind, Block | None]] = []
        phases: list[Block] = []
        for place, code in enumerate(pattern):
            if NUMBERS <= code < _FIRST_CODE:
                field = FIELDS[(code - NUMBERS) & 7]
                plan.numbers.append((place, field, MODES[(code - NUMBERS) >> 3]))
                continue
            if code < _FIRST_CODE:
                return None
            kind, what = KINDS[(code >> 3) - FIRST_KIND], code & 7
            plan.last = place
            if what == ENTER:
                if kind in plan.used and any(each is kind for each, _ in opened) and kind.single:
                    return None
                if kind in _OUTSIDE or (kind is kinds.TRAINING_ITERATION and place):
                    return None
                block = None
                if kind.phase is not None:
                    if phases and phases[-1].phase == kind.phase:
                        return None
                    block = Block(kind.phase, place)
                    if phases:
                        phases[-1].inner.append(block)
                    phases.append(block)
                    plan.blocks.append(block)
                plan.used.add(kind)
                opened.append((kind, block))
            elif what == EXIT:
                if not opened or opened[-1][0] is not kind:
                    return None
                block = opened.pop()[1]
                if block is not None:
                    block.exit = place
                    phases.pop()
                if kind is kinds.TRAINING_ITERATION:
                    plan.end = place
            else:
                return None
        return plan if plan.end > 0 and not opened else None


_TIMED = frozenset({kinds.TRAINING_ITERATION, *KINDS[KINDS.index(kinds.DATA_LOADING) :]})
"""Standard kinds whose begin and end mean nothing but time; those of the job's own names mean no more."""
_OUTSIDE = frozenset(KINDS) - _TIMED


class Runs:
    """The plans of an interpreter.

    Args:
        by: It.
    """

    def __init__(self, by: Interpreter) -> None:
        self._by = by
        self._plans: dict[bytes, Plan | None] = {}

    def take(self, stack: Stack, items: list[Any], codes: bytes, start: int) -> int:
        """Interpret iterations that look alike.

        Args:
            stack: Of their thread, where no iteration is open.
            items: Codes and values in turn.
            codes: The codes alone.
            start: Place of the first mark of the first iteration.

        Returns:
            How many marks were interpreted; 0 where each has to be by itself.
        """
        after = codes.find(BEGIN_CODE, start + 1)
        length = after - start
        if after < 0 or length > LONGEST_PATTERN:
            return 0
        pattern = codes[start:after]
        # What comes after the end of the last iteration that is here may go on: it is left, unless another follows.
        count = (len(codes) - start - 1) // length
        if codes[start : start + count * length] != pattern * count:
            count, end = 1, after
            while codes.startswith(pattern, end) and end + length < len(codes):
                count += 1
                end += length
        if count < FEWEST:
            return 0
        plan = self._plan(pattern)
        if plan is None or not self._may(stack, plan):
            return 0
        return self._fold(plan, items, 2 * start + 1, 2 * length, count) * length

    def _plan(self, pattern: bytes) -> Plan | None:
        if pattern not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[pattern] = Plan.of(pattern)
        return self._plans[pattern]

    def _may(self, stack: Stack, plan: Plan) -> bool:
        """Whether nothing but time and numbers comes of it now."""
        by, job = self._by, self._by.job
        if not stack.main or job.closed or job.progress.steps < FEWEST:
            return False
        if any(kind in stack.single for kind in plan.used) or by.clock.inside(plan.blocks[0].phase):
            return False
        if job.tells and (not job.trains or job.looping.open is None):
            return False
        return job.looping.loop is not None and not any(by.records.wants(kind) for kind in plan.used)

    def _fold(self, plan: Plan, items: list[Any], start: int, stride: int, count: int) -> int:
        """Add up as many iterations as lie in one bin of the timeline and before one update.

        Args:
            plan: What their marks mean.
            items: Codes and values in turn.
            start: Of the value of the first mark.
            stride: From one iteration to the next.
            count: How many there are.

        Returns:
            How many were added up.
        """
        by, job = self._by, self._by.job
        looping, clock = job.looping, by.clock
        last = start + 2 * plan.last
        if items[start] < clock.last:
            return 0
        if looping.open is not None:
            count = min(count, job.every - looping.figures.completed % job.every)
        lasts = items[last : last + count * stride : stride]
        if lasts[-1] >= clock.bin_end:  # the one that does not end in it is interpreted mark by mark
            count = bisect_left(lasts, clock.bin_end)
            del lasts[count:]
        if count < FEWEST:
            return 0
        stop = start + count * stride
        if not all(map(le, lasts, items[start + stride : stop : stride])):
            return 0
        durations = [
            list(
                map(
                    sub,
                    items[start + 2 * block.exit : stop : stride],
                    items[start + 2 * block.enter : stop : stride],
                )
            )
            for block in plan.blocks
        ]
        numbers = _plain_numbers(plan, items, start, stop, stride)
        if numbers is None or min(map(min, durations)) < 0:
            return 0
        by.fold(plan, durations, items[start], lasts[-1], items[start + 2 * plan.end : stop : stride])
        for field, mode, column, total in numbers:
            job.progress.numbers(field, mode, column, total)
        return count


def _plain_numbers(
    plan: Plan, items: list[Any], start: int, stop: int, stride: int
) -> list[tuple[str, str, list[float], float]] | None:
    """Give each column of numbers with its sum; None where one is out of the ordinary."""
    found = []
    for place, field, mode in plan.numbers:
        column = items[start + 2 * place : stop : stride]
        try:
            total = float(sum(column))
        except (TypeError, OverflowError):  # one that `record` could make no number of; or too large
            return None
        if not isfinite(total) or (field in _NOT_NEGATIVE and not 0 <= min(column) <= total < LARGEST):
            return None
        found.append((field, mode, column, total))
    return found


_NOT_NEGATIVE = frozenset({"samples", "tokens", "microbatches", "epoch"})
