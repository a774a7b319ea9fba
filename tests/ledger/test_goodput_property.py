"""Properties of goodput for arbitrary runs: hangs, saves, crashes, restarts, evaluations and exits of launches."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from goodput_support import MonitoredJob, SimulatedJob, check_seconds_add_up, job_in_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_support import Page, SimulatedSidecar

from exporter.feed.runs import ProcessEnd
from exporter.ledger.goodput.accounting import BADPUT_CAUSES
from exporter.ledger.goodput.endings import ExitEvidence
from exporter.ledger.goodput.run_state import FINAL_STATES, STATES
from exporter.recording.values import END_REASONS

LAUNCH = "5f2c"
COUNTERS = (
    ("wall_seconds_total", {}),
    ("productive_seconds_total", {}),
    ("lost_steps_total", {}),
    *(("badput_seconds_total", {"cause": cause}) for cause in BADPUT_CAUSES),
    *(("interruptions_total", {"reason": reason}) for reason in END_REASONS),
    *(("restarts_total", {"reason": reason}) for reason in END_REASONS),
)


class SimulatedRun:
    """Run of a launch with consecutive processes, observed by a sidecar.

    Attributes:
        ends: Ends of launches that the sidecar finds.
        launches: Launches that are running.
        process: Running process of the run, or None.
        last_counters: Last value of each counter, by its index in COUNTERS.
        states: States of the run in all pages, in order.
    """

    def __init__(self, directory: Path) -> None:
        self.sidecar = SimulatedSidecar(directory)
        self.ends: list[ProcessEnd] = []
        self.launches = {LAUNCH}
        self.process: MonitoredJob | None = None
        self.last_counters: Mapping[int, float] = {}
        self.states: list[str] = []
        self._install_evidence()

    def _install_evidence(self) -> None:
        self.sidecar.collector.endings.evidence = ExitEvidence(
            ends=lambda: list(self.ends), launches=lambda: set(self.launches)
        )

    def play(self, action: str, amount: int) -> None:
        """Apply an action to the run, advance the clock by `amount` seconds, and check the page."""
        process = self.process
        if action == "start" and process is None:
            self._start_process(job_in_loop(first_step=amount))
        elif action == "evaluate" and process is None:
            self._start_process(SimulatedJob())
            self._job.spend("validation", float(amount))
        elif action == "launch ends" and process is None and self.launches:
            self.launches = set()
            self.ends.append(
                ProcessEnd(self.sidecar.directory, 99, amount % 2, self.sidecar.clock.wall, launch=LAUNCH)
            )
        elif action == "restart the sidecar":
            self.sidecar.restart()
            self._install_evidence()
        elif process is not None and action in {"exit", "crash"}:
            process.write(final=action == "exit")
            process.kill()
            self.process = None
        elif process is not None and self._job.loop:
            if action == "train":
                self._job.train(1 + amount % 5)
            elif action == "hold":
                self._job.hold(40.0 * amount)
            elif action == "save":
                self._job.save(1.0)
        self.advance(float(amount))

    @property
    def _job(self) -> SimulatedJob:
        assert self.process is not None
        return self.process.simulated

    def _start_process(self, job: SimulatedJob) -> None:
        self.process = MonitoredJob(self.sidecar, job)
        self.process.process = self.process.process.replace(launch=LAUNCH)

    def advance(self, seconds: float) -> None:
        """Write the feed, collect after some seconds, and check the page."""
        if self.process is not None:
            self.process.write()
        page = self.sidecar.collect_after(seconds)
        self._check_counters(page)
        self.states += [
            state for state in STATES if page.get("training_run_state", run="r", state=state) == 1
        ]
        if page.get("training_wall_seconds_total", run="r") is not None:
            check_seconds_add_up(page)

    def _check_counters(self, page: Page) -> None:
        current_counters = {
            index: value
            for index, (name, labels) in enumerate(COUNTERS)
            if (value := page.get(f"training_{name}", run="r", **labels)) is not None
        }
        for index, value in current_counters.items():
            assert value >= self.last_counters.get(index, 0.0) - 1e-6, COUNTERS[index]
        self.last_counters = {**self.last_counters, **current_counters}


ACTIONS = st.tuples(
    st.sampled_from(
        ("start", "train", "hold", "save", "exit", "crash", "evaluate", "launch ends", "restart the sidecar")
    ),
    st.integers(0, 30),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(ACTIONS, max_size=14))
def test_wall_time_is_the_sum_of_its_parts_and_no_counter_decreases_in_any_sequence_of_actions(
    actions: Sequence[tuple[str, int]],
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run = SimulatedRun(Path(directory))
        for action, amount in [("start", 0), ("train", 3), *actions]:
            run.play(action, amount)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(("evaluate", "exit", "crash", "launch ends")), st.integers(0, 30)),
        max_size=8,
    )
)
def test_a_finished_training_stays_finished_after_processes_that_do_not_train(
    actions: Sequence[tuple[str, int]],
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run = SimulatedRun(Path(directory))
        for action, amount in [("start", 0), ("train", 3), ("exit", 0)]:
            run.play(action, amount)
        run.advance(61.0)
        for action, amount in actions:
            run.play(action, amount)

    ended_states = [state for state in run.states if state in FINAL_STATES]
    assert set(ended_states) == {"finished"}
    assert run.states[run.states.index("finished") :] == ended_states
