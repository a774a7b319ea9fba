"""Places where one part of the job's side leaves what another one finds.

Used in the training process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

WHEN_TRAINING_IS_LOADED: list[Callable[[Any], None]] = []
LATE_IMPORTS: AbstractContextManager[None] = nullcontext()


class CurrentSpan:
    """What tells the span in which an event happens.

    Attributes:
        find: Gives the id of the innermost named span that is open in the calling thread or task.
    """

    find: Callable[[], str | None] | None = None


CURRENT_SPAN = CurrentSpan()
