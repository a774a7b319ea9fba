"""The whole sidecar as a process: how it starts, is asked, and ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_support import answers, free_port, started
from serve_support import Sidecar, exporter, sidecar
from waiting import wait_until


def test_the_machine_is_on_the_page_and_promtool_finds_nothing(tmp_path: Path) -> None:
    with sidecar(tmp_path) as running:
        for name in ("cpu", "feed"):
            series = f'exporter_collector_success{{collector="{name}"}}'
            wait_until(lambda series=series: running.sample(series) == 1)  # type: ignore[misc]  # a lambda's default
        page, log = running.ask("/metrics")[1], running.log
        promtool = ["promtool", "check", "metrics"]
        lint = subprocess.run(promtool, input=page, text=True, capture_output=True, check=False)

    assert 'msg="started training-exporter" version=' in log
    assert f"listening on http://{running.address}, TLS is disabled" in log
    assert "\nhost_load1 " in page
    assert 'exporter_collector_success{collector="feed"} 1' in page
    assert "exporter_config_last_reload_successful 1" in page
    assert (lint.returncode, lint.stdout, lint.stderr) == (0, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(tmp_path: Path, number: int) -> None:
    with sidecar(tmp_path, "--log.format=json") as running:
        status = running.end(number)

    assert status == 0
    assert json.loads(running.log.splitlines()[-1])["msg"] == "ended"


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Sidecar, Path]]:
    """A sidecar whose reload waits for its file: an answer that takes as long as the test wants."""
    file = tmp_path / "config.yaml"
    file.touch()
    with sidecar(tmp_path, f"--config.file={file}", "--web.enable-lifecycle") as running:
        file.unlink()
        os.mkfifo(file)
        yield running, file


def test_an_answer_in_the_making_is_finished_before_the_end(slow: tuple[Sidecar, Path]) -> None:
    running, file = slow
    answered: list[tuple[int, str]] = []
    asking = threading.Thread(target=lambda: answered.append(running.ask("/-/reload", "POST")))
    asking.start()
    with file.open("w"):  # opens when the reload reads
        running.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "msg=ending" in running.log)
        assert running.process.poll() is None
    asking.join(10)

    assert running.process.wait(10) == 0
    assert answered == [(200, "reloaded\n")]


def test_the_second_signal_ends_it_at_once(slow: tuple[Sidecar, Path]) -> None:
    running, file = slow
    host, _, port = running.address.partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /-/reload HTTP/1.1\r\nHost: x\r\n\r\n")
        with file.open("w"):
            running.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "msg=ending" in running.log)

            assert running.end(signal.SIGTERM) == 128 + signal.SIGTERM


def test_a_taken_port_is_one_line_and_nothing_is_changed(tmp_path: Path) -> None:
    feed = tmp_path / "feed"
    feed.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = exporter(f"--web.listen-address=127.0.0.1:{port}", f"--feed.dir={feed}")

    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"exporter: cannot listen on 127.0.0.1:{port}: the port is taken")
    assert list(feed.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--feed.dir=/nowhere/feed"], "there is no feed directory: /nowhere/feed; create it"),
        (["--state.dir=/nowhere/state"], "/nowhere/state: is no directory; create it"),
        (["--web.config.file=/nowhere/web.yml"], "/nowhere/web.yml: cannot be read: No such file"),
        (["--web.listen-address=here"], "--web.listen-address: expected an address such as :20909"),
        (["--web.listen-address=192.0.2.1:0"], "cannot listen on 192.0.2.1:0: this machine does not have"),
    ],
)
def test_a_start_that_cannot_be_is_told_and_has_status_2(
    tmp_path: Path, flags: list[str], message: str
) -> None:
    own = [f"--feed.dir={tmp_path}"] if "--feed.dir" not in flags[0] else []
    listen = ["--web.listen-address=127.0.0.1:0"] if "listen" not in flags[0] else []
    done = exporter(*own, *listen, *flags)

    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"exporter: {message}")


def test_recording_rules_reach_the_feed_directory_also_after_a_reload(tmp_path: Path) -> None:
    file, overrides = tmp_path / "config.yaml", tmp_path / "feed" / "overrides.json"
    file.write_text("recording: [{match: 'a.*', window_seconds: null, aggregations: [mean]}]")
    with sidecar(tmp_path, f"--config.file={file}") as running:
        written = json.loads(overrides.read_text())
        file.write_text("recording: [{match: loss, enabled: false}]")
        running.process.send_signal(signal.SIGHUP)
        wait_until(
            lambda: json.loads(overrides.read_text())["rules"] == [{"match": "loss", "enabled": False}]
        )

    assert written["rules"] == [{"match": "a.*", "window_seconds": None, "aggregations": ["mean"]}]


def test_it_serves_without_standard_streams(tmp_path: Path) -> None:
    port = free_port()
    command = f"exec {sys.executable} -m exporter --web.listen-address=127.0.0.1:{port} --feed.dir={tmp_path}"
    with started(["sh", "-c", f"{command} 0<&- 1>&- 2>&-"], tmp_path) as process:
        wait_until(lambda: answers(port, "/-/healthy"))
        descriptors = [str(Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in range(3)]
        process.terminate()

        assert process.wait(10) == 0
    assert descriptors == ["/dev/null"] * 3


def test_a_full_pipe_for_logs_stops_nothing(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    port = free_port()
    flags = [f"--web.listen-address=127.0.0.1:{port}", f"--feed.dir={tmp_path}", "--log.level=debug"]
    with started([sys.executable, "-m", "exporter", *flags], tmp_path, stderr=write) as process:
        os.close(write)
        wait_until(lambda: answers(port, "/-/healthy"))
        process.terminate()

        assert process.wait(15) == 0
    os.close(read)
