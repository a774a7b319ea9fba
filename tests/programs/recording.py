"""Programs that record Stats and events with faults, threads and child processes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import exporter
from exporter import Aggregation, Stat, WindowReading, events, flush, log, training
from exporter.feed.overrides import write_overrides
from exporter.feed.writer import FeedWriter
from exporter.recording.recorder import RECORDER, RENEW_SECONDS


def add_from_threads_and_read_windows() -> None:
    """Check the windows of a Stat to which four threads add, and of a Stat with a single sample."""
    loss = Stat("train.loss", ["mean", "max"], window_seconds=0.5)
    busy = Stat("train.busy", ["mean"], window_seconds=0.5)
    loss_windows: list[WindowReading] = []
    busy_windows: dict[float, WindowReading] = {}
    loss.on_window(lambda _stat, window: loss_windows.append(window))
    loss.add(7.0)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            busy.add(1.0)
            time.sleep(0.0005)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while (len(busy_windows) < 5 or loss.get() or not loss_windows) and time.monotonic() < deadline:
        if busy.window.samples:
            busy_windows[busy.window.ended] = busy.window
        time.sleep(0.01)
    stop.set()
    assert [window.samples for window in loss_windows] == [1]
    assert not loss.get()
    assert len(busy_windows) >= 5
    assert all(abs(window_end / 0.5 - round(window_end / 0.5)) < 1e-6 for window_end in busy_windows)
    assert sum(window.samples for window in busy_windows.values()) <= busy.count


def change_rules_while_recording() -> None:
    """Change the Stat rules of a feed directory, and wait until two Stats follow them."""
    directory = os.environ["EXPORTER_FEED_DIR"]
    loss = Stat("train.loss", ["mean"], window_seconds=0.5)
    other_stat = Stat("train.other", ["mean"], window_seconds=0.5)

    def add_until(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not condition():
            loss.add(2.0)
            other_stat.add(1.0)
            time.sleep(0.02)
            assert time.monotonic() < end

    add_until(lambda: set(loss.get()) == {Aggregation.MEAN})
    write_overrides(
        directory,
        [{"match": "train.l*", "aggregations": ["max", "p99"]}, {"match": "train.other", "enabled": False}],
    )
    add_until(lambda: set(loss.get()) == {Aggregation.MAX, Aggregation.P99})
    assert not other_stat.enabled
    write_overrides(directory, [])
    add_until(lambda: set(loss.get()) == {Aggregation.MEAN} and other_stat.enabled)


class _Freed:
    """Object in a reference cycle that adds to a Stat when the garbage collector frees it."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        Stat("batch.freed", ["mean"]).add(1.0)


def create_stats_in_signal_handlers_and_finalizers() -> None:
    """Create Stats while signal handlers and finalizers create Stats too."""
    step = 0

    def handle(*_: object) -> None:
        Stat("sig.usr1", ["mean"]).add(1.0)
        Stat(f"sig.fresh{step}", ["mean"]).add(1.0)

    def send_signals() -> None:
        for _ in range(300):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.003)

    signal.signal(signal.SIGUSR1, handle)
    gc.set_threshold(50)
    sender = threading.Thread(target=send_signals)
    sender.start()
    while sender.is_alive():
        step += 1
        _Freed()
        Stat("train.step", ["mean"], unit="seconds").add(1.0)
        if step < 2000:
            Stat(f"train.s{step}", ["mean"]).add(1.0)


class _Unhashable(type):
    """Metaclass of classes that cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]  # as a hostile class would


class _RaisingClass(metaclass=_Unhashable):
    @property  # type: ignore[misc]  # raises, as an unbound proxy does
    def __class__(self) -> Any:
        raise RuntimeError


class _SlowFinalizer:
    def __del__(self) -> None:
        time.sleep(5)


def add_invalid_objects() -> None:
    """Add valid samples, an object whose class raises, and an object with a slow finalizer."""
    loss = Stat("train.loss", ["mean"])
    for _ in range(2000):
        loss.add(1.0)
    loss.add(_RaisingClass())  # type: ignore[arg-type]  # invalid on purpose
    loss.add(_SlowFinalizer())  # type: ignore[arg-type]  # invalid on purpose
    assert flush(3)


def record_without_a_feed_directory() -> None:
    """Record and fork although the feed directory is unusable."""
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  # flushed when the buffer is full, or at exit
    loss = Stat("train.loss", ["mean"])
    for _ in range(5):
        loss.add(1.0)
        time.sleep(0.2)
    flush()
    assert loss.count == 5
    if os.fork():
        os.wait()
        print("done")


def record_while_disabled() -> None:
    """Call every part of the API with the exporter disabled."""
    loss = Stat("train.loss", ["mean"])
    for _ in range(1000):
        loss.add(1.0)
    with loss.time():
        pass
    events.register(print)
    log("a.b", "text")
    with training.training_iteration():
        pass
    exporter.configure(run="other")
    assert flush(60)
    exporter.shutdown()
    assert len(loss._state.buffer) == 0
    assert threading.active_count() == 1


def start_sidecars_that_fail() -> None:
    """Start a sidecar without an interpreter. Then start a sidecar with an unknown flag, in a directory with a file `exporter.py`."""
    directory = os.environ["EXPORTER_FEED_DIR"]
    runs = os.path.join(directory, "runs")  # noqa: PTH118
    python, sys.executable = sys.executable, "/no/such/python"
    assert exporter.start_sidecar() is None
    assert os.listdir(runs) == []  # noqa: PTH208
    sys.executable = python
    os.chdir(directory)
    with open("exporter.py", "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write("raise SystemExit(0)")
    sidecar = exporter.start_sidecar("--no.such.flag")
    assert sidecar is not None
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{sidecar.pid}") and time.monotonic() < deadline:  # noqa: PTH110
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{sidecar.pid}")  # noqa: PTH110


def fork_while_threads_record() -> None:
    """Fork ten times while three threads add to Stats and log events."""
    stats = [Stat(f"train.s{number}", ["mean", "p99"]) for number in range(20)]
    events.register(lambda _event: None)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            for number, stat in enumerate(stats):
                stat.add(1.0)
                log(f"a{number}")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        if os.fork() == 0:
            stats[0].add(1.0)
            log("child")
            flush()
            counts = events.EVENTS.reading().counts
            os._exit(0 if stats[0].count == sum(counts.values()) == 1 else 1)
        assert os.wait()[1] == 0
    stop.set()


def fork_while_a_thread_starts_recording(wait_seconds: float) -> None:
    """Fork shortly after a second thread has started its first block."""

    def begin() -> None:
        with training.model_forward():  # imports the module and starts the recording thread
            log("begun")

    thread = threading.Thread(target=begin)
    thread.start()
    time.sleep(wait_seconds)
    child = os.fork()
    if child == 0:
        with training.training_iteration():
            Stat("train.loss", ["mean"]).add(1.0)
        flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()


def change_the_identity() -> None:
    """Record under the identity of the launcher, and then under the identity set by `configure`."""
    loss = Stat("train.loss", ["mean"])
    events.register(lambda _event: None, name="mine")

    def record(times: int) -> None:
        for number in range(times):
            loss.add(1.0)
            log("a", n=number)

    record(1)
    flush()
    exporter.configure(run="second", rank=7, labels={"model": "tiny"})
    record(2)
    assert events.recent()[-1].run == "second"


def change_the_identity_after_the_first_sample() -> None:
    """Call `configure` after the first sample of the job, at which the process claims the rank in its open feed file."""
    loss = Stat("train.loss", ["mean"])
    flush()
    loss.add(1.0)
    exporter.configure(run="second", session="late")


def change_the_identity_while_other_threads_record() -> None:
    """Call `configure` repeatedly while threads record samples, background work and events. Print the number of recorded samples."""
    loss = Stat("train.loss", ["mean"])
    has_ended = threading.Event()
    counts = []

    def record() -> None:
        count = 0
        while not has_ended.is_set():
            loss.add(1.0)
            with training.background("upload"):
                log("a")
            training.record(samples=1, microbatches=1)
            count += 1
            time.sleep(0.0001)
        counts.append(count)

    threads = [threading.Thread(target=record) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(20):
        flush()
        exporter.configure(run=f"run {number}")
    has_ended.set()
    for thread in threads:
        thread.join()
    print(sum(counts))


def record_numbers_during_a_change_of_the_identity() -> None:
    """Record numbers between the last recording of an identity and the restart of the counts at zero, as another thread may."""
    training.record(samples=1, tokens=10, microbatches=1)
    flush()
    reset_events = RECORDER.events.reset

    def record_and_reset() -> None:
        training.record(samples=2, tokens=20, microbatches=2)
        reset_events()

    RECORDER.events.reset = record_and_reset  # type: ignore[method-assign]
    exporter.configure(run="second")
    RECORDER.events.reset = reset_events  # type: ignore[method-assign]


def change_the_identity_during_long_work() -> None:
    """Call `configure` while the lock of the recording thread is held for half a second, as by a long flush."""
    has_started = threading.Event()

    def work() -> None:
        has_started.set()
        time.sleep(0.5)

    loss = Stat("train.loss", ["mean"])
    loss.add(1.0)
    flush()
    threading.Thread(target=RECORDER.thread.run_exclusively, args=(work,)).start()
    has_started.wait()
    exporter.configure(run="second")
    loss.add(1.0)
    loss.add(1.0)


def fail_before_a_new_identity_is_recorded() -> None:
    """Raise LookupError after `configure` has returned while the lock of the recording thread was still held."""
    has_started = threading.Event()

    def work() -> None:
        has_started.set()
        time.sleep(RENEW_SECONDS + 0.5)

    Stat("train.loss", ["mean"]).add(1.0)
    flush()
    threading.Thread(target=RECORDER.thread.run_exclusively, args=(work,)).start()
    has_started.wait()
    exporter.configure(run="second")
    raise LookupError


def change_the_identity_while_the_feed_hangs() -> None:
    """Call `configure` twice, and record samples, while the recording thread hangs in a write of the feed."""
    release, publish = threading.Event(), FeedWriter.publish

    def hang(self: FeedWriter, recording: Any) -> Any:
        release.wait()
        return publish(self, recording)

    loss = Stat("train.loss", ["mean"])
    loss.add(1.0)
    flush()
    FeedWriter.publish = hang  # type: ignore[method-assign]  # a hanging filesystem
    time.sleep(0.5)
    start_time = time.monotonic()
    exporter.configure(run="second")
    loss.add(1.0)
    assert not flush(0.1)
    exporter.configure(run="third")
    loss.add(1.0)
    loss.add(1.0)
    assert time.monotonic() - start_time < 60
    release.set()


def stop_and_continue() -> None:
    """Stop this process by a signal for two seconds, and exit without exit handlers after the windows have closed."""
    Stat("train.loss", ["mean"], window_seconds=0.5).add(1.0)
    stop, resume = (f"kill -{name} {os.getpid()}" for name in ("STOP", "CONT"))
    subprocess.run(["sh", "-c", f"(sleep 0.3; {stop}; sleep 2; {resume}) &"], check=True)
    time.sleep(3)
    os._exit(0)


class _Datum:
    """Object whose text the exporter reads."""

    def __str__(self) -> str:
        return "datum"


def interrupt_calls(name: str) -> None:
    """Print the number of exceptions of signal handlers that a call did not raise, and True if the process still records.

    A handler interrupts the call 300 times.
    """

    def train() -> None:
        with training.training_iteration(), training.model_forward():
            pass

    run_number = count()
    calls: dict[str, Callable[[], object]] = {
        "log": lambda: log(
            "event", str(next(run_number)), datum=_Datum(), payload=lambda: {"datum": _Datum()}
        ),
        "create_stat": lambda: Stat(f"train.s{next(run_number) % 50}", ["mean"]).add(1.0),
        "record": lambda: training.record(loss=1.0),
        "train": train,
        "flush": flush,
        "configure": lambda: exporter.configure(run=f"run{next(run_number) % 5}"),
    }

    def interrupt(_number: int, _frame: object) -> None:
        raise LookupError

    loss = Stat("train.loss", ["mean"])
    loss.add(1.0)
    signal.signal(signal.SIGALRM, interrupt)
    swallowed = 0
    for number in range(300):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0002 + number % 17 * 5e-5)
            end = time.monotonic() + 60
            while signal.getitimer(signal.ITIMER_REAL)[0] > 0 and time.monotonic() < end:
                calls[name]()
            time.sleep(0.001)
            swallowed += 1
        except LookupError:
            pass
    print(swallowed, flush(60))


def train_during_a_slow_change_of_the_identity() -> None:
    """Print the seconds of a phase in which the identity changes. The change takes half a second longer than usual."""
    Stat("train.loss", ["mean"]).add(1.0)
    reset_events = RECORDER.events.reset

    def wait_and_reset() -> None:
        time.sleep(0.5)
        reset_events()

    RECORDER.events.reset = wait_and_reset  # type: ignore[method-assign]
    start_time = time.monotonic()
    with training.checkpoint_load():
        time.sleep(0.1)
        flush()
        exporter.configure(run="second")
        time.sleep(0.1)
    print(time.monotonic() - start_time)
