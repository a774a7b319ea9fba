"""Programs that start the exporter with several command lines, and that receive signals as the exporter does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence

from exporter.cli.main import main
from exporter.cli.signals import Signals


def start_with_each(command_lines: Sequence[Sequence[str]]) -> None:
    """Start the exporter with each command line, and print the exit status of each."""
    for command_line in command_lines:
        print(main(command_line, {}), flush=True)


def receive_each_signal(names: Sequence[str], is_blocked_in_main_thread: bool) -> None:
    """Receive each signal in a wait without a timeout, then each in waits with a timeout, and print the names.

    The kernel delivers a signal that the main thread blocks to another thread.
    """
    signals, is_received = Signals(), threading.Semaphore()
    numbers = [signal.Signals[name] for name in names]

    def send() -> None:
        for number in [*numbers, *numbers]:
            is_received.acquire()
            time.sleep(0.1)  # the main thread waits
            os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    if is_blocked_in_main_thread:
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for timeout_seconds in (None, 0.02):
        for _ in numbers:
            number = None
            while number is None:
                number = signals.wait(timeout_seconds)
            print(signal.Signals(number).name, flush=True)
            is_received.release()
