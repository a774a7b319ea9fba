"""Reports of misuse: who is told when a setting or a call of training telemetry is wrong.

Used in the training process, on any thread. The recording of training, which is loaded with the package, counts and
logs; the modules that find a misuse do not know it. Never raises.
"""

from __future__ import annotations

from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Listener: TypeAlias = Callable[[str, str, str], None]

_LISTENERS: list[Listener] = []


def report(call: str, rule: str, expected: str) -> None:
    """Have a misuse counted and logged.

    Args:
        call: The call or setting, as the user writes it; a label value, so of a bounded set.
        rule: A short slug, used as a label value.
        expected: What would have been right, in words.
    """
    for listener in _LISTENERS:
        listener(call, rule, expected)


def on_report(listener: Listener) -> None:
    """Register who counts and logs; it must not raise."""
    _LISTENERS.append(listener)
