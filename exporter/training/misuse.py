"""Misuse of the training API: invalid calls are counted, logged once and ignored.

`report` may be called on any thread; the recording thread counts.
"""

from __future__ import annotations

from collections import deque

from exporter.recording.notices import log_once
from exporter.recording.value_class import Value, value_class
from exporter.training.metrics import Families

MAX_CALL_CHARACTERS = 100
"""Characters of the label `call`."""
MAX_EXPECTED_CHARACTERS = 300
"""Characters of the description of the expected value."""


@value_class
class Misuse(Value):
    """Invalid call: the call as the user writes it, a slug of the broken rule, and the expected value."""

    call: str
    rule: str
    expected: str


REPORTED: deque[Misuse] = deque(maxlen=10_000)
"""Misuse that is not counted yet."""


def report(call: str, rule: str, expected: str) -> None:
    """Report a misuse."""
    REPORTED.append(Misuse(call[:MAX_CALL_CHARACTERS], rule, expected[:MAX_EXPECTED_CHARACTERS]))


def count_reported(families: Families) -> None:
    """Count and log the reported misuse."""
    while REPORTED:
        found = REPORTED.popleft()
        families.counter("training.misuse", call=found.call, rule=found.rule).add()
        log_once(
            f"training {found.call} {found.rule}",
            f"misuse of exporter.training: {found.call} expected {found.expected}"
            f" (rule {found.rule}; logged once, always counted)",
        )
