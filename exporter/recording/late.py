"""Parts of the recording that a process loads only when it uses them, and who is told when they are.

Used in the training process. The composition root, which is always loaded, says what is to be done with such a
part; the part tells at the end of its import. So neither imports the other, and `import exporter` stays small.
"""

from __future__ import annotations

from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

WHEN_EVENTS_ARE_LOADED: list[Callable[[Any], None]] = []
"""Called with the event log of the process."""
WHEN_TRAINING_IS_LOADED: list[Callable[[Any], None]] = []
"""Called with the recording of training of the process."""


class CurrentSpan:
    """What tells the span in which an event happens.

    Attributes:
        find: Gives the id of the innermost named span that is open in the calling thread or task; None where no part of
            the process makes spans.
    """

    __slots__ = ("find",)

    def __init__(self) -> None:
        self.find: Callable[[], str | None] | None = None


CURRENT_SPAN = CurrentSpan()
