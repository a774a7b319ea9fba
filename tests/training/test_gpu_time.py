"""Device time of phases: on a stand-in for CUDA, and on a GPU if the machine has one."""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from training_support import fresh_recorder, published_value, summary_values, train, values_by_label

from exporter import training
from exporter.bridges.loop import Level, LoopTracker
from exporter.training import kinds
from exporter.training.gpu_time import GpuTimer
from exporter.training.metrics import Families
from exporter.training.recorder import TRAINING

STEPS = 20


@dataclass
class Device:
    """Stand-in for a CUDA stream: kernels run in order on simulated time, and the host continues at once.

    Attributes:
        host_time: Simulated time of the host, in seconds.
        busy_until: Time at which the last queued kernel ends, in seconds.
        is_capturing: Whether the stream captures a CUDA graph.
        is_broken: Whether each CUDA call raises.
        event_calls: Number of calls of event methods, including those that raise.
        recorded_events: Number of events recorded without an error.
        threads: Identifiers of the threads that recorded events.
    """

    host_time: float = 0.0
    busy_until: float = 0.0
    is_capturing: bool = False
    is_broken: bool = False
    event_calls: int = 0
    recorded_events: int = 0
    threads: set[int] = field(default_factory=set)

    def kernel(self, seconds: float, *, queueing_seconds: float = 0.001) -> None:
        """Queue a kernel that runs for some seconds."""
        self.host_time += queueing_seconds
        self.busy_until = max(self.busy_until, self.host_time) + seconds

    def synchronize(self) -> None:
        raise AssertionError("the job would wait for the GPU")


class Event:
    """Stand-in for `torch.cuda.Event`, with the methods that the exporter uses."""

    device: Device

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        assert enable_timing
        self.completion_time: float | None = None

    def record(self, stream: Any = None) -> None:
        device = self.device
        device.event_calls += 1
        if device.is_capturing or device.is_broken:
            raise RuntimeError("CUDA error: operation not permitted")
        device.recorded_events += 1
        device.threads.add(threading.get_ident())
        self.completion_time = max(device.busy_until, device.host_time)

    def query(self) -> bool:
        self.device.event_calls += 1
        assert not self.device.is_capturing
        if self.device.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.completion_time is not None and self.device.host_time >= self.completion_time

    def elapsed_time(self, end_event: Event) -> float:
        assert self.query(), "both events must be completed"
        assert end_event.query(), "both events must be completed"
        assert self.completion_time is not None
        assert end_event.completion_time is not None
        return 1000 * (end_event.completion_time - self.completion_time)

    def synchronize(self) -> None:
        raise AssertionError("the job would wait for the GPU")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Yield the device of a job that uses CUDA, with a fresh recorder."""
    device = Device()
    cuda = SimpleNamespace(
        Event=type("Event", (Event,), {"device": device}),
        is_initialized=lambda: True,
        is_current_stream_capturing=lambda: device.is_capturing,
        synchronize=device.synchronize,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    with fresh_recorder():
        # Steps are seconds apart on the simulated clock.
        timer = GpuTimer({"EXPORTER_GPU_TIME": "1"}, clock=itertools.count(0.0, 1.0).__next__)
        monkeypatch.setattr(TRAINING, "gpu", timer)
        # The step duration is evaluated when a test reads it, independent of the recording thread.
        drain = TRAINING.drain
        main_thread = threading.get_ident()
        monkeypatch.setattr(
            TRAINING,
            "drain",
            lambda *arguments: drain(*arguments) if threading.get_ident() == main_thread else None,
        )
        yield device


def run_step(device: Device, *, loading_seconds: float = 0.010) -> None:
    """Run a step: data loading, kernels of 20, 40 and 5 ms queued within 3 ms, and 8 ms of real time."""
    with training.data_loading():
        device.host_time += loading_seconds
    with training.training_iteration():
        with training.model_forward():
            device.kernel(0.020)
        with training.model_backward():
            device.kernel(0.040)
        with training.optimizer_update():
            device.kernel(0.005)
        time.sleep(0.008)  # steps that are shorter than 5 ms are not timed


def warm_up(step: Callable[[], None]) -> None:
    """Train until the recording thread has measured that steps are long enough."""
    train(STEPS, 0.012)
    summary_values()
    step()  # partly observed: the timing starts within this step


def finish(device: Device) -> dict[Any, Any]:
    """End the timing, complete all device work, and read the events."""
    for _ in range(2):
        train()
        device.host_time += 10.0
    return summary_values()


def test_the_device_time_of_a_phase_of_the_main_thread_is_that_of_its_kernels(
    device: Device,
) -> None:
    warm_up(lambda: run_step(device))
    for _ in range(5):
        run_step(device)
    totals = finish(device)
    worker = threading.Thread(target=run_step, args=[device])
    worker.start()
    worker.join()

    step_total = totals["training.gpu_timed_steps", ()]
    assert step_total >= 5
    seconds_per_step = {
        phase: seconds / step_total for phase, seconds in values_by_label("training.phase_gpu").items()
    }
    assert seconds_per_step["forward"] == pytest.approx(0.020, rel=0.1)
    assert seconds_per_step["backward"] == pytest.approx(0.040, rel=0.1)
    assert seconds_per_step["optimizer"] == pytest.approx(0.005, rel=0.1)
    assert totals["training.step_gpu_duration", ()] == step_total
    assert device.threads == {threading.get_ident()}


@pytest.mark.parametrize(
    ("loading_seconds", "idle_seconds"), [(0.010, 0.0), (0.100, 0.038)], ids=["hidden", "starved"]
)
def test_the_idle_time_between_steps_is_the_data_loading_that_queued_work_does_not_hide(
    device: Device, loading_seconds: float, idle_seconds: float
) -> None:
    warm_up(lambda: run_step(device, loading_seconds=loading_seconds))
    for _ in range(6):
        run_step(device, loading_seconds=loading_seconds)
    totals = finish(device)
    idle_seconds_per_step = (
        totals["training.gpu_idle_between_steps", ()] / totals["training.gpu_timed_steps", ()]
    )

    # The host needs 3 ms to queue 65 ms of work. With 100 ms for a batch, the device idles for 100 + 3 - 65 = 38 ms.
    assert idle_seconds_per_step == pytest.approx(idle_seconds, abs=0.008)


def test_pending_device_events_are_read_later_without_waiting(device: Device) -> None:
    warm_up(lambda: None)
    initial_steps = finish(device).get(("training.gpu_timed_steps", ()), 0)
    run_step(device, loading_seconds=0.0)
    run_step(device, loading_seconds=0.0)
    early_steps = published_value("training.gpu_timed_steps") - initial_steps
    finish(device)

    assert early_steps <= 2  # the steps of `finish`
    assert published_value("training.gpu_timed_steps") - initial_steps >= 4


def test_no_cuda_call_is_made_during_graph_capture(device: Device) -> None:
    warm_up(lambda: run_step(device))
    run_step(device)  # leaves events that the device has not completed
    device.is_capturing = True
    calls_before_capture = device.event_calls
    with training.training_iteration(), training.model_forward():
        device.kernel(0.020)
    run_step(device)
    calls_after_capture = device.event_calls
    device.is_capturing = False
    for _ in range(3):
        run_step(device)
        device.host_time += 1.0

    assert calls_after_capture == calls_before_capture
    assert published_value("training.gpu_timed_steps") >= 1


def test_a_cuda_error_ends_the_timing_and_not_the_job(device: Device) -> None:
    warm_up(lambda: run_step(device))
    device.is_broken = True
    for _ in range(3):
        run_step(device)
    device.is_broken = False
    initial_events = device.recorded_events
    summary_values()
    run_step(device)

    assert device.recorded_events == initial_events


def test_a_cuda_error_at_the_start_of_a_step_does_not_reach_the_job(device: Device) -> None:
    warm_up(lambda: run_step(device))
    device.is_broken = True
    train(2)  # without a phase before the iteration, so that the events of the earlier step are read first
    device.is_broken = False
    initial_events = device.recorded_events
    run_step(device)

    assert device.recorded_events == initial_events


def test_turning_the_timing_on_during_a_cuda_error_does_not_raise(device: Device) -> None:
    timer = GpuTimer({"EXPORTER_GPU_TIME": "1"})
    timer.turn_on_or_off(threading.get_ident(), 1.0)
    device.is_broken = True
    timer.begin(kinds.TRAINING_ITERATION, "iteration")
    timer.is_on = True  # by the recording thread, which read the state of the timer before the error
    device.is_broken = False
    timer.begin(kinds.TRAINING_ITERATION, "iteration")

    assert device.recorded_events == 0


def test_a_job_without_cuda_or_with_short_steps_is_not_timed(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(20)
    summary_values()
    run_step(device)
    monkeypatch.setattr(sys.modules["torch"].cuda, "is_initialized", lambda: False)
    warm_up(lambda: run_step(device))

    assert device.recorded_events == 0


def test_a_validation_reported_by_callbacks_and_a_save_are_timed(device: Device) -> None:
    warm_up(lambda: run_step(device))
    training.on_validation_start()
    device.kernel(0.5)
    training.on_validation_end()
    with training.checkpoint_save(1):
        device.kernel(0.25)
    training.on_training_single_iteration_start()
    training.on_training_single_iteration_end()
    finish(device)

    totals = values_by_label("training.phase_gpu")
    assert totals["validation"] == pytest.approx(0.5, abs=0.1)
    assert totals["checkpoint_save_sync"] == pytest.approx(0.25, abs=0.1)


def test_phases_inferred_by_a_bridge_are_timed(device: Device) -> None:
    tracker = LoopTracker(is_replaceable=True)
    tracker.begin_loop(0)
    for _ in range(STEPS):
        tracker.begin_iteration()
        time.sleep(0.012)
        tracker.end(Level.ITERATION)
    summary_values()
    for _ in range(4):
        tracker.begin_iteration()
        tracker.phase("forward")
        device.kernel(0.02)
        tracker.phase("grad_sync")
        device.kernel(0.03)
        tracker.end(Level.ITERATION)
    for _ in range(2):
        tracker.begin_iteration()
        tracker.end(Level.ITERATION)
        device.host_time += 10.0

    totals = values_by_label("training.phase_gpu")
    assert totals["forward"] == pytest.approx(4 * 0.02, rel=0.1)
    assert totals["grad_sync"] == pytest.approx(4 * 0.03, rel=0.1)


def test_steps_reported_after_their_end_are_timed(device: Device) -> None:
    for number in range(STEPS):
        time.sleep(0.012)
        training.step(number)
    summary_values()
    for number in range(4):
        training.step(STEPS + number)
        device.kernel(0.030)
    device.host_time += 10.0
    training.step(100)
    training.step(101)

    assert published_value("training.gpu_timed_steps") == 4
    assert published_value("training.phase_gpu", phase="other") >= 0.12


# GpuTimer with a simulated clock -----------------------------------------------------------------------------


def timed_step_count(
    device: Device, environment: dict[str, str], *, step_seconds: float, step_count: int
) -> float:
    """Return the number of timed steps among steps of a given duration."""
    clock_seconds = 100.0
    timer, families = GpuTimer(environment, clock=lambda: clock_seconds), Families()
    timer.turn_on_or_off(threading.get_ident(), step_seconds)
    for _ in range(step_count):
        timer.begin(kinds.TRAINING_ITERATION, "iteration")
        timer.end(kinds.TRAINING_ITERATION)
        clock_seconds += step_seconds
        device.host_time += step_seconds
    timer.begin(kinds.TRAINING_ITERATION, "iteration")
    timer.publish(families)
    return families.counter("training.gpu_timed_steps").total


def test_a_step_that_ends_while_the_timing_is_off_does_not_cover_the_time_between_later_steps(
    device: Device,
) -> None:
    timer, families = GpuTimer({"EXPORTER_GPU_TIME": "1"}, clock=lambda: device.host_time), Families()
    thread = threading.get_ident()
    timer.turn_on_or_off(thread, 1.0)
    timer.begin(kinds.TRAINING_ITERATION, "iteration")
    timer.turn_on_or_off(thread, 0.0)  # off: steps have become too short
    timer.end(kinds.TRAINING_ITERATION)
    timer.turn_on_or_off(thread, 1.0)
    device.host_time += 1.0
    for _ in range(3):
        timer.begin(kinds.TRAINING_ITERATION, "iteration")
        device.host_time += 0.75
        timer.end(kinds.TRAINING_ITERATION)
        device.host_time += 0.25
    for _ in range(2):  # the second step reads the events up to the start of the first
        timer.begin(kinds.TRAINING_ITERATION, "iteration")
    timer.publish(families)

    assert families.counter("training.phase_gpu", "seconds", phase="iteration").total == pytest.approx(2.25)
    assert families.counter("training.phase_gpu", "seconds", phase="other").total == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("max_share", "step_seconds", "expected_count"),
    # In the 2 s of fast steps, ten steps per second are timed, and ten more for the second before the start.
    [("1", 0.1, 200), ("1", 0.5, 200), ("1", 0.01, 29), ("0", 0.5, 0), ("1e-9", 0.5, 1)],
    ids=["ten a second", "slow", "fast", "off", "too costly"],
)
def test_all_of_up_to_ten_steps_per_second_are_timed_and_faster_steps_are_sampled(
    device: Device, max_share: str, step_seconds: float, expected_count: int
) -> None:
    environment = {"EXPORTER_GPU_TIME": max_share}
    count = timed_step_count(device, environment, step_seconds=step_seconds, step_count=200)

    assert count == pytest.approx(expected_count, abs=1)


def test_the_cuda_stand_in_has_the_interface_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")

    assert callable(torch.cuda.is_initialized)
    assert callable(torch.cuda.is_current_stream_capturing)
    for name in ("record", "query", "elapsed_time", "synchronize"):
        stand_in, original = (
            inspect.signature(getattr(event_class, name)) for event_class in (Event, torch.cuda.Event)
        )
        assert list(stand_in.parameters) == list(original.parameters)


@pytest.mark.gpu
def test_on_a_gpu_phase_times_match_a_synchronized_run() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    matrix = torch.randn(4096, 4096, device="cuda")

    def work(times: int) -> None:
        for _ in range(times):
            matrix @ matrix

    work(10)
    torch.cuda.synchronize()
    expected_seconds = {}
    for name, times in (("forward", 10), ("backward", 20)):
        start = time.perf_counter()
        work(times)
        torch.cuda.synchronize()
        expected_seconds[name] = time.perf_counter() - start
    with fresh_recorder():
        warm_up(lambda: None)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(20):
                with training.training_iteration():
                    with training.model_forward():
                        work(10)
                    with training.model_backward():
                        work(20)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        with training.training_iteration():
            pass
        timed_step_count = published_value("training.gpu_timed_steps")

        assert timed_step_count >= 10
        for name, seconds in expected_seconds.items():
            assert published_value("training.phase_gpu", phase=name) / timed_step_count == pytest.approx(
                seconds, rel=0.15
            )
