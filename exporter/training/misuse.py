"""Misuse of the training API: invalid calls are counted, logged once for each call and rule, and ignored.

`report` may be called on any thread. The recording thread counts and logs the reports.
"""

from __future__ import annotations

from collections import deque

from exporter.recording.notices import log_once
from exporter.recording.value_class import Value, value_class
from exporter.training.metrics import Families

MAX_CALL_CHARACTERS = 100
"""Maximum length of the label `call`."""
MAX_EXPECTED_CHARACTERS = 300
"""Maximum length of the description of the expected value."""


@value_class
class Misuse(Value):
    """Call that breaks a rule of the training API."""

    call: str  # as the user writes it, at most MAX_CALL_CHARACTERS
    rule: str  # label value for the broken rule
    expected: str  # completes the sentence "CALL expected …"; empty for a call that is counted and not logged


PENDING_REPORTS: deque[Misuse] = deque(maxlen=10_000)
"""Reports that are not counted yet. Beyond the maximum, the oldest reports are lost."""


def report(call: str, rule: str, expected: str) -> None:
    """Report an invalid call. *expected* completes the sentence "CALL expected …". If empty, the call is counted and not logged."""
    PENDING_REPORTS.append(Misuse(call[:MAX_CALL_CHARACTERS], rule, expected[:MAX_EXPECTED_CHARACTERS]))


def count_and_log_pending(families: Families) -> None:
    """Count the pending reports, and log the first report of each call and rule that has an expected value."""
    while PENDING_REPORTS:
        misuse = PENDING_REPORTS.popleft()
        families.counter("training.misuse", call=misuse.call, rule=misuse.rule).add()
        if misuse.expected:
            log_once(
                f"training {misuse.call} {misuse.rule}",
                f"misuse of exporter.training: {misuse.call} expected {misuse.expected}"
                f" (rule {misuse.rule}; logged once; training_misuse_total has the count)",
            )
