"""What is open: the spans of one thread or task that have begun and not ended.

Used by the interpreter.
"""

from __future__ import annotations

from itertools import count

from exporter.training.kinds import Kind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from exporter.training.phase_clock import Entry
    from exporter.training.saves import Save
    from exporter.training.spans import Span

_NUMBERS = count()


class Open:
    """A span that is open.

    Attributes:
        kind: Of it.
        began: Monotonic time.
        stack: Of its thread.
        known: Whether it began while telemetry was configured; else no rule is about it.
        number: In the order of begins.
        span: Made when somebody asks for it.
        parent: What was the innermost when it began.
        entry: Its phase, on the main thread.
        work: Of the phase clock when it began; None where it has none.
        waits: Likewise.
        save: Of a save.
        refused: Begins of its kind that were refused inside of it.
        recorded: Whether the exporters know it.
        closed: Whether it has ended.
    """

    __slots__ = (
        "kind",
        "began",
        "stack",
        "known",
        "number",
        "span",
        "parent",
        "entry",
        "work",
        "waits",
        "save",
        "refused",
        "recorded",
        "closed",
    )

    def __init__(self, kind: Kind, began: float, stack: Stack, *, known: bool) -> None:
        self.kind = kind
        self.began = began
        self.stack = stack
        self.known = known
        self.number = next(_NUMBERS)
        self.span: Span | None = None
        self.parent: Open | None = None
        self.entry: Entry | None = None
        self.work: float | None = None
        self.waits = 0.0
        self.save: Save | None = None
        self.refused = 0
        self.recorded = False
        self.closed = False


class Stack:
    """What is open in one thread or task.

    Args:
        parent: Of the code that started the task.
        thread: Identifier of the thread.

    Attributes:
        main: Whether its time is what phases divide.
        opens: In the order of their begins.
        single: Those of kinds of which one may be open.
        blocks: What was entered and not left, in order; without a span where it was refused.
    """

    __slots__ = ("parent", "thread", "main", "opens", "single", "blocks")

    def __init__(self, parent: Stack | None, thread: int) -> None:
        self.parent = parent
        self.thread = thread
        self.main = False
        self.opens: list[Open] = []
        self.single: dict[Kind, Open] = {}
        self.blocks: list[tuple[Kind, Open | None]] = []

    def add(self, opened: Open) -> None:
        """Open one."""
        self.opens.append(opened)
        if opened.kind.single:
            self.single[opened.kind] = opened

    def remove(self, opened: Open) -> None:
        """Close one."""
        opened.closed = True
        if self.opens and self.opens[-1] is opened:
            self.opens.pop()
        elif opened in self.opens:
            self.opens.remove(opened)
        if self.single.get(opened.kind) is opened:
            del self.single[opened.kind]

    def latest(self, kind: Kind) -> Open | None:
        """Give the one of a kind that began last."""
        if kind.single:
            return self.single.get(kind)
        for opened in reversed(self.opens):
            if opened.kind is kind:
                return opened
        return None

    def innermost(self) -> Open | None:
        """Give the one that began last, of this task or else of those that led to it."""
        if self.opens:
            return self.opens[-1]
        return None if self.parent is None else self.parent.innermost()
