"""`training-exporter stacks`: prints where each rank of the jobs in a feed directory waits, within about three seconds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from exporter.cli.flags import EXIT_FAILED, PROGRAM, Parser, flag_error, print_notice
from exporter.collectors.job import InspectedRank, InspectedRun
from exporter.errors import FeedDirectoryError
from exporter.feed.directory import default_directory, is_trusted
from exporter.feed.reader import FeedEntry, FeedReader
from exporter.feed.stacks import StackAnswer, StackRequest, write_request
from exporter.hangs.collector import (
    ANSWER_SECONDS,
    HangReport,
    read_valid_answer,
    report_on,
)
from exporter.hangs.explanation import TIE_SENTENCE
from exporter.recording.stacks import StackDetail, ThreadStack

DESCRIPTION = """\
Prints where each rank of the jobs in a feed directory waits. Ranks that wait in the same line, function and phase form
a group; the stack of the lowest rank of the group is printed. If the stacks show which group the others wait for, that
group comes first. Works at any time, also before the first step and without a sidecar. Run it as the user of the job.

    training-exporter stacks
    training-exporter stacks --run=llama-7b --json
"""
POLL_SECONDS = 0.1
"""Interval of the checks for new answers."""
PRINT_MARGIN_SECONDS = 0.2
"""Part of `ANSWER_SECONDS` that is left for printing, so that the command returns within that time."""


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Print the stacks of the running ranks. Return 1 if no rank is running. Raises ConfigurationError for an unusable directory."""
    parser = Parser(f"{PROGRAM} stacks", DESCRIPTION)
    parser.add_argument("--run", default="", help="only this run")
    parser.add_argument(
        "--json", action="store_true", help="print JSON with the stacks of every rank that answers"
    )
    parser.add_argument(
        "--feed.dir", default="", help="feed directory (default: EXPORTER_FEED_DIR, or the user's own)"
    )
    flags = vars(parser.parse_flags(list(arguments)))
    directory = Path(flags["feed.dir"] or environ.get("EXPORTER_FEED_DIR") or default_directory())
    entries = _running_ranks(directory, flags["run"])
    if not entries:
        run_suffix = f" of run {flags['run']}" if flags["run"] else ""
        print_notice(f"no rank{run_suffix} is running in {directory}; see {PROGRAM} check")
        return EXIT_FAILED
    request = StackRequest(os.urandom(16).hex(), time.time(), StackDetail.FULL)
    try:
        write_request(os.fspath(directory), request, is_shared=is_trusted(directory))
    except OSError as error:
        raise flag_error(
            "--feed.dir", f"cannot write a request into {directory}: {error.strerror}"
        ) from error
    answers = _wait_for_answers(directory, request, [entry.snapshot.process.id for entry in entries])
    reports = [
        _report_on_run(run, entries, answers)
        for run in sorted({entry.snapshot.process.run for entry in entries})
    ]
    print(
        json.dumps([_as_dict(report) for report in reports], indent=2)
        if flags["json"]
        else "\n\n".join(map(_report_text, reports))
    )
    return 0


def _running_ranks(directory: Path, run: str) -> list[FeedEntry]:
    """Return the running processes with a rank, of all runs if *run* is empty. Raises ConfigurationError for an unusable directory."""
    try:
        entries = FeedReader(directory).scan().entries
    except FeedDirectoryError as error:
        raise flag_error("--feed.dir", str(error)) from error
    return [
        entry
        for entry in entries
        if entry.is_alive
        and entry.snapshot.process.rank is not None
        and (not run or entry.snapshot.process.run == run)
    ]


def _wait_for_answers(
    directory: Path, request: StackRequest, process_ids: Sequence[str]
) -> dict[str, StackAnswer]:
    """Return the answers to a request by process id, once all processes have answered or the time is over."""
    answers: dict[str, StackAnswer] = {}
    deadline = time.monotonic() + ANSWER_SECONDS - PRINT_MARGIN_SECONDS
    while len(answers) < len(process_ids) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        for process_id in process_ids:
            if process_id not in answers:
                answer = read_valid_answer(os.fspath(directory), process_id, request.id)
                if answer is not None:
                    answers[process_id] = answer
    return answers


def _report_on_run(run: str, entries: Sequence[FeedEntry], answers: Mapping[str, StackAnswer]) -> HangReport:
    """Return the report on a run, whose step is the highest of the ranks that answered."""
    entries_of_run = [entry for entry in entries if entry.snapshot.process.run == run]
    ranks = tuple([_inspected_rank(entry) for entry in entries_of_run])
    answer_by_process = {
        rank.process_id: answers[rank.process_id] for rank in ranks if rank.process_id in answers
    }
    unanswered_ranks = [rank for rank in ranks if rank.process_id not in answer_by_process]
    steps = [answer.step for answer in answer_by_process.values() if answer.step is not None]
    observed_run = InspectedRun(
        run=run, state="observed", since_timestamp=time.time(), step=max(steps, default=None), ranks=ranks
    )
    return report_on(observed_run, answer_by_process, unanswered_ranks)


def _inspected_rank(entry: FeedEntry) -> InspectedRank:
    process = entry.snapshot.process
    assert process.rank is not None  # noqa: S101  # `_running_ranks` returns processes with a rank
    return InspectedRank(process.rank, process.id, entry.pid)


def _report_text(report: HangReport) -> str:
    """Return the groups of a report with their stacks, and the ranks that did not answer, as text."""
    step_suffix = "" if report.run.step is None else f", step {report.run.step:,}"
    lines = [f"run {report.run.run}{step_suffix}"]
    answer_by_rank = {answer.rank: answer for answer in report.answers}
    for group in report.explanation.groups:
        collectives_suffix = f", {group.collectives_text()}" if group.collectives_text() else ""
        phase_suffix = f", {group.phase}" if group.phase else ""
        ranks = ", ".join(map(str, group.ranks))
        lines += ["", f"rank {ranks}: {group.function} ({group.location}){phase_suffix}{collectives_suffix}"]
        answer = answer_by_rank[group.ranks[0]]
        lines += _thread_lines(answer.main)
        for thread in answer.others:
            lines += [f"  thread {thread.name}", *_thread_lines(thread)]
        if answer.last_collective is not None:
            lines.append(f"  last collective: {answer.last_collective}")
    if report.explanation.is_tie:
        lines += ["", TIE_SENTENCE]
    for rank, kernel_state in sorted(report.explanation.kernel_states.items()):
        lines += ["", f"rank {rank} did not answer: {kernel_state}"]
    return "\n".join(lines)


def _thread_lines(thread: ThreadStack) -> list[str]:
    return [f"    {frame.function}  {frame.file}:{frame.line}" for frame in thread.frames]


def _as_dict(report: HangReport) -> dict[str, object]:
    """Return the object that `--json` prints for a run."""
    return {
        "run": report.run.run,
        "step": report.run.step,
        "groups": [asdict(group) for group in report.explanation.groups],
        "tie": report.explanation.is_tie,
        "silent": {
            str(rank): kernel_state for rank, kernel_state in report.explanation.kernel_states.items()
        },
        "answers": [asdict(answer) for answer in report.answers],
    }
