"""Phase clock: the seconds of all phases sum to the wall time, also with overlapping blocks, tasks, signals and errors."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
import time
from bisect import bisect_left
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from training_support import (
    SimulatedTraining,
    fresh_recorder,
    misuse_counts,
    publish_and_read,
    published_value,
    summary_values,
    train,
    values_by_label,
)

from exporter import training
from exporter.recording.exponential import bucket_of
from exporter.training import kinds
from exporter.training.blocks import HotBlock
from exporter.training.clock import MAX_STACK_ENTRIES, PhaseClock, StackEntry
from exporter.training.durations import CELLS, classic_buckets, native_buckets
from exporter.training.metrics import PHASE_BUCKETS
from exporter.training.phases import PHASES
from exporter.training.recorder import TRAINING
from exporter.training.records import Expectation, IterationEnded
from exporter.training.spans import Span

PHASES_OR_NONE = ["iteration", "validation", "data_loading", "forward", "backward", "grad_sync", None]
ACTIONS = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from(PHASES_OR_NONE)),
    st.tuples(st.just("leave"), st.integers(0, 9)),
)


def total_seconds(clock: PhaseClock, end_seconds: float) -> float:
    """Return the sum of the seconds of all phases until *end_seconds*."""
    return sum(clock.read(end_seconds).seconds.values())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(ACTIONS, st.floats(0, 3, allow_nan=False)), max_size=60))
def test_the_seconds_of_all_phases_sum_to_the_wall_time_if_blocks_end_in_any_order(
    timed_actions: list[tuple[tuple[str, Any], float]],
) -> None:
    start_seconds = now_seconds = 2.0
    clock, open_entries = PhaseClock(start_seconds), list[StackEntry]()
    for (action, argument), seconds in timed_actions:
        now_seconds += seconds
        if action == "enter":
            open_entries.append(StackEntry())
            clock.enter(open_entries[-1], argument, now_seconds)
        elif open_entries:
            clock.leave(open_entries.pop(argument % len(open_entries)), now_seconds)
        assert total_seconds(clock, now_seconds + 1) == pytest.approx(now_seconds + 1 - start_seconds)
        assert clock.active is clock.stack[-1].totals

    assert all(totals.seconds >= 0 for totals in clock.phases.values())
    assert set(clock.phases) == set(PHASES)


BLOCKS: dict[str, Any] = {
    "training_iteration": training.training_iteration,
    "validation_loop": training.validation_loop,
    "data_loading": training.data_loading,
    "model_forward": training.model_forward,
    "span": lambda: training.span("own"),
}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.sampled_from([*BLOCKS, "failure"]), max_size=8), max_size=5))
def test_blocks_of_tasks_that_fail_and_overlap_sum_to_the_wall_time(tasks: list[list[str]]) -> None:
    async def run(block_names: list[str]) -> None:
        if block_names and block_names[0] == "failure":
            raise ValueError
        if block_names:
            with BLOCKS[block_names[0]]():
                await asyncio.sleep(0)
                await run(block_names[1:])
                await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*map(run, tasks), return_exceptions=True)

    with fresh_recorder():
        start_time = time.monotonic()
        asyncio.run(main())
        train()
        end_time = time.monotonic()
        clock = TRAINING.clock

        assert total_seconds(clock, end_time) == pytest.approx(end_time - clock.began)
        assert clock.began <= start_time
        assert len(clock.stack) == 1


def test_the_phase_is_validation_until_the_last_of_two_validating_tasks_has_ended() -> None:
    outer_times, inner_times = [], []

    async def validate(seconds: float) -> None:
        outer_times.append(time.monotonic())
        with training.validation_loop():
            inner_times.append(time.monotonic())
            await asyncio.sleep(seconds)
            inner_times.append(time.monotonic())
        outer_times.append(time.monotonic())

    async def main() -> None:
        await asyncio.gather(validate(0.1), validate(0.3))

    with fresh_recorder():
        train()
        asyncio.run(main())
        time.sleep(0.05)

        min_seconds, max_seconds = (max(times) - min(times) for times in (inner_times, outer_times))
        assert min_seconds <= (published_value("training.phase", phase="validation") or 0.0) <= max_seconds
        assert publish_and_read().phase == "other"


def test_the_end_of_a_block_also_ends_the_open_blocks_inside() -> None:
    with fresh_recorder():
        with training.validation_loop():
            training.model_forward().__enter__()
            training.span("left open").__enter__()
        train()

        assert publish_and_read().phase == "other"
        assert published_value("training.span_duration", span="left open") == 1
        assert misuse_counts() == {}


def test_a_block_object_can_be_entered_again_while_open() -> None:
    block = HotBlock(kinds.MODEL_FORWARD)
    with fresh_recorder():
        with block, training.data_loading(), block:
            assert publish_and_read().phase == "forward"
        with block:
            pass

        assert published_value("training.phase_entries", phase="forward") == 3
        assert publish_and_read().phase == "init"


def test_time_before_the_first_step_is_init_and_afterwards_other() -> None:
    job = SimulatedTraining(start_seconds=0.0)
    job.enter(kinds.TRAINING_ITERATION, 3.0)
    job.run_block(kinds.DATA_LOADING, 3.0, 4.0)
    job.run_block(kinds.MODEL_FORWARD, 4.5, 6.0)
    job.leave(7.0)
    job.publish(10.0)

    assert job.last_published().phases == pytest.approx(
        {"init": 3.0, "data_loading": 1.0, "iteration": 1.5, "forward": 1.5, "other": 3.0}
    )


def test_the_active_phase_is_the_innermost_open_phase_with_its_start_time() -> None:
    job = SimulatedTraining(start_seconds=0.0)
    job.enter(kinds.TRAINING_ITERATION, 3.0)
    job.enter(kinds.DATA_LOADING, 4.0)
    values_in_loading = job.values(5.0)
    reading = job.last_published()
    job.leave(6.0)
    values_after_loading = job.values(7.0)

    for values, phase, since_seconds in (
        (values_in_loading, "data_loading", 4.0),
        (values_after_loading, "iteration", 6.0),
    ):
        active_labels = [
            labels for (name, labels), value in values.items() if name == "training.phase_active" and value
        ]
        assert active_labels == [(("phase", phase),)]
        assert values["training.phase_active_since_timestamp", ()] == since_seconds
    assert (reading.phase, reading.phase_since) == ("data_loading", 4.0)


def test_a_phase_inside_the_same_phase_is_one_phase() -> None:
    job = SimulatedTraining(start_seconds=0.0)
    job.enter(kinds.VALIDATION_LOOP, 1.0)
    job.run_block(kinds.VALIDATION_ITERATION, 2.0, 3.0)
    job.leave(5.0)

    values = job.values(6.0)
    assert values["training.phase_entries", (("phase", "validation"),)] == 1
    assert values["training.phase_duration", (("phase", "validation"),)][:2] == (1, 4.0)


def test_the_ideal_step_excludes_slow_steps_and_their_excess_is_counted() -> None:
    job, now_seconds = SimulatedTraining(start_seconds=0.0), 1.0
    for step in range(60):
        step_seconds = 30.0 if step in {0, 40} else 2.0
        job.run_block(kinds.TRAINING_ITERATION, now_seconds, now_seconds + step_seconds)
        now_seconds += step_seconds

    values = job.values(now_seconds)
    assert values["training.step_ideal", ()] == pytest.approx(2.0)
    # The excess is that of step 40, because the first step is start-up.
    assert values["training.slow_step_excess", ()] == pytest.approx(28.0)
    assert values["training.step_longest", ()] == 30.0
    assert values["training.step_duration", (("mode", "train"),)][0] == 60


def test_a_block_left_open_by_an_ended_task_is_closed() -> None:
    async def leave_open() -> None:
        training.training_iteration().__enter__()

    async def main() -> None:
        await asyncio.gather(leave_open(), leave_open())
        with training.training_iteration():
            await asyncio.sleep(0.01)

    with fresh_recorder():
        asyncio.run(main())

        reading = publish_and_read()
        assert (reading.steps, reading.open_seconds, reading.phase) == (1, 0.0, "other")
        assert reading.work_seconds >= 0.01


def test_a_block_stays_open_if_a_task_that_has_ended_used_the_same_kind_of_block() -> None:
    async def load() -> None:
        with training.data_loading():
            pass

    with fresh_recorder():
        train()
        asyncio.run(load())
        with training.data_loading():
            # Longer than a bin of the history, at whose end blocks of ended tasks are removed.
            time.sleep(0.05)
            with training.model_forward():
                pass

            assert TRAINING.clock.active.name == "data_loading"


def test_an_unknown_phase_is_recorded_as_a_span_and_reported_once() -> None:
    with fresh_recorder():
        name = f"fordward{time.monotonic_ns()}"
        for _ in range(3):
            with training.phase(name):
                pass

        assert misuse_counts() == {("phase", "unknown_phase"): 1}
        assert published_value("training.phase_entries", phase=name) is None
        assert published_value("training.span_duration", span=name) == 3


def test_spans_with_an_empty_name_or_with_too_many_names_count_for_the_surrounding_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert kinds.named_kind("", is_phase=False).phase is None

    monkeypatch.setattr(kinds, "MAX_USER_KINDS", 0)

    further_kind = kinds.named_kind(f"name{time.monotonic_ns()}", is_phase=False)
    assert (further_kind.span_name, further_kind.phase) == ("other", None)
    assert kinds.named_kind("restart", is_phase=True).phase == "restart"  # the name of a phase has no limit


def test_the_name_of_a_span_is_printable_and_limited() -> None:
    assert kinds.named_kind("two\nlines" * 99, is_phase=False).span_name == ("two?lines" * 99)[:256]


def test_a_signal_handler_that_enters_blocks_never_breaks_the_sum_and_no_seconds_decrease() -> None:
    handler_calls = 0
    last_seconds: dict[str, float] = {}

    def handle(*_: object) -> None:
        nonlocal handler_calls
        handler_calls += 1
        with training.checkpoint_save(handler_calls), training.model_backward():
            pass

    old_handler = signal.signal(signal.SIGALRM, handle)
    with fresh_recorder():
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline:
                with training.training_iteration(), training.model_forward():
                    training.record(loss=1.0)
                for name, totals in TRAINING.clock.phases.items():
                    assert totals.seconds >= last_seconds.get(name, 0.0)
                    last_seconds[name] = totals.seconds
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            # Ignoring the signal discards a pending one, which could end the process.
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.signal(signal.SIGALRM, old_handler)
        end_time, clock = time.monotonic(), TRAINING.clock

        assert handler_calls > 20
        assert total_seconds(clock, end_time) == pytest.approx(end_time - clock.began, abs=1e-6)
        assert len(clock.stack) == 1


def test_an_exception_at_any_line_of_a_block_never_breaks_the_sum() -> None:
    executed_lines, long_seconds = 0, 0.0

    def interrupt(frame: Any, event: str, _: object) -> Any:
        nonlocal executed_lines
        if frame.f_code.co_filename.endswith(
            ("training/blocks.py", "training/iterations.py", "training/clock.py")
        ):
            executed_lines += event == "line"
            if event == "line" and executed_lines == line_limit:
                raise MemoryError
            return interrupt
        return None

    with fresh_recorder():
        train()
        line_limit = executed_lines = 0
        while executed_lines == line_limit:  # until no line is left to interrupt
            line_limit, executed_lines, start = line_limit + 1, 0, time.monotonic()
            sys.settrace(interrupt)
            try:
                with training.training_iteration(), training.model_forward():
                    pass
            except MemoryError:
                pass
            finally:
                sys.settrace(None)
            seconds = time.monotonic() - start
            long_seconds += seconds if seconds > 0.005 else 0.0
        train(3)
        end_time, clock = time.monotonic(), TRAINING.clock

        assert line_limit > 40
        # An exception between two lines that no call separates loses the time since the previous edge, which is long only if the
        # machine was busy.
        tolerance_seconds = 0.05 + long_seconds
        assert total_seconds(clock, end_time) == pytest.approx(end_time - clock.began, abs=tolerance_seconds)


def test_a_reader_in_another_thread_sees_the_wall_time_within_20_ms() -> None:
    worst_error, reads, stop = 0.0, 0, threading.Event()

    def read() -> None:
        nonlocal worst_error, reads
        while not stop.is_set():
            reading = TRAINING.clock.read()
            wall_seconds = reading.time - TRAINING.clock.began
            worst_error = max(worst_error, abs(sum(reading.seconds.values()) - wall_seconds))
            reads += 1

    with fresh_recorder():
        train()
        thread = threading.Thread(target=read)
        thread.start()
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            with training.training_iteration(), training.model_forward():
                pass
        stop.set()
        thread.join()

    assert reads > 10
    assert worst_error < 0.02


def test_blocks_that_are_never_left_do_not_stay_in_memory() -> None:
    with fresh_recorder():
        for index in range(3000):
            training.span(f"span {index % 7}").__enter__()
            training.on_validation_start()
            training.model_forward().__enter__()
        gc.collect()
        spans_in_memory = sum(type(candidate) is Span for candidate in gc.get_objects())

        assert spans_in_memory < 2 * MAX_STACK_ENTRIES + 200
        assert len(TRAINING.clock.stack) <= MAX_STACK_ENTRIES + 1  # the base is on the stack too
        train()
        assert published_value("training.steps", mode="train") == 1


def test_tasks_with_callbacks_that_never_end_do_not_stay_in_memory() -> None:
    async def leave_blocks_open() -> None:
        training.on_training_single_iteration_start()
        training.on_validation_start()

    async def main() -> int:
        for _ in range(2000):
            await asyncio.create_task(leave_blocks_open())
        train()
        gc.collect()
        return sum(type(candidate) is asyncio.Task for candidate in gc.get_objects())

    with fresh_recorder():
        train()
        tasks_in_memory = asyncio.run(main())
        summary_values()

        assert tasks_in_memory < 10
        assert len(TRAINING.clock.stack) == 1


@given(st.lists(st.floats(0, 1e4, allow_nan=False), max_size=50))
@example([0.7])
@example([1.09])
@example([1.4])
def test_durations_have_the_classic_and_native_buckets_of_a_histogram(durations: list[float]) -> None:
    cells = [0] * (len(CELLS) + 1)
    native: dict[int, int] = {}
    for seconds in durations:
        cells[bisect_left(CELLS, seconds)] += 1
        if seconds > 1e-6:
            native[bucket_of(seconds)] = native.get(bucket_of(seconds), 0) + 1

    classic = classic_buckets(cells, PHASE_BUCKETS)
    assert [sum(classic[: index + 1]) for index in range(len(PHASE_BUCKETS))] == [
        sum(seconds <= bound for seconds in durations) for bound in PHASE_BUCKETS
    ]
    buckets = native_buckets(cells)
    assert {bucket: count for bucket, count in buckets.items() if bucket in native} == native
    assert sum(buckets.values()) == len(durations)


def test_phases_of_another_thread_do_not_affect_the_main_thread() -> None:
    with fresh_recorder():
        train()
        thread = threading.Thread(target=train, args=(3, 0.01))
        thread.start()
        thread.join()

        assert published_value("training.steps", mode="train") == 4
        assert values_by_label("training.phase_entries")["iteration"] == 1


def test_threads_that_train_at_the_same_time_raise_nothing_and_lose_no_iteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interval_seconds = sys.getswitchinterval()
    thread_errors: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", thread_errors.append)
    with fresh_recorder():
        train()
        sys.setswitchinterval(1e-5)
        try:
            threads = [threading.Thread(target=train, args=(4000, 0)) for _ in range(4)]
            for thread in threads:
                thread.start()
            train(4000, 0)
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval_seconds)

        assert thread_errors == []
        assert published_value("training.steps", mode="train") == 20_001


iterations = st.lists(
    st.tuples(
        st.just(0.0),  # start time
        st.floats(0.001, 10.0),  # end time
        st.floats(0.0, 10.0),  # seconds of work
        st.none() | st.floats(0.0, 10.0),  # seconds of waiting
        st.booleans(),  # True if the iteration has failed
        st.none() | st.just(Expectation(samples=4.0, tokens=None)),
    ),
    max_size=30,
)


@given(iterations)
def test_iterations_applied_together_count_as_iterations_applied_one_by_one(
    records: list[IterationEnded],
) -> None:
    together, one_by_one = SimulatedTraining(), SimulatedTraining()
    together.state.apply(records)
    for record in records:
        one_by_one.apply(record)

    actual, expected = together.values(400.0), one_by_one.values(400.0)
    assert actual.keys() == expected.keys()
    for key, value in actual.items():
        assert value == pytest.approx(expected[key]), key
    actual_reading, expected_reading = together.last_published(), one_by_one.last_published()
    assert actual_reading.step == expected_reading.step
    assert actual_reading.work_seconds == pytest.approx(expected_reading.work_seconds)
    assert actual_reading.failed_seconds == pytest.approx(expected_reading.failed_seconds)
