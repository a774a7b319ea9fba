"""Signals as values: none is lost, wherever the kernel delivers it."""

from __future__ import annotations

import signal
import sys

import pytest
from run_support import finished

WAITING = """
import os, signal, threading, time
from exporter.cli.signals import Signals

signals = Signals()

def kill():
    time.sleep(0.3)
    os.kill(os.getpid(), signal.{name})

threading.Thread(target=kill, daemon=True).start()
{before}
number = None
while number is None:
    number = signals.wait({timeout})
print(number)
"""
ELSEWHERE = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.{name}])"


@pytest.mark.parametrize("timeout", ["None", "0.05"])
@pytest.mark.parametrize("before", ["", ELSEWHERE], ids=["to the waiting thread", "to another thread"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_is_not_lost_whichever_thread_it_is_delivered_to(
    name: str, before: str, timeout: str
) -> None:
    # On another thread it does not interrupt the main thread's wait: so is one that comes just before it.
    program = WAITING.format(name=name, before=before.format(name=name), timeout=timeout)
    done = finished([sys.executable, "-c", program], timeout=10)

    assert (done.stdout.strip(), done.stderr) == (str(int(getattr(signal, name))), "")


def test_the_second_ending_signal_ends_the_process_and_a_hangup_does_not() -> None:
    program = (
        "import signal\n"
        "from exporter.cli.signals import Signals\n"
        "signals = Signals()\n"
        "signals.ending = True\n"
        "signal.raise_signal(signal.SIGHUP)\n"
        "print(signals.wait(0), flush=True)\n"
        "signal.raise_signal(signal.SIGTERM)\n"
        "print('still here')\n"
    )
    done = finished([sys.executable, "-c", program], timeout=10)

    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, f"{int(signal.SIGHUP)}\n")
