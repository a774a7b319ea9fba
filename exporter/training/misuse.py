"""Misuse of the training API: invalid calls are counted, logged once and ignored.

`report` may be called on any thread; the recording thread counts.
"""

from __future__ import annotations

from collections import deque

from exporter.recording.notices import log_once
from exporter.training.metrics import Families

MOST_CALL = 100
"""Characters of the label `call`."""
MOST_EXPECTED = 300
"""Maximum length of the label `call`."""
REPORTED: deque[tuple[str, str, str]] = deque(maxlen=10_000)
"""Maximum length of the expected value's description."""


def report(call: str, rule: str, expected: str) -> None:
    """Report a misuse: the call as the user writes it, a slug of the broken rule, and the expected value."""
    REPORTED.append((call, rule, expected[:MOST_EXPECTED]))


def count_reported(families: Families) -> None:
    """Count and log the reported misuse."""
    while REPORTED:
        call, rule, expected = REPORTED.popleft()
        call = call[:MOST_CALL]
        families.counter("training.misuse", call=call, rule=rule).add()
        log_once(
            f"training {call} {rule}",
            f"misuse of exporter.training: {call} expected {expected} (rule {rule}; logged once, always counted)",
        )
