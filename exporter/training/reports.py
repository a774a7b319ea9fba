"""Reports of misuse: who is told when a setting or a call of training telemetry is wrong.

Used in the training process, on the job's threads. The recording of training registers here once it is loaded; what
was reported before then is kept, boundedly, and told at once. Never raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from exporter.recording.notices import tell_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Listener: TypeAlias = Callable[[str, str, str], None]

_LISTENERS: list[Listener] = []
_EARLIER: deque[tuple[str, str, str]] = deque(maxlen=1000)


def report(call: str, rule: str, expected: str) -> None:
    """Count a misuse and tell it once.

    Args:
        call: The call or setting, as the user writes it.
        rule: A short slug, used as a label value.
        expected: What would have been right, in words.
    """
    if not _LISTENERS:
        _EARLIER.append((call, rule, expected))
        tell_once(f"training {call} {rule}", f"{call}: {expected}")
        return
    for listener in _LISTENERS:
        listener(call, rule, expected)


def on_report(listener: Listener) -> None:
    """Register who counts and logs; it is given what was reported before, and must not raise."""
    _LISTENERS.append(listener)
    while True:
        try:
            earlier = _EARLIER.popleft()
        except IndexError:
            return
        listener(*earlier)
