"""What the tests of the whole sidecar share: a real process on a free port, asked over real HTTP."""

from __future__ import annotations

import contextlib
import http.client
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import run_support
from waiting import PATIENCE, wait_until

environment = run_support.environment


def exporter(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The exporter's command line, run to its end."""
    command = [sys.executable, "-m", "exporter", *arguments]
    return run_support.finished(command, env=environment(**more), timeout=15 * PATIENCE)


@dataclass
class Sidecar:
    """A running sidecar."""

    process: subprocess.Popen[bytes]
    log_file: Path
    address: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def ask(self, path: str, method: str = "GET") -> tuple[int, str]:
        """Status and body of an answer."""
        connection = http.client.HTTPConnection(self.address, timeout=10 * PATIENCE)
        with contextlib.closing(connection):
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def sample(self, series: str) -> float | None:
        """The value of a series, as written on the page; None when it is absent."""
        for line in self.ask("/metrics")[1].splitlines():
            name, _, value = line.rpartition(" ")
            if name == series:
                return float(value)
        return None

    def collectors(self) -> set[str]:
        """The collectors that are scheduled."""
        page = self.ask("/metrics")[1]
        return set(
            re.findall(r'^exporter_collector_interval_seconds\{collector="(\w+)"\}', page, re.MULTILINE)
        )

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the exit status."""
        self.process.send_signal(number)
        return self.process.wait(15)


@contextlib.contextmanager
def sidecar(tmp_path: Path, *flags: str, ready: bool = True, **more: str) -> Iterator[Sidecar]:
    """A sidecar on a free port with a feed directory of its own."""
    feed = tmp_path / "feed"
    feed.mkdir(exist_ok=True)
    log = tmp_path / f"log-{time.monotonic_ns()}"
    own = ["--web.listen-address=127.0.0.1:0", f"--feed.dir={feed}"]
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "exporter", *own, *flags], env=environment(**more), stderr=stderr
        )
    running = Sidecar(process, log)
    try:
        if ready:
            wait_until(lambda: "listening on" in running.log or process.poll() is not None, 15)
            found = re.search(r"listening on (\S+?),", running.log)
            assert found is not None, running.log
            running.address = urlsplit(found[1]).netloc
            wait_until(lambda: running.ask("/-/ready")[0] == 200)
        yield running
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(15)


@contextlib.contextmanager
def recording(tmp_path: Path, code: str, rank: int, run: str = "r") -> Iterator[subprocess.Popen[str]]:
    """A process of a run beside the sidecar: it says `recording`, and ends when it can read a line."""
    feed = tmp_path / "feed"
    feed.mkdir(exist_ok=True)
    env = environment(EXPORTER_FEED_DIR=str(feed), EXPORTER_RUN=run, RANK=str(rank))
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, text=True, stdin=pipe, stdout=pipe
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "recording\n"
            yield process
        finally:
            process.communicate("end\n", timeout=10 * PATIENCE)
