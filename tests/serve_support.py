"""Real sidecar on a free port, queried over HTTP, for the tests of the complete sidecar."""

from __future__ import annotations

import contextlib
import http.client
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from run_support import child_environment, run_to_completion, sidecar_command
from waiting import WAIT_LIMIT_SECONDS, wait_until

from exporter.replay.machines import DIRECTORY_VARIABLE


def run_exporter(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command line of the exporter to its end."""
    command = [sys.executable, "-m", "exporter", *arguments]
    return run_to_completion(command, env=child_environment(**variables), timeout=WAIT_LIMIT_SECONDS)


@dataclass
class Sidecar:
    """Running sidecar process with its log and address."""

    process: subprocess.Popen[bytes]
    log_file: Path
    address: str = ""

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def request(self, path: str, method: str = "GET") -> tuple[int, str]:
        """Request a path and return the status and the body of the response."""
        connection = http.client.HTTPConnection(self.address, timeout=WAIT_LIMIT_SECONDS)
        with contextlib.closing(connection):
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    @property
    def page(self) -> str:
        return self.request("/metrics")[1]

    def sample(self, series: str) -> float | None:
        """Return the value of a series, named as on the page, or None if absent."""
        match = re.search(rf"^{re.escape(series)} (\S+)$", self.page, re.MULTILINE)
        return None if match is None else float(match[1])

    def collectors(self) -> set[str]:
        """Return the names of the scheduled collectors."""
        pattern = r'^exporter_collector_interval_seconds\{collector="(\w+)"\}'
        return set(re.findall(pattern, self.page, re.MULTILINE))

    def reload(self) -> None:
        """Send SIGHUP and wait until the sidecar logs that the configuration is, or is not, reloaded."""
        reload_count = self.log.count("reloaded")
        self.process.send_signal(signal.SIGHUP)
        wait_until(lambda: self.log.count("reloaded") > reload_count)

    def end(self, signal_number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the exit status."""
        self.process.send_signal(signal_number)
        return self.process.wait(WAIT_LIMIT_SECONDS)


@contextlib.contextmanager
def sidecar(
    tmp_path: Path, *flags: str, ready: bool = True, machines: Path | None = None, **variables: str
) -> Iterator[Sidecar]:
    """Run a sidecar on a free port, with the feed directory of the test.

    *machines* is a directory with descriptions of machines to replay.
    """
    feed = tmp_path / "feed"
    feed.mkdir(exist_ok=True)
    log = tmp_path / f"log-{time.monotonic_ns()}"
    with log.open("wb") as stderr:
        if machines is not None:
            variables[DIRECTORY_VARIABLE] = str(machines)
        process = subprocess.Popen(
            sidecar_command(feed, *flags), env=child_environment(**variables), stderr=stderr
        )
    running = Sidecar(process, log)
    try:
        wait_until(lambda: "listening on" in running.log or process.poll() is not None)
        match = re.search(r"listening on https?://(\S+?),", running.log)
        assert match is not None, running.log
        running.address = match[1]
        if ready:
            wait_until(lambda: running.request("/-/ready")[0] == 200)
        yield running
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(WAIT_LIMIT_SECONDS)


@contextlib.contextmanager
def recording(tmp_path: Path, code: str, rank: int, run: str = "r") -> Iterator[subprocess.Popen[str]]:
    """Run a recording process of a run, which prints `recording` and exits after reading a line."""
    feed = tmp_path / "feed"
    feed.mkdir(exist_ok=True)
    env = child_environment(EXPORTER_FEED_DIR=str(feed), EXPORTER_RUN=run, RANK=str(rank))
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, text=True, stdin=pipe, stdout=pipe
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "recording\n"
            yield process
        finally:
            process.communicate("end\n", timeout=WAIT_LIMIT_SECONDS)
