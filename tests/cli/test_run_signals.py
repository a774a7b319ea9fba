"""Signals under `run`: each reaches the job once, and the terminal works as without `run`."""

from __future__ import annotations

import contextlib
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from run_support import processes_naming, read_lines, running_process, signal_logging_job, supervise_command
from waiting import wait_until

FORWARDED_SIGNALS = [
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGWINCH,
]

TERMINAL_PROGRAM = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Program that makes standard input the controlling terminal, and executes the command of the arguments."""

CHECKPOINTING_JOB = """
import os, signal, sys, time
directory, status = sys.argv[1], int(sys.argv[2])
def save(signal_number, frame):
    with open(f"{directory}/signals", "a") as log:
        log.write(f"{signal_number}\\n")
    with open(f"{directory}/checkpoint.new", "w") as file:
        for part in range(10):
            file.write(f"part {part}\\n")
            time.sleep(0.1)
    os.replace(f"{directory}/checkpoint.new", f"{directory}/checkpoint")
    sys.exit(status)
signal.signal(signal.SIGINT, save)
open(f"{directory}/ready", "w").close()
time.sleep(30)
"""
"""Job that completes a checkpoint of one second at Ctrl-C, and exits with a status. Arguments: DIRECTORY STATUS."""


@contextlib.contextmanager
def job_that_logs_signals(
    tmp_path: Path, *, prefix: Sequence[str] = (), inner_prefix: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Start a job under `run` that logs its signals. Programs can precede `run` and the job."""
    log = tmp_path / "log"
    command = [*prefix, *supervise_command(tmp_path, [*inner_prefix, *signal_logging_job(log)])]
    with running_process(command, tmp_path, stderr=subprocess.PIPE) as process:
        wait_until(lambda: "ready" in read_lines(log))
        yield process, log


def signals_until_end(log: Path, end_job: Callable[[], object]) -> list[str]:
    """Wait for the signal under test, end the job by SIGUSR2, and return the other signals that the job has logged."""
    wait_until(lambda: len(read_lines(log)) > 1)
    time.sleep(0.2)  # time for a second signal, which must not arrive
    end_job()
    wait_until(lambda: "SIGUSR2" in read_lines(log))
    return [name for name in read_lines(log) if name not in {"ready", "SIGUSR2"}]


@contextlib.contextmanager
def terminal(command: list[str], feed: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a command with a terminal, and yield the process and the descriptor of the terminal's controlling side."""
    controller, terminal_end = pty.openpty()
    streams = {"stdin": terminal_end, "stdout": terminal_end, "stderr": terminal_end}
    try:
        with running_process([sys.executable, "-c", TERMINAL_PROGRAM, *command], feed, **streams) as process:
            os.close(terminal_end)
            yield process, controller
    finally:
        with contextlib.suppress(OSError):
            os.close(controller)


@pytest.mark.parametrize(
    ("send", "signal_number", "inner_prefix"),
    [
        *((os.kill, signal_number, []) for signal_number in FORWARDED_SIGNALS),
        *((os.killpg, signal_number, []) for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
        pytest.param(os.killpg, signal.SIGTERM, ["setsid"], id="a job that left the group"),
    ],
)
def test_a_signal_to_run_or_to_the_process_group_reaches_the_job_once(
    tmp_path: Path, send: Callable[[int, int], None], signal_number: signal.Signals, inner_prefix: list[str]
) -> None:
    with job_that_logs_signals(tmp_path, inner_prefix=inner_prefix) as (run, log):
        send(run.pid, signal_number)

        assert signals_until_end(log, lambda: run.send_signal(signal.SIGUSR2)) == [signal_number.name]
        assert run.wait() == 0


def test_timeout_signals_child_and_group_and_the_job_receives_one_signal(tmp_path: Path) -> None:
    with job_that_logs_signals(tmp_path, prefix=["timeout", "--signal=TERM", "600"]) as (timeout, log):
        timeout.send_signal(signal.SIGALRM)  # as if the time were over
        names = signals_until_end(log, lambda: os.killpg(timeout.pid, signal.SIGUSR2))

        assert names == ["SIGTERM"]


def test_signals_still_reach_the_job_when_the_probe_is_killed(tmp_path: Path) -> None:
    with job_that_logs_signals(tmp_path) as (run, log):
        probes: list[psutil.Process] = []
        while not probes:  # the process has its final name once it exists
            probes = [child for child in psutil.Process(run.pid).children() if child.name() == "signal-probe"]
        probes[0].kill()
        run.send_signal(signal.SIGTERM)

        assert signals_until_end(log, lambda: run.send_signal(signal.SIGUSR2)) == ["SIGTERM"]


@pytest.mark.parametrize("status", [0, 130])
def test_ctrl_c_during_training_leaves_a_complete_checkpoint(tmp_path: Path, status: int) -> None:
    job = [sys.executable, "-c", CHECKPOINTING_JOB, str(tmp_path), str(status)]
    with terminal(supervise_command(tmp_path, job), tmp_path) as (run, keyboard):
        wait_until((tmp_path / "ready").exists)
        os.write(keyboard, b"\x03")

        assert run.wait() == status
    assert read_lines(tmp_path / "checkpoint") == [f"part {part}" for part in range(10)]
    assert read_lines(tmp_path / "signals") == [str(int(signal.SIGINT))]


def test_a_terminal_hangup_reaches_the_job_when_run_leads_the_session(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with terminal(supervise_command(tmp_path, signal_logging_job(log)), tmp_path) as (run, keyboard):
        wait_until(lambda: "ready" in read_lines(log))
        os.close(keyboard)

        assert signals_until_end(log, lambda: run.send_signal(signal.SIGUSR2)) == ["SIGHUP"]


def test_ctrl_z_stops_the_job_and_returns_to_the_shell_and_fg_resumes(tmp_path: Path) -> None:
    # The loop starts no process: a child stopped between vfork and exec would block the shell.
    os.mkfifo(tmp_path / "go")
    go_pipe = os.open(tmp_path / "go", os.O_RDWR)
    job = ["sh", "-c", f": > {tmp_path}/started; read line < {tmp_path}/go; : > {tmp_path}/ended; exit 9"]
    (tmp_path / "command").write_text(shlex.join(supervise_command(tmp_path, job)))
    with terminal(["bash", "--norc", "-i"], tmp_path) as (_, keyboard):
        os.write(keyboard, f". {tmp_path}/command\n".encode())
        wait_until((tmp_path / "started").exists)
        os.write(keyboard, b"\x1a")
        # Ctrl-Z discards input typed before the shell reads again.
        wait_until(lambda: count_stopped_processes(str(tmp_path)) > 1)
        type_line(keyboard, f"jobs > {tmp_path}/jobs", tmp_path / "jobs")
        os.write(go_pipe, b"on\n")
        time.sleep(1)
        was_stopped = not (tmp_path / "ended").exists()
        type_line(
            keyboard,
            f"fg; s=$?; [ -s {tmp_path}/status ] || echo $s > {tmp_path}/status",
            tmp_path / "status",
        )
        # Closed last: a FIFO that no process has open is empty, and the job may have been stopped before it opened the FIFO.
        os.close(go_pipe)

    assert "Stopped" in read_lines(tmp_path / "jobs")[0]
    assert was_stopped
    assert read_lines(tmp_path / "status") == ["9"]


def type_line(keyboard: int, line: str, result_file: Path) -> None:
    """Type a line repeatedly until its result exists, because the shell may discard input."""

    def type_and_read() -> list[str]:
        os.write(keyboard, f"{line}\n".encode())
        time.sleep(0.5)
        return read_lines(result_file)

    wait_until(type_and_read)


def count_stopped_processes(marker: str) -> int:
    """Return the number of stopped processes whose command line contains a text."""
    stopped_count = 0
    for pid in processes_naming(marker):
        with contextlib.suppress(psutil.NoSuchProcess):
            stopped_count += psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return stopped_count
