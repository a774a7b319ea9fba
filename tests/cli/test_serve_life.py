"""Complete sidecar as a process: start, scarce resources, requests and exit."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import programs.commands
import pytest
from places import PROJECT, TESTS
from programs import code_of
from run_support import (
    child_environment,
    free_port,
    is_ready,
    run_to_completion,
    running_process,
    sidecar_command,
    sidecar_flags,
)
from serve_support import run_exporter, sidecar
from waiting import WAIT_LIMIT_SECONDS, wait_until

from exporter.cli.main import main

LAUNCHER = [sys.executable, str(PROJECT / "training_exporter.py")]
PROGRAM_ENVIRONMENT = child_environment(PYTHONPATH=f"{PROJECT}:{TESTS}")
"""Environment of a function of `programs` in a new interpreter."""


def test_the_listening_address_is_logged_and_the_machine_is_on_the_page(tmp_path: Path) -> None:
    with sidecar(tmp_path) as running:
        for name in ("cpu", "feed"):
            wait_until(lambda: running.sample(f'exporter_collector_success{{collector="{name}"}}') == 1)  # noqa: B023  # called at once
        wait_until(lambda: 'msg="started training-exporter" version=' in running.log)
        page, log = running.page, running.log

    assert f"listening on http://{running.address}, TLS is disabled" in log
    assert "\nhost_load1 " in page
    assert "exporter_config_last_reload_successful 1" in page


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_sidecar_normally(tmp_path: Path, signal_number: int) -> None:
    with sidecar(tmp_path, "--log.format=json") as running:
        status = running.end(signal_number)

    assert status == 0
    assert json.loads(running.log.splitlines()[-1])["msg"] == "ended"


def test_the_sidecar_finishes_an_open_response_unless_signaled_twice(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.touch()
    with sidecar(tmp_path, f"--config.file={file}", "--web.enable-lifecycle") as running:
        file.unlink()
        os.mkfifo(file)  # the reload, and with it the response, waits until the test opens the pipe
        host, _, port = running.address.partition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /-/reload HTTP/1.1\r\nHost: x\r\n\r\n")
            with file.open("w"):
                running.process.send_signal(signal.SIGTERM)
                wait_until(lambda: "msg=ending" in running.log)
                running.process.send_signal(signal.SIGHUP)
                time.sleep(0.5)

                assert running.process.poll() is None
                assert running.end(signal.SIGTERM) == 128 + signal.SIGTERM


def test_a_port_in_use_is_reported_in_one_line_and_changes_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        result = run_exporter(f"--web.listen-address=127.0.0.1:{port}", f"--feed.dir={tmp_path}")

    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert result.stderr.startswith(f"exporter: cannot listen on 127.0.0.1:{port}: the port is in use")
    assert list(tmp_path.iterdir()) == []


def test_a_chosen_feed_and_state_directory_are_created(tmp_path: Path) -> None:
    directories = {name: tmp_path / f"new-{name}" for name in ("feed", "state")}
    with sidecar(tmp_path, *(f"--{name}.dir={path}" for name, path in directories.items())) as running:
        assert "exporter_series" in running.page

    modes = {name: stat.S_IMODE(path.stat().st_mode) for name, path in directories.items()}
    assert modes == {"feed": 0o700, "state": 0o700}


IMPOSSIBLE_STARTS = {
    "--feed.dir=/nowhere/feed": (
        "cannot create the feed directory (No such file or directory): /nowhere/feed; choose"
    ),
    "--state.dir=/nowhere/state": "/nowhere/state: the state directory cannot be created (No such file",
    "--web.config.file=/nowhere/web.yml": "/nowhere/web.yml: cannot be read: No such file",
    "--web.listen-address=here": "--web.listen-address: expected an address such as :20909",
    "--web.listen-address=192.0.2.1:0": "cannot listen on 192.0.2.1:0: no interface of this machine",
}
"""Start of the message, by the flag that makes a start impossible."""


def test_an_impossible_start_is_reported_in_one_line_with_status_2(tmp_path: Path) -> None:
    valid_flags = [f"--feed.dir={tmp_path}", "--web.listen-address=127.0.0.1:0"]
    command_lines = [[*valid_flags, flag] for flag in IMPOSSIBLE_STARTS]
    program = code_of(programs.commands.start_with_each, command_lines)
    result = run_to_completion(
        [sys.executable, "-c", program], env=PROGRAM_ENVIRONMENT, timeout=WAIT_LIMIT_SECONDS
    )

    assert result.stdout.splitlines() == ["2"] * len(IMPOSSIBLE_STARTS)
    for line, message in zip(result.stderr.splitlines(), IMPOSSIBLE_STARTS.values(), strict=True):
        assert line.startswith(f"exporter: {message}")


def test_stat_rules_are_written_at_the_start_and_after_a_reload(tmp_path: Path) -> None:
    file, overrides = tmp_path / "config.yaml", tmp_path / "feed" / "overrides.json"
    file.write_text("recording: [{match: 'a.*', window_seconds: null, aggregations: [mean]}]")
    with sidecar(tmp_path, f"--config.file={file}") as running:
        saved_rules = json.loads(overrides.read_text())
        file.write_text("recording: [{match: loss, enabled: false}]")
        running.process.send_signal(signal.SIGHUP)
        wait_until(
            lambda: json.loads(overrides.read_text())["rules"] == [{"match": "loss", "enabled": False}]
        )

    assert saved_rules["rules"] == [{"match": "a.*", "window_seconds": None, "aggregations": ["mean"]}]


def test_the_sidecar_serves_without_standard_streams(tmp_path: Path) -> None:
    port = free_port()
    without_streams = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh"]
    with running_process([*without_streams, *sidecar_command(tmp_path, port=port)], tmp_path) as process:
        wait_until(lambda: is_ready(port, "/-/healthy"))
        descriptors = [
            str(Path(f"/proc/{process.pid}/fd/{descriptor}").readlink()) for descriptor in range(3)
        ]
        process.terminate()

        assert process.wait(WAIT_LIMIT_SECONDS) == 0
    assert descriptors == ["/dev/null"] * 3


@pytest.mark.parametrize("is_blocked_in_main_thread", [False, True])
def test_signals_are_received_on_any_thread(is_blocked_in_main_thread: bool) -> None:
    # A signal on another thread, or just before the wait, does not interrupt the wait of the main thread.
    names = ["SIGTERM", "SIGINT", "SIGHUP"]
    program = code_of(programs.commands.receive_each_signal, names, is_blocked_in_main_thread)
    result = run_to_completion(
        [sys.executable, "-c", program], env=PROGRAM_ENVIRONMENT, timeout=WAIT_LIMIT_SECONDS
    )

    assert (result.stdout.splitlines(), result.stderr) == ([*names, *names], "")


def test_signals_that_the_parent_process_has_blocked_are_received() -> None:
    names = ["SIGTERM", "SIGINT", "SIGHUP"]
    program = code_of(programs.commands.receive_each_signal, names, False)  # by position only
    # The program inherits the mask.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {getattr(signal, name) for name in names})
    try:
        result = run_to_completion(
            [sys.executable, "-c", program], env=PROGRAM_ENVIRONMENT, timeout=WAIT_LIMIT_SECONDS
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)

    assert (result.stdout.splitlines(), result.stderr) == ([*names, *names], "")


def test_a_full_disk_is_reported_in_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full_device:
        flags = ["--web.listen-address=127.0.0.1:0", f"--feed.dir={tmp_path}"]
        command = [*LAUNCHER, "check", *flags]
        result = run_to_completion(command, capture_output=False, stdout=full_device, stderr=subprocess.PIPE)

    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert result.stderr.startswith("exporter: cannot continue: ")
    assert "No space left" in result.stderr


def test_a_defect_of_a_command_propagates_so_that_python_prints_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing_command(arguments: object, environ: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("exporter.cli.check.main", failing_command)
    with pytest.raises(OSError, match="Invalid"):
        main(["check"])


def test_a_sighup_during_the_start_does_not_end_the_sidecar(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [*LAUNCHER, *sidecar_flags(tmp_path)]
    with log.open("w") as stderr, running_process(command, tmp_path, stderr=stderr) as process:
        wait_until(lambda: blocks_sighup(process.pid))
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: "configuration reloaded" in log.read_text())

        assert process.poll() is None


@pytest.mark.parametrize("delay_seconds", [0.0, 0.1, 0.3, 0.6])
def test_an_early_ctrl_c_leaves_no_traceback(tmp_path: Path, delay_seconds: float) -> None:
    command = [*LAUNCHER, *sidecar_flags(tmp_path)]
    with running_process(command, tmp_path, stderr=subprocess.PIPE) as process:
        wait_until(lambda: blocks_sighup(process.pid))
        time.sleep(delay_seconds)
        process.send_signal(signal.SIGINT)
        _, error_output = process.communicate(timeout=WAIT_LIMIT_SECONDS)

    assert "Traceback" not in error_output


def blocks_sighup(pid: int) -> bool:
    """Return True if a process blocks SIGHUP: the exporter blocks the signal until its handlers are installed."""
    _, _, mask_text = Path(f"/proc/{pid}/status").read_text().partition("SigBlk:")
    # The process inherits the signal mask of the test runner.
    return bool(int(mask_text.split()[0], 16) & 1 << signal.SIGHUP - 1)
