"""Misuse: calls that cannot be meant so, counted and told once each.

Used by the interpreter, and through `exporter.training.reports` by whoever checks what the job states.
"""

from __future__ import annotations

from collections import deque

from exporter.recording.notices import tell_once
from exporter.training.series import Families

MOST_CALL = 100
"""Characters of the label `call`."""


class Misuse:
    """The misuse of one process.

    Args:
        families: Where it is counted.

    Attributes:
        latest: What was wrong lately, for those that raise it.
    """

    def __init__(self, families: Families) -> None:
        self._families = families
        self._reported: deque[tuple[str, str, str]] = deque(maxlen=10_000)
        self.latest: deque[str] = deque(maxlen=100)

    def count(self, call: str, rule: str, expected: str) -> None:
        """Count one and tell it, the first time.

        Args:
            call: What was called.
            rule: A short slug.
            expected: What would have been right, in words.
        """
        call = call[:MOST_CALL]
        self._families.counter("training.misuse", call=call, rule=rule).add()
        self.latest.append(f"{call}: expected {expected}")
        tell_once(
            f"training {call} {rule}",
            f"misuse of exporter.training: {call} expected {expected} (rule {rule}; told once, counted always)",
        )

    def report(self, call: str, rule: str, expected: str) -> None:
        """Take one from any thread; it is counted with the next marks."""
        self._reported.append((call, rule, expected))

    def settle(self) -> None:
        """Count what was reported."""
        while self._reported:
            self.count(*self._reported.popleft())

    @property
    def waiting(self) -> bool:
        """Whether anything was reported since."""
        return bool(self._reported)
