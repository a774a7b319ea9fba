"""Misuse of the training API: invalid calls are counted, logged once and ignored.

`report` may be called on any thread; the recording thread counts.
"""

from __future__ import annotations

from collections import deque

from exporter.recording.notices import log_once
from exporter.recording.value_class import Value, value_class
from exporter.training.metrics import Families

MAX_CALL_CHARACTERS = 100
"""Length of the label `call`."""
MAX_EXPECTED_CHARACTERS = 300
"""Length of the description of the expected value."""


@value_class
class Misuse(Value):
    """Invalid call: the call as the user writes it, a slug of the broken rule, and the expected value."""

    call: str
    rule: str
    expected: str


REPORTS: deque[Misuse] = deque(maxlen=10_000)
"""Reported misuse that is not counted yet."""


def report(call: str, rule: str, expected: str) -> None:
    """Report a misuse."""
    REPORTS.append(Misuse(call[:MAX_CALL_CHARACTERS], rule, expected[:MAX_EXPECTED_CHARACTERS]))


def count_reported(families: Families) -> None:
    """Count and log the reported misuse."""
    while REPORTS:
        misuse = REPORTS.popleft()
        families.counter("training.misuse", call=misuse.call, rule=misuse.rule).add()
        log_once(
            f"training {misuse.call} {misuse.rule}",
            f"misuse of exporter.training: {misuse.call} expected {misuse.expected}"
            f" (rule {misuse.rule}; logged once, always counted)",
        )
