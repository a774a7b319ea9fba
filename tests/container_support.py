"""A sidecar in separate pid, network and mount namespaces, as in a Kubernetes pod with a shared feed directory."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import run_support
from waiting import wait_until

UNSHARE = ["unshare", "--pid", "--net", "--mount", "--fork", "--kill-child", "--mount-proc"]
PORT = 9100  # free, because the network namespace is new

READER = f"""
import fcntl, socket, struct, sys, urllib.request
UP_AND_RUNNING, SIOCSIFFLAGS = 0x41, 0x8914
fcntl.ioctl(socket.socket(), SIOCSIFFLAGS, struct.pack("16sh", b"lo", UP_AND_RUNNING))
for _ in sys.stdin:
    try:
        page = urllib.request.urlopen("http://127.0.0.1:{PORT}/metrics", timeout=60).read()
    except OSError:
        page = b""
    sys.stdout.buffer.write(b"%d\\n%b" % (len(page), page))
    sys.stdout.flush()
"""
"""Program that reads lines, and for each line writes the length of the metrics page and the page."""


def reason_to_skip() -> str:
    """Return the reason why namespaces are not available, or "" if they are available."""
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return "needs unshare and nsenter (util-linux)"
    trial = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False, timeout=60)
    return f"unshare is not permitted: {trial.stderr.strip()}" if trial.returncode else ""


@dataclass
class ContainedSidecar:
    """Sidecar in separate namespaces."""

    unshare: subprocess.Popen[bytes]
    log_file: Path
    _reader: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def pid(self) -> int:
        """Process id of the sidecar in the namespace of the test."""
        children = Path(f"/proc/{self.unshare.pid}/task/{self.unshare.pid}/children")
        return int(children.read_text().split()[0])

    @property
    def page(self) -> str:
        """Metrics page, read inside the network namespace; empty until the sidecar has started."""
        if self._reader is None:
            command = ["nsenter", f"--target={self.pid}", "--net", sys.executable, "-c", READER]
            self._reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._reader.stdin is not None
        assert self._reader.stdout is not None
        self._reader.stdin.write(b"\n")
        self._reader.stdin.flush()
        return self._reader.stdout.read(int(self._reader.stdout.readline())).decode()

    def end(self) -> None:
        """Kill the sidecar and the reader of its page."""
        for process in (self.unshare, self._reader):
            if process is not None:
                process.kill()  # --kill-child ends the sidecar too
                process.communicate(timeout=60)

    def sample(self, series: str) -> float | None:
        """Return the value of a series, or None if absent."""
        match = re.search(rf"^{re.escape(series)} (\S+)$", self.page, re.MULTILINE)
        return None if match is None else float(match[1])


@contextlib.contextmanager
def sidecar_in_namespaces(tmp_path: Path, feed: Path, configuration: str = "") -> Iterator[ContainedSidecar]:
    """Run a sidecar in separate namespaces with a shared feed directory and further sections of configuration."""
    log, config = tmp_path / "log", tmp_path / "exporter.yml"
    config.write_text(
        "feed: {interval: 500ms}\ncollectors: {processes: {interval: 1s, deadline: 900ms}}\n"
        f"energy: {{lock_dir: {tmp_path}}}\n{configuration}"
    )
    flags = [f"--web.listen-address=127.0.0.1:{PORT}", f"--feed.dir={feed}", f"--config.file={config}"]
    with log.open("wb") as stderr:
        command = [*UNSHARE, sys.executable, "-m", "exporter", *flags]
        process = subprocess.Popen(command, env=run_support.child_environment(), stderr=stderr)
    running = ContainedSidecar(process, log)
    try:
        wait_until(lambda: "listening on" in running.log or process.poll() is not None)
        yield running
    finally:
        running.end()
