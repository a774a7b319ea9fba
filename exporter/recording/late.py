"""Parts of the recording that a process loads only when it uses them, and who is told when they are.

Used in the training process. The composition root, which is always loaded, says what is to be done with such a
part; the part tells at the end of its import. So neither imports the other, and `import exporter` stays small.
"""

from __future__ import annotations

import os
import threading
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


FORK_SECONDS = 5.0
"""The longest that a fork waits for an import of ours, which takes some milliseconds."""


class LateImports:
    """Held by whoever imports a part of ours late, and by whoever forks.

    A child that is forked while another thread imports a module would wait for that thread, which it does not have, as
    soon as it needs the module. A signal handler may import, or fork, within an import.

    Attributes:
        safe: In a forked child: whether no import was under way when it was forked. Else it is to import nothing of ours.
    """

    def __init__(self) -> None:
        self.safe = True
        self._lock = threading.RLock()
        self._forking: set[int] = set()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before_fork,
                after_in_parent=self._after_in_parent,
                after_in_child=self._after_in_child,
            )

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _before_fork(self) -> None:
        if self._lock.acquire(timeout=FORK_SECONDS):
            self._forking.add(threading.get_ident())

    def _after_in_parent(self) -> None:
        if threading.get_ident() in self._forking:
            self._forking.discard(threading.get_ident())
            self._lock.release()

    def _after_in_child(self) -> None:
        self.safe = self.safe and threading.get_ident() in self._forking
        self._lock = threading.RLock()
        self._forking = set()


LATE_IMPORTS = LateImports()
