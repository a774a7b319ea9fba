"""Command lines, jobs that log their signals, pages of sidecars, a web server and processes, for the tests of the commands."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import urlopen

import psutil
from places import DATA, PROJECT
from waiting import WAIT_LIMIT_SECONDS

SIGNAL_LOGGING_JOB = """
import os, signal, sys, time
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
has_ended = False
def log_signal(number, frame):
    global has_ended
    os.write(log, (signal.Signals(number).name + "\\n").encode())
    has_ended = has_ended or number == signal.SIGUSR2
for number in (1, 2, 3, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGWINCH):
    signal.signal(number, log_signal)
os.write(log, b"ready\\n")
deadline = time.monotonic() + 60
while not has_ended and time.monotonic() < deadline:
    time.sleep(0.02)
"""
"""Program that logs every received signal to the file of its argument, and exits at SIGUSR2 or after 60 s."""


def child_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a child process, with the package importable from any directory."""
    inherited_variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("EXPORTER_", "SLURM_"))
    }
    return {**inherited_variables, "PYTHONPATH": str(PROJECT), **variables}


def run_to_completion(command: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return the completed process with its output."""
    settings: dict[str, object] = {
        "env": child_environment(),
        "capture_output": True,
        "text": True,
        **options,
    }
    return subprocess.run(command, check=False, **settings)  # type: ignore[call-overload,no-any-return]  # by name


def short_interval_flags(flags: Sequence[str]) -> list[str]:
    """Return the flag of a configuration with short intervals, or no flag if *flags* name a configuration.

    Without a flag of GPUs, the configuration disables the GPU collector, because the start of its child process takes a fifth of the CPU
    time of the whole start.
    """
    if any(flag.startswith("--config.file") for flag in flags):
        return []
    has_gpus = any(flag.startswith("--gpu.") for flag in flags)
    return [f"--config.file={DATA / ('quick-gpus.yml' if has_gpus else 'quick.yml')}"]


def run_command(feed: Path, job: Sequence[str], *flags: str, port: int = 0) -> list[str]:
    """Return the command line of `run` with a job."""
    return [sys.executable, "-m", "exporter", "run", *sidecar_flags(feed, *flags, port=port), "--", *job]


def in_removed_directory(command: Sequence[str], directory: Path) -> list[str]:
    """Return a command line that creates a directory, removes it as the working directory, and runs a command in it."""
    return ["bash", "-c", 'mkdir "$0" && cd "$0" && rmdir "$0" && exec "$@"', str(directory), *command]


def sidecar_flags(feed: Path, *flags: str, port: int = 0) -> list[str]:
    """Return the flags of a sidecar, with or without `run`: feed directory, address, short intervals, and further flags."""
    return [
        f"--feed.dir={feed}",
        f"--web.listen-address=127.0.0.1:{port}",
        *short_interval_flags(flags),
        *flags,
    ]


def sidecar_command(feed: Path, *flags: str, port: int = 0) -> list[str]:
    """Return the command line of a sidecar without `run`."""
    return [sys.executable, "-m", "exporter", *sidecar_flags(feed, *flags, port=port)]


def signal_logging_job(log_file: Path) -> list[str]:
    """Return the command line of a job that logs its signals."""
    return [sys.executable, "-c", SIGNAL_LOGGING_JOB, str(log_file)]


def free_port() -> int:
    """Return a port that was free at the time of the call."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file, or an empty list if the file does not exist."""
    return path.read_text().splitlines() if path.exists() else []


def processes_naming(marker: str) -> set[int]:
    """Return the process ids of the processes, other than this one, whose command line contains a text."""
    command_by_pid = {
        process.pid: " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    }
    return {pid for pid, command in command_by_pid.items() if marker in command and pid != os.getpid()}


def sidecars(feed: Path) -> list[int]:
    """Return the ids of the sidecars that `run` started for a feed directory."""
    pids = processes_naming(str(feed)) & processes_naming("--run.attached")
    # Before exec, the NVML child has the command line of its parent.
    return [pid for pid in pids if is_alive(pid) and psutil.Process(pid).ppid() not in pids]


def is_alive(pid: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def fetch(url: str) -> str | None:
    """Request a URL, and return the body of a successful response, otherwise None."""
    with contextlib.suppress(OSError), urlopen(url, timeout=WAIT_LIMIT_SECONDS) as response:
        return str(response.read().decode())
    return None


def fetch_page(port: int, path: str = "/metrics") -> str:
    """Return a page of the sidecar, or an empty text without a successful response."""
    return fetch(f"http://127.0.0.1:{port}{path}") or ""


def scrape(port: int, path: str = "/metrics") -> str:
    """Return a page of the sidecar.

    Raises:
        OSError: No server listens, or the response is empty or an error.
    """
    body = fetch_page(port, path)
    if not body:
        raise OSError(path)
    return body


def is_ready(port: int, path: str = "/-/ready") -> bool:
    """Return True if a server returns a page with content, by default that of `/-/ready`."""
    return fetch_page(port, path) != ""


def sample_value(port: int, prefix: str) -> float | None:
    """Return the value of the first series with this prefix, or None without a series."""
    lines = [line for line in fetch_page(port).splitlines() if line.startswith(prefix)]
    return float(lines[0].rpartition(" ")[2]) if lines else None


@contextlib.contextmanager
def web_server(respond_to: Callable[[str, str, bytes], tuple[int, bytes]]) -> Iterator[str]:
    """Run a server that responds with the result of a function of method, path and body, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            status, response_body = respond_to(self.command, self.path, body)
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(response_body)))
            self.end_headers()
            self.wfile.write(response_body)

        do_GET = do_PUT = do_POST = do_DELETE = respond  # noqa: N815  # http.server calls these names

        def log_message(self, format: str, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextlib.contextmanager
def running_process(command: Sequence[str], feed: Path, **options: object) -> Iterator[subprocess.Popen[str]]:
    """Start a process group. At the end, kill the group and every process that names the feed directory."""
    settings: dict[str, object] = {
        "env": child_environment(),
        "start_new_session": True,
        "text": True,
        **options,
    }
    process: subprocess.Popen[str] = subprocess.Popen(command, **settings)  # type: ignore[call-overload]  # by name
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        for pid in processes_naming(str(feed)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


REGISTRATION_PROGRAM = """
import sys
from pathlib import Path
from exporter.feed import runs
registration = runs.Registration(Path(sys.argv[1]))
print("registered", flush=True)
sys.stdin.read()
registration.release()
"""


def start_run(feed: Path) -> subprocess.Popen[str]:
    """Start a process that is an active run until its input closes."""
    return start_program(REGISTRATION_PROGRAM, feed)


def start_program(program: str, path: Path) -> subprocess.Popen[str]:
    """Start a program with a path as its argument, wait for its first line, and return the process."""
    command, pipe = [sys.executable, "-c", program, str(path)], subprocess.PIPE
    process = subprocess.Popen(command, env=child_environment(), stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


SUPERVISION_PROGRAM = """
import os, sys
from pathlib import Path
from exporter.cli import run
separator = sys.argv.index("--")
feed, linger = Path(sys.argv[1]), float(sys.argv[2])
sidecar, job = sys.argv[3:separator], sys.argv[separator + 1:]
plan = run.Plan(tuple(job), dict(os.environ), tuple(sidecar), feed, linger, run="r")
sys.exit(run.supervise(plan))
"""
"""Program that runs only the supervision of `run`. Arguments: FEED LINGER_SECONDS SIDECAR... -- JOB..."""
FIRST_LINE = "exporter: run r\n"
"""First line that `run` writes to stderr."""
JOINING_SIDECAR = ("/bin/sh", "-c", "exit 3")
"""Stand-in for a sidecar that finds another sidecar on the feed directory and exits (`EXIT_JOINED`)."""


def supervise_command(
    feed: Path, job: Sequence[str], *, sidecar: Sequence[str] = JOINING_SIDECAR, linger_seconds: float = 0.0
) -> list[str]:
    """Return the command line of the supervision of `run` with a different program instead of the sidecar."""
    return [sys.executable, "-c", SUPERVISION_PROGRAM, str(feed), str(linger_seconds), *sidecar, "--", *job]
