"""Collector that requests stacks from the ranks of hanging runs, and publishes where each rank waits.

Runs in the sidecar. While a run is hung or stalled, the collector writes a request once a minute. After ten requests, it writes none until
the run changes between the two states or hangs again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from exporter.collectors.job import InspectedRank, InspectedRun
from exporter.collectors.kernel_files import procfs
from exporter.errors import FeedFormatError
from exporter.families import Collected, FamilySpec
from exporter.feed.directory import is_trusted
from exporter.feed.stacks import StackAnswer, StackRequest, read_answer, write_request
from exporter.hangs import kernel_state
from exporter.hangs.explanation import Explanation, RankStack, explain, rank_stack
from exporter.recording.stacks import StackDetail

LOGGER = logging.getLogger("exporter.hangs")

HANG_INFO = FamilySpec(
    name="training_hang_info",
    type="info",
    labels=("run", "rank", "function", "location", "phase"),
    help=(
        "Function and line (file:line) in which a rank of a hung or stalled run waits, from the stack of its"
        " main thread."
    ),
    absent=(
        "while no run is hung or stalled, until the ranks have answered or 3 s have passed since the first request, for"
        " ranks on other nodes, or with `hang.stacks: off`"
    ),
    source="stack answers of the training processes, /proc/<pid>/task",
    details=(
        (
            "For a rank that has not answered, `function` is `no_answer`, and `location` is the thread state"
            " that the kernel reports."
        ),
    ),
)

SPECS = (HANG_INFO,)

REQUEST_INTERVAL_SECONDS = 60.0
"""Minimum time between two requests for the stacks of a run, except for the first request of a new hang."""
MAX_REQUESTS = 10
"""Maximum number of requests for a hang of a run."""
ANSWER_SECONDS = 3.0
"""Maximum time before the report of a request. A process usually answers within 2 s; a later answer replaces the report."""
NO_ANSWER = "no_answer"
"""Value of the label `function` for a rank that did not answer."""


@dataclass(frozen=True, slots=True)
class HangReport:
    """Run, and explanation of where its ranks wait, from the answers to a stack request."""

    run: InspectedRun
    explanation: Explanation
    stacks: tuple[RankStack, ...]  # of the ranks that answered
    answers: tuple[StackAnswer, ...]  # with the stacks of other threads

    def headline(self, now: float) -> str:
        """Return a line with the run, its state, the duration of the state at the Unix time *now*, and the groups of ranks."""
        duration = duration_text(now - self.run.since_timestamp)
        step = "" if self.run.step is None else f" at step {self.run.step:,}"
        return f"run {self.run.run} {self.run.state} for {duration}{step}. {self.explanation.sentence()}"


@dataclass(slots=True)
class _HangCase:
    """Stack requests and the report of a run, from the start to the end of a hang."""

    run: InspectedRun
    request_count: int = 0
    requested_at: float = float("-inf")  # monotonic time of the last request
    request_id: str = ""  # id of the last request; empty before the first request
    # True from a stack request until all ranks have answered or `ANSWER_SECONDS` have passed.
    is_waiting: bool = False
    report: HangReport | None = None  # from the last request that is no longer awaited
    logged_report: HangReport | None = None  # last report on the current state that was logged
    answers: dict[str, StackAnswer] = field(default_factory=dict)  # to the last request, by process id

    @property
    def unanswered_ranks(self) -> list[InspectedRank]:
        """Ranks that have not answered the last request."""
        return [rank for rank in self.run.ranks if rank.process_id not in self.answers]

    def must_log(self, report: HangReport, *, was_waiting: bool) -> bool:
        """Return True for the first report on a state, and if a rank has answered that the log names as unanswered.

        *was_waiting* is False if the report was made only because of a late answer. Such a report does not count as the first report on
        a state, because the answer may be from the state before.
        """
        logged = self.logged_report
        if logged is None:
            return was_waiting
        return any(stack.rank in logged.explanation.kernel_states for stack in report.stacks)

    def change_state(self, run: InspectedRun) -> None:
        """Log the next report, and permit as many requests as for a new hang. The time of the next request does not change.

        The phase of an overdue step decides whether the run is hung or stalled, so that the state may change in every pass.
        """
        self.run = run
        self.request_count = 0
        self.logged_report = None
        if self.report is not None:
            self.report = replace(self.report, run=run)


class HangCollector:
    """Collector that requests stacks from the ranks of hanging runs.

    Args:
        directory: The feed directory.
        hanging_runs: Returns the hung and stalled runs of the latest ledger pass.
        detail: Detail of the stacks; None disables requests.
        monotonic: Returns the time in seconds for intervals and timeouts.
        clock: Returns the Unix time.
    """

    name = "hangs"
    specs = SPECS

    def __init__(
        self,
        directory: Path,
        hanging_runs: Callable[[], Sequence[InspectedRun]],
        *,
        detail: StackDetail | None = StackDetail.FULL,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = os.fspath(directory)
        self._is_shared = is_trusted(directory)
        self._hanging_runs = hanging_runs
        self._detail = detail
        self._monotonic, self._clock = monotonic, clock
        self._cases: dict[str, _HangCase] = {}

    def reports(self) -> list[HangReport]:
        """Return the reports on the runs that currently hang. May be called from any thread."""
        # A copy, because the thread of the collector adds and removes cases.
        return [case.report for case in list(self._cases.values()) if case.report is not None]

    def collect(self) -> Collected:
        """Write a request if one is due, read the answers, and return the series of the hangs with a report."""
        collected = Collected()
        if self._detail is None:
            return collected
        self._update_cases()
        now = self._monotonic()
        if not any(case.is_waiting for case in self._cases.values()):
            self._request_stacks(now, collected)
        for case in self._cases.values():
            if case.request_id:
                self._read_answers(case, now)
            if case.report is not None:
                _publish(case.report, collected)
        return collected

    def _update_cases(self) -> None:
        """Start, continue and end the cases of the runs."""
        runs = {run.run: run for run in self._hanging_runs()}
        for name in [name for name in self._cases if name not in runs]:
            del self._cases[name]
        for name, run in runs.items():
            case = self._cases.setdefault(name, _HangCase(run))
            if run.state != case.run.state:
                case.change_state(run)
            elif run.since_timestamp > case.run.since_timestamp:
                self._cases[name] = _HangCase(run)  # a new hang
            else:
                case.run = run

    def _request_stacks(self, now: float, collected: Collected) -> None:
        """Write a request for the due run whose last request is the oldest, if any run is due."""
        due_cases = [
            case
            for case in self._cases.values()
            if case.request_count < MAX_REQUESTS and now - case.requested_at >= REQUEST_INTERVAL_SECONDS
        ]
        if not due_cases or self._detail is None:
            return
        # A directory has a single request file. Therefore, stacks are requested for one run at a time.
        case = min(due_cases, key=lambda candidate: candidate.requested_at)
        hang_of = case.run.run if case.request_count == 0 else ""
        request = StackRequest(os.urandom(16).hex(), self._clock(), self._detail, hang_of)
        case.request_count += 1
        case.requested_at = now
        try:
            write_request(self._directory, request, is_shared=self._is_shared)
        except OSError as error:
            collected.unsupported.append(f"stack requests ({error.strerror})")
            return
        case.request_id, case.is_waiting = request.id, True
        case.answers = {}

    def _read_answers(self, case: _HangCase, now: float) -> None:
        """Read the answers to the last request.

        Report on the run once all ranks have answered or the time is over, and again after each late answer.
        """
        has_new_answer = False
        for rank in case.unanswered_ranks:
            answer = read_valid_answer(self._directory, rank.process_id, case.request_id)
            if answer is not None:
                case.answers[rank.process_id] = answer
                has_new_answer = True
        unanswered_ranks = case.unanswered_ranks
        if case.is_waiting and unanswered_ranks and now - case.requested_at < ANSWER_SECONDS:
            return
        if not case.is_waiting and not has_new_answer:
            return
        was_waiting, case.is_waiting = case.is_waiting, False
        case.report = report_on(case.run, case.answers, unanswered_ranks)
        if case.must_log(case.report, was_waiting=was_waiting):
            case.logged_report = case.report
            LOGGER.warning("%s", case.report.headline(self._clock()))


def read_valid_answer(directory: str, process_id: str, request_id: str) -> StackAnswer | None:
    """Return the answer of a process to a request. Returns None without a valid stack file, or if the file answers a different request."""
    try:
        answer = read_answer(directory, process_id)
    except (OSError, FeedFormatError):
        return None
    if answer is None or answer.request_id != request_id or answer.process_id != process_id:
        return None
    return answer


def report_on(
    run: InspectedRun, answers: dict[str, StackAnswer], unanswered_ranks: Sequence[InspectedRank]
) -> HangReport:
    """Return the report on a run, with the kernel state of the ranks that did not answer."""
    stacks = [stack for answer in answers.values() if (stack := rank_stack(answer)) is not None]
    kernel_states = {rank.rank: kernel_state.describe(rank.pid, procfs()) for rank in unanswered_ranks}
    return HangReport(run, explain(stacks, kernel_states), tuple(stacks), tuple(answers.values()))


def duration_text(seconds: float) -> str:
    """Return a duration as text, such as `40 s`, `2 min` or `3 h`. The unit is the largest in which the number is at least 2, or seconds."""
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _publish(report: HangReport, collected: Collected) -> None:
    """Add a series for each rank on this node, with or without an answer."""
    run = report.run.run
    for stack in report.stacks:
        collected.add(HANG_INFO, 1, run, str(stack.rank), stack.function, stack.location, stack.phase)
    for rank, state in report.explanation.kernel_states.items():
        collected.add(HANG_INFO, 1, run, str(rank), NO_ANSWER, state, "")
