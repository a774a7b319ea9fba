"""Exceptions that signal handlers of the job raise during calls of the exporter."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import programs.recording
import pytest
from program_support import run_function, run_with_imports, single_reading

from exporter.recording.conversion import to_repr
from exporter.recording.signal_safety import SignalSafeLock, is_from_signal_handler


class JobTimeoutError(Exception):
    """Exception of a signal handler of the job."""


def raise_timeout(_signal: int, _frame: object) -> None:
    raise JobTimeoutError


def raise_timeout_in_a_function(*_: object) -> None:
    raise_timeout(0, None)


class Handlers:
    """Handlers that are no plain functions."""

    def handle(self, number: int, frame: object) -> None:
        raise_timeout(number, frame)

    def __call__(self, number: int, frame: object) -> None:
        raise_timeout(number, frame)


HANDLERS: tuple[Callable[..., None], ...] = (
    raise_timeout,
    raise_timeout_in_a_function,
    Handlers().handle,
    Handlers(),
    partial(raise_timeout),
)


@pytest.fixture
def handle_by() -> Iterator[Callable[[Any], object]]:
    """Return a function that sets the handler of SIGUSR1."""
    previous_handler = signal.getsignal(signal.SIGUSR1)
    yield partial(signal.signal, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, previous_handler)


def send_signal() -> None:
    signal.raise_signal(signal.SIGUSR1)


class Interrupted:
    """Object during whose `repr` a signal arrives."""

    def __repr__(self) -> str:
        send_signal()
        return "interrupted"


@pytest.mark.parametrize("handler", HANDLERS)
def test_an_exception_of_a_signal_handler_is_recognized(
    handle_by: Callable[[Any], object], handler: Callable[..., None]
) -> None:
    handle_by(handler)
    try:
        send_signal()
    except JobTimeoutError as error:
        assert not is_from_signal_handler(ValueError())
        caught = error
    assert is_from_signal_handler(caught)


def test_an_exception_of_the_jobs_code_is_not_taken_for_one_of_a_signal_handler() -> None:
    try:
        raise_timeout_in_a_function(2, None)
    except JobTimeoutError as error:
        caught = error
    assert not is_from_signal_handler(caught)


def test_a_conversion_raises_the_exception_of_a_signal_handler(handle_by: Callable[[Any], object]) -> None:
    handle_by(raise_timeout)
    with pytest.raises(JobTimeoutError):
        to_repr(Interrupted())


def test_a_lock_is_free_after_the_exception_of_a_signal_handler(handle_by: Callable[[Any], object]) -> None:
    handle_by(raise_timeout)
    lock = SignalSafeLock()
    with pytest.raises(JobTimeoutError):
        lock.run(send_signal)

    assert lock.run(lambda: True, 0.0)
    assert lock.run(lambda: lock.run(lambda: True, 0.0) is None)  # as in a handler that interrupts the holder


@pytest.mark.parametrize("call", ["log", "create_stat", "record", "train", "flush", "configure"])
def test_the_exception_of_each_signal_reaches_the_job_and_the_recording_continues(
    tmp_path: Path, call: str
) -> None:
    completed = run_function(tmp_path / "feed", programs.recording.interrupt_calls, call)

    assert completed.stdout == "0 True\n"


def test_a_shutdown_that_a_signal_handler_ends_continues_at_the_exit(tmp_path: Path) -> None:
    program = """
        loss = Stat("train.loss", ["mean"])
        loss.add(1.0)
        flush()
        replace = os.replace

        def replace_slowly(*paths):
            time.sleep(0.5)
            replace(*paths)

        def raise_timeout(number, frame):
            raise LookupError

        signal.signal(signal.SIGALRM, raise_timeout)
        os.replace = replace_slowly
        loss.add(2.0)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            exporter.shutdown()
        except LookupError:
            print("raised")
    """
    completed = run_with_imports(tmp_path / "feed", program, EXPORTER_FLUSH_SECONDS="60")

    assert (completed.stdout, completed.stderr) == ("raised\n", "")
    assert single_reading(tmp_path / "feed").count == 2
