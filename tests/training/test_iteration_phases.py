"""Phases and iterations that follow one another: a single clock reading ends a phase and starts the next phase.

The expected totals are those of blocks that are entered and left.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from training_support import fresh_recorder, publish_and_read

from exporter import training
from exporter.recording.recorder import RECORDER
from exporter.training.history import BIN_SECONDS
from exporter.training.iteration_phases import IterationPhases
from exporter.training.iterations import IterationBlock
from exporter.training.kinds import TRAINING_ITERATION
from exporter.training.recorder import TRAINING

PHASES_OF_A_STEP = ("data_loading", "forward", "backward", None, "optimizer")
"""Phases in the order in which a step enters them; None leaves the phase, so that the time is that of the iteration."""
NAMED_PHASES = [name for name in PHASES_OF_A_STEP if name]


@pytest.fixture(autouse=True)
def _recorder() -> Iterator[None]:
    with fresh_recorder():
        yield


def train_in_succession(steps: int) -> IterationPhases:
    """Train with iterations that follow one another in a single block."""
    iteration = IterationBlock(TRAINING_ITERATION)
    phases = IterationPhases(iteration)
    with training.training_loop(0):
        iteration.__enter__()
        for _ in range(steps):
            for name in PHASES_OF_A_STEP:
                phases.switch_to(name)
            phases.next_iteration()
        iteration.__exit__(None, None, None)
    return phases


@dataclass(frozen=True)
class Iteration:
    """A recorded iteration."""

    start_time: float
    end_time: float
    work_seconds: float
    wait_seconds: float


def recorded_iterations(train: Callable[[], object]) -> list[Iteration]:
    """Run a training, and return its recorded iterations. The recording thread waits meanwhile, and applies no records."""
    iterations = []

    def train_and_collect() -> None:
        TRAINING.records.clear()
        train()
        for record in TRAINING.records:
            if isinstance(record, tuple):
                start_time, end_time, work_seconds, wait_seconds, _, _ = record
                assert wait_seconds is not None
                iterations.append(Iteration(start_time, end_time, work_seconds, wait_seconds))

    assert RECORDER.thread.run_exclusively(train_and_collect)
    return iterations


def entries() -> Counter[str]:
    """Return the number of entries of each phase."""
    return Counter({name: totals.entries for name, totals in TRAINING.clock.phases.items()})


def test_phases_in_succession_are_counted_like_blocks() -> None:
    train_in_succession(50)
    duration_counts = {name: sum(TRAINING.clock.phases[name].cells) for name in NAMED_PHASES}

    assert entries() >= Counter({**dict.fromkeys(NAMED_PHASES, 50), "iteration": 50})
    assert duration_counts == dict.fromkeys(NAMED_PHASES, 50)


def test_seconds_of_phases_in_succession_sum_to_the_wall_time() -> None:
    start = TRAINING.clock.read()
    train_in_succession(200)
    end = TRAINING.clock.read()

    phase_seconds = sum(end.seconds.values()) - sum(start.seconds.values())
    assert phase_seconds == pytest.approx(end.time - start.time, abs=1e-6)
    assert TRAINING.clock.stack == [TRAINING.clock.base]


def test_an_iteration_in_succession_ends_at_the_start_of_the_next() -> None:
    iterations = recorded_iterations(lambda: train_in_succession(20))

    assert len(iterations) == 20 + 1  # the last iteration ends with the loop
    assert all(current.end_time == following.start_time for current, following in pairwise(iterations))
    assert all(
        0 <= iteration.work_seconds <= iteration.end_time - iteration.start_time + 1e-9
        for iteration in iterations
    )


def test_a_block_of_the_job_inside_a_phase_keeps_its_own_time() -> None:
    iteration = IterationBlock(TRAINING_ITERATION)
    phases = IterationPhases(iteration)
    with training.training_loop(0):
        iteration.__enter__()
        slept_seconds = 0.0
        for _ in range(3):
            phases.switch_to("forward")
            block = training.phase("logging")
            block.__enter__()
            start = time.monotonic()
            time.sleep(0.01)
            slept_seconds += time.monotonic() - start
            phases.switch_to("backward")  # the job's block is still open
            block.__exit__(None, None, None)
            phases.switch_to("optimizer")
            phases.next_iteration()
        iteration.__exit__(None, None, None)

    assert TRAINING.clock.phases["logging"].seconds == pytest.approx(slept_seconds, abs=0.02)
    assert entries()["backward"] == entries()["forward"] == 3
    assert TRAINING.clock.stack == [TRAINING.clock.base]


def test_a_phase_of_the_job_around_an_edge_counts_once() -> None:
    iteration = IterationBlock(TRAINING_ITERATION)
    phases = IterationPhases(iteration)
    with training.training_loop(0):
        iteration.__enter__()
        for _ in range(20):
            # The job's own block has the phase that the loader's hook enters.
            with training.phase("data_loading"):
                phases.switch_to("data_loading")
                phases.switch_to("forward")
            for name in ("backward", None, "optimizer"):
                phases.switch_to(name)
            phases.next_iteration()
        iteration.__exit__(None, None, None)

    for name in ("data_loading", "forward", "backward", "optimizer"):
        totals = TRAINING.clock.phases[name]
        assert sum(totals.cells) == totals.entries
        assert totals.duration_seconds == pytest.approx(totals.seconds, abs=1e-6)
    assert entries()["forward"] == 20


def test_an_edge_inside_a_span_of_the_job_starts_the_next_phase_in_the_span() -> None:
    iteration = IterationBlock(TRAINING_ITERATION)
    phases = IterationPhases(iteration)
    train_in_succession(2)
    seconds_before = TRAINING.clock.phases["backward"].seconds
    with training.training_loop(0):
        iteration.__enter__()
        phases.switch_to("forward")
        with training.span("x"):
            phases.switch_to("backward")
            with training.phase("zero_grad"):
                pass
            start = time.monotonic()
            time.sleep(0.02)
            slept_seconds = time.monotonic() - start
        phases.next_iteration()
        iteration.__exit__(None, None, None)

    assert TRAINING.clock.phases["backward"].seconds - seconds_before >= slept_seconds


# Usual steps: the edges are deferred, and counted together at the end of the step --------------------------------


class UsualLoop:
    """Loop that stores its edges as the hooks on torch do.

    Attributes:
        phases: The phases that the edges switch.
        deferred_steps: Number of steps whose last edge was deferred.
        short_steps: Number of steps shorter than half a bin. A longer step, as on a busy machine, may not be deferred.
    """

    def __init__(self) -> None:
        self.phases = IterationPhases(IterationBlock(TRAINING_ITERATION))
        self.phases.defers = True
        self.deferred_steps = 0
        self.short_steps = 0

    def run(self, steps: int, batches: int = 1, seconds: float = 0.0) -> None:
        """Run a training loop. Each backward pass lasts *seconds*."""
        with training.training_loop(0):
            self.phases.iteration.__enter__()
            for _ in range(steps):
                self.step(batches, seconds)
            self.phases.end()
            self.phases.iteration.__exit__(None, None, None)

    def step(self, batches: int = 1, seconds: float = 0.0, *, is_skipped: bool = False) -> None:
        """Run a step of several accumulated batches. A skipped step has no step of the optimizer."""
        start = time.monotonic()
        for _ in range(batches):
            if time.monotonic() < TRAINING.clock.step_edges.limit:
                self.phases.count_batch()  # the pending edges of the previous batch
            self.edge("fetch_began", "data_loading")
            self.edge("forward_began", "forward")
            self.edge("backward_began", "backward")
            time.sleep(seconds)
            self.edge("backward_ended", None)
        if not is_skipped:
            self.deferred_steps += self.edge("optimizer_began", "optimizer")
        self.short_steps += time.monotonic() - start < BIN_SECONDS / 2
        self.phases.next_iteration()

    def edge(self, name: str, phase: str | None) -> bool:
        """Enter a phase at an edge. Returns True if the edge was deferred, which means stored until the end of the step."""
        edge_time, step_edges = time.monotonic(), TRAINING.clock.step_edges
        if edge_time < step_edges.limit:
            setattr(step_edges, name, edge_time)
            return True
        self.phases.switch_to(phase)
        return False


@pytest.mark.parametrize("batches", [1, 4])
def test_usual_steps_are_counted_like_blocks(batches: int) -> None:
    loop = UsualLoop()
    loop.run(2000, batches)
    loop_entries = {name: entries()[name] for name in NAMED_PHASES}
    duration_counts = {name: sum(TRAINING.clock.phases[name].cells) for name in NAMED_PHASES}

    assert loop.deferred_steps > 1000
    assert loop_entries == dict.fromkeys(NAMED_PHASES, 2000 * batches) | {"optimizer": 2000}
    assert duration_counts == loop_entries
    assert entries()["iteration"] == 2000 + 1  # the last iteration ends with the loop
    for name in NAMED_PHASES:
        totals = TRAINING.clock.phases[name]
        assert totals.duration_seconds == pytest.approx(totals.seconds, abs=1e-6)


def test_a_step_during_which_a_bin_of_the_history_ends_is_a_usual_step() -> None:
    loop = UsualLoop()
    loop.run(200, seconds=0.002)
    history = TRAINING.clock.read().history
    history_seconds = dict.fromkeys(history.phases, 0.0)
    for group in history.groups:
        for index, microseconds in zip(group[::2], group[1::2], strict=True):
            history_seconds[history.phases[index]] += microseconds / 1e6

    assert loop.deferred_steps > loop.short_steps - 10
    assert entries()["backward"] == sum(TRAINING.clock.phases["backward"].cells) == 200
    assert history_seconds["backward"] == pytest.approx(
        TRAINING.clock.phases["backward"].seconds, abs=BIN_SECONDS
    )


def test_seconds_of_usual_steps_sum_to_the_wall_time_and_to_the_records() -> None:
    start = TRAINING.clock.read()
    loop = UsualLoop()
    iterations = recorded_iterations(lambda: loop.run(2000, batches=2))
    end = TRAINING.clock.read()
    increase = {name: seconds - start.seconds.get(name, 0.0) for name, seconds in end.seconds.items()}

    assert len(iterations) == 2000 + 1  # the last iteration ends with the loop
    assert sum(increase.values()) == pytest.approx(end.time - start.time, abs=1e-6)
    assert sum(record.wait_seconds for record in iterations) == pytest.approx(increase["data_loading"])
    assert sum(record.work_seconds for record in iterations) == pytest.approx(
        sum(increase[name] for name in ("iteration", "forward", "backward", "optimizer"))
    )


def test_a_step_that_a_gradient_scaler_skips_counts_its_batch_once() -> None:
    loop = UsualLoop()

    def run() -> None:
        with training.training_loop(0):
            loop.phases.iteration.__enter__()
            for index in range(500):
                is_skipped = index % 5 == 4
                loop.step(is_skipped=is_skipped)
                if is_skipped:  # the step of a second optimizer follows without a batch
                    loop.edge("optimizer_began", "optimizer")
                    loop.phases.next_iteration()
            loop.phases.end()
            loop.phases.iteration.__exit__(None, None, None)

    iterations = recorded_iterations(run)

    assert {name: entries()[name] for name in NAMED_PHASES} == dict.fromkeys(NAMED_PHASES, 500)
    assert all(record.wait_seconds >= 0 and record.work_seconds > 0 for record in iterations)
    assert sum(record.wait_seconds for record in iterations) == pytest.approx(
        TRAINING.clock.phases["data_loading"].seconds
    )


def test_a_block_of_the_job_between_deferred_edges_has_its_own_time() -> None:
    loop, slept_seconds = UsualLoop(), 0.0
    with training.training_loop(0):
        loop.phases.iteration.__enter__()
        for index in range(200):
            loop.edge("fetch_began", "data_loading")
            loop.edge("forward_began", "forward")
            if index % 10 == 9:
                with training.phase("logging"):
                    start = time.monotonic()
                    time.sleep(0.001)
                    slept_seconds += time.monotonic() - start
            loop.edge("backward_began", "backward")
            loop.edge("backward_ended", None)
            loop.deferred_steps += loop.edge("optimizer_began", "optimizer")
            loop.phases.next_iteration()
        loop.phases.end()
        loop.phases.iteration.__exit__(None, None, None)

    assert loop.deferred_steps > 50
    assert TRAINING.clock.phases["logging"].seconds == pytest.approx(slept_seconds, abs=0.02)
    assert {name: entries()[name] for name in NAMED_PHASES} == dict.fromkeys(NAMED_PHASES, 200)
    assert TRAINING.clock.stack == [TRAINING.clock.base]


def test_a_reader_in_another_thread_sees_deferred_edges_and_no_phase_that_loses_a_millisecond() -> None:
    worst_error, largest_decrease, stop = 0.0, 0.0, threading.Event()
    active_counts = Counter[str]()

    def read() -> None:
        nonlocal worst_error, largest_decrease
        previous: dict[str, float] = {}
        while not stop.is_set():
            reading = TRAINING.clock.read()
            wall_seconds = reading.time - TRAINING.clock.began
            worst_error = max(worst_error, abs(sum(reading.seconds.values()) - wall_seconds))
            decreases = [previous[name] - reading.seconds.get(name, 0.0) for name in previous]
            largest_decrease = max([largest_decrease, *decreases])
            previous = reading.seconds
            active_counts[reading.active] += 1
            time.sleep(0.0001)

    thread = threading.Thread(target=read)
    thread.start()
    loop = UsualLoop()
    loop.run(1000, seconds=0.0005)
    stop.set()
    thread.join()

    assert loop.deferred_steps > 300
    assert worst_error < 1e-6
    assert largest_decrease < 0.001
    assert active_counts["backward"] > active_counts["optimizer"]


def test_a_reader_sees_the_phase_of_a_deferred_edge_and_its_start() -> None:
    loop = UsualLoop()
    with training.training_loop(0):
        loop.phases.iteration.__enter__()
        for _ in range(3):
            loop.step()
        loop.edge("fetch_began", "data_loading")
        was_deferred = loop.edge("forward_began", "forward")
        start = TRAINING.clock.step_edges.forward_began
        reading = TRAINING.clock.read()
        loop.phases.end()
        loop.phases.iteration.__exit__(None, None, None)

    assert was_deferred
    assert (reading.active, reading.active_since) == ("forward", start)


def test_an_exception_at_any_line_of_a_usual_step_never_breaks_the_sum() -> None:
    executed_lines, long_seconds = 0, 0.0
    files = ("iteration_phases.py", "clock.py", "step_edges.py", "totals.py", "iterations.py")

    def interrupt(frame: Any, event: str, _: object) -> Any:
        nonlocal executed_lines
        if frame.f_code.co_filename.endswith(tuple(f"training/{file}" for file in files)):
            executed_lines += event == "line"
            if event == "line" and executed_lines == line_limit:
                raise MemoryError
            return interrupt
        return None

    loop = UsualLoop()
    with training.training_loop(0):
        loop.phases.iteration.__enter__()
        loop.step()
        for line_limit in range(1, 240):  # noqa: B007  # read by the trace function
            loop.step()
            executed_lines, start = 0, time.monotonic()
            sys.settrace(interrupt)
            try:
                loop.step()
            except MemoryError:
                pass
            finally:
                sys.settrace(None)
            seconds = time.monotonic() - start
            long_seconds += seconds if seconds > 0.005 else 0.0
        loop.run(3)
    clock, end_time = TRAINING.clock, time.monotonic()

    assert executed_lines < line_limit, "the last lines of the step were not interrupted"
    phase_seconds = sum(clock.read(end_time).seconds.values())
    # An exception between two lines that no call separates loses the time since the previous edge, which is long only if the machine
    # was busy.
    assert phase_seconds == pytest.approx(end_time - clock.began, abs=0.05 + long_seconds)
    assert publish_and_read().phase == "other"


def test_a_signal_handler_that_enters_blocks_never_breaks_the_sum_of_usual_steps() -> None:
    handler_calls = 0

    def handle(*_: object) -> None:
        nonlocal handler_calls
        handler_calls += 1
        with training.checkpoint_save(handler_calls), training.phase("logging"):
            pass

    old_handler = signal.signal(signal.SIGALRM, handle)
    loop = UsualLoop()
    try:
        # The interval is longer than a call of the handler on a busy machine.
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        start = time.monotonic()
        with training.training_loop(0):
            loop.phases.iteration.__enter__()
            while (seconds := time.monotonic() - start) < 1.0 or (handler_calls <= 20 and seconds < 60.0):
                loop.step()
            loop.phases.end()
            loop.phases.iteration.__exit__(None, None, None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # discards a pending signal
        signal.signal(signal.SIGALRM, old_handler)
    clock, end_time = TRAINING.clock, time.monotonic()

    assert handler_calls > 20
    assert loop.deferred_steps > 0
    assert sum(clock.read(end_time).seconds.values()) == pytest.approx(end_time - clock.began, abs=1e-6)
    assert clock.stack == [clock.base]


def test_a_forked_child_discards_the_deferred_edges_of_its_parent() -> None:
    loop = UsualLoop()
    with training.training_loop(0):
        loop.phases.iteration.__enter__()
        loop.step()
        loop.edge("fetch_began", "data_loading")
        child = os.fork()
        if child == 0:
            clock = TRAINING.clock
            seconds = sum(clock.read().seconds.values())
            is_new = clock.deferring is None and not loop.edge("forward_began", "forward")
            os._exit(0 if is_new and seconds < 5.0 else 1)
        _, status = os.waitpid(child, 0)
        loop.edge("forward_began", "forward")
        loop.phases.end()
        loop.phases.iteration.__exit__(None, None, None)

    assert os.waitstatus_to_exitcode(status) == 0
