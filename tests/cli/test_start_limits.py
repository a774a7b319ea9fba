"""A start with too little of everything, and signals at any moment: one line, never a traceback, nothing lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_support import REPOSITORY, finished, free_port, started
from waiting import PATIENCE, wait_until

from exporter.cli.main import main

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


LAUNCHER = f"{sys.executable} {REPOSITORY / 'training_exporter.py'}"


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return finished(["bash", "-c", command], timeout=60)


def test_a_full_disk_is_told_in_a_line(tmp_path: Path) -> None:
    ended = shell(f"{LAUNCHER} check --web.listen-address=127.0.0.1:0 --feed.dir={tmp_path} >/dev/full")

    assert ended.returncode == 1
    assert ended.stderr.startswith("exporter: cannot go on: ")
    assert "No space left" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_what_is_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: object, environ: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("exporter.cli.check.main", broken)
    with pytest.raises(OSError, match="Invalid"):
        main(["check"])


def test_a_sighup_before_the_sidecar_can_hear_it_does_not_end_it(tmp_path: Path) -> None:
    feed = tmp_path / "feed"
    feed.mkdir()
    log = tmp_path / "log"
    command = [*LAUNCHER.split(), f"--web.listen-address=127.0.0.1:{free_port()}", f"--feed.dir={feed}"]
    with log.open("w") as stderr, started(command, feed, stderr=stderr) as process:
        wait_until(lambda: blocks_sighup(process.pid))
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: "configuration reloaded" in log.read_text(), 30)

        assert process.poll() is None


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3, 0.6])
def test_an_early_ctrl_c_leaves_no_traceback(tmp_path: Path, delay: float) -> None:
    command = [*LAUNCHER.split(), "--web.listen-address=127.0.0.1:0", f"--feed.dir={tmp_path}"]
    with started(command, tmp_path, stderr=subprocess.PIPE) as process:
        wait_until(lambda: blocks_sighup(process.pid))
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=30 * PATIENCE)

    assert "Traceback" not in told


def blocks_sighup(pid: int) -> bool:
    """Whether a process is past the interpreter's own beginning."""
    _, _, rest = Path(f"/proc/{pid}/status").read_text().partition("SigBlk:")
    return bool(int(rest.split()[0], 16) & 1 << signal.SIGHUP - 1)  # what a test's runner blocks is inherited
