"""Verdicts of runs: the words and the colors that all dashboards share.

The impact of a problem has the same words as the verdict of the run that has the problem.
"""

from __future__ import annotations

import enum

from dashboards.palette import BAD, GOOD, NEUTRAL, WARNING
from dashboards.panels import value_mappings


class Verdict(enum.IntEnum):
    """Verdict of a run, as in the rule `run:training_verdict:urgency`. A larger number is more urgent."""

    NO_PROBLEM = 0
    LOSES_A_LITTLE = 1  # a slow rank or a wait for data costs less than `MIN_LOSS_SHARE` of the time
    ENDED_EARLY = 2  # finished before the step target
    RESTARTED = 3  # lost more than 1 % of the last hour to restarts
    STARTING = 4
    WARNING = 5  # an alert of severity warning fires
    HAD_NAN_LOSS = 6  # the loss was NaN or infinite within 15 minutes, and is finite again: the critical alert still fires
    LOSES_TIME = 7  # loses at least `MIN_LOSS_SHARE` of the time now, without start, saves and validation
    LOSES_MUCH_TIME = 8  # loses at least `MIN_LARGE_LOSS_SHARE` of the time now; the start does not count
    PARTLY_UNKNOWN = 9  # some ranks have no sample
    ENDANGERS_WORK = 10  # work or the model may be lost, although steps finish
    UNKNOWN = 11  # no rank has a sample, and the run had not ended at its last sample
    ENDING = 12  # all ranks have ended, and the outcome is not decided
    NO_PROGRESS = 13  # no step finishes, or the run failed or is lost


# Texts of verdicts that other modules use too.
NO_PROGRESS = "no progress"
STARTING = "starting"
ENDING = "ending"
UNKNOWN = "unknown"
ENDANGERS_WORK = "endangers work"
HAD_NAN_LOSS = "had a NaN loss"
LOSES_TIME = "loses time"
NO_PROBLEM = "no problem"

VERDICT_TEXTS = {
    Verdict.NO_PROGRESS: (NO_PROGRESS, BAD),
    Verdict.ENDING: (ENDING, WARNING),
    Verdict.UNKNOWN: (UNKNOWN, WARNING),
    Verdict.ENDANGERS_WORK: (ENDANGERS_WORK, BAD),
    Verdict.PARTLY_UNKNOWN: ("partly unknown", WARNING),
    Verdict.LOSES_MUCH_TIME: (LOSES_TIME, BAD),
    Verdict.LOSES_TIME: (LOSES_TIME, WARNING),
    Verdict.HAD_NAN_LOSS: (HAD_NAN_LOSS, WARNING),
    Verdict.WARNING: ("warning", WARNING),
    Verdict.STARTING: (STARTING, WARNING),
    Verdict.RESTARTED: ("restarted", WARNING),
    Verdict.ENDED_EARLY: ("ended early", WARNING),
    Verdict.LOSES_A_LITTLE: (LOSES_TIME, WARNING),
    Verdict.NO_PROBLEM: (NO_PROBLEM, NEUTRAL),
}
"""Text and color of each verdict, the most urgent first."""
VERDICT_MAPPINGS = value_mappings(
    {verdict.value: text_and_color for verdict, text_and_color in VERDICT_TEXTS.items()}
)
"""Value mappings from the numbers of the verdicts to their texts and colors."""
TIMELINE_MAPPINGS = value_mappings(
    {verdict.value: text_and_color for verdict, text_and_color in VERDICT_TEXTS.items()}
    | {
        Verdict.NO_PROBLEM.value: (NO_PROBLEM, GOOD),
        Verdict.STARTING.value: (STARTING, NEUTRAL),
        Verdict.ENDING.value: (ENDING, NEUTRAL),
    }
)
"""Value mappings for a state timeline, with other colors of three verdicts.

No problem is a colored bar. The start and the end are neutral, because every run starts and ends.
"""


def verdict_by_run(selector: str) -> str:
    """Return PromQL for the recorded `Verdict` of each run, by run."""
    return f"max by (run) (run:training_verdict:urgency{{{selector}}})"
