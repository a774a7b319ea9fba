"""`python -m exporter push`: a file that node_exporter reads, a Pushgateway's group, and nothing when there is no page."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from run_support import environment, finished, free_port, page, started
from waiting import PATIENCE, wait_until

from exporter.cli.push import Push, TextFile, main, target_of
from exporter.errors import ConfigurationError

PAGE = b"# TYPE train_loss gauge\ntrain_loss 0.5\n"
OWN = b"# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total 5\n"


class Server:
    """A sidecar and a Pushgateway in one: gives the page, and keeps what is put."""

    def __init__(self) -> None:
        self.page: bytes | None = PAGE + OWN
        self.paths: list[str] = []
        self.groups: dict[str, bytes] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.paths.append(self.path)
                self.answer(503 if outer.page is None else 200, outer.page or b"not ready")

            def do_PUT(self) -> None:
                outer.groups[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
                self.answer(200, b"")

            def do_DELETE(self) -> None:
                outer.groups.pop(self.path, None)
                self.answer(202, b"")

            def answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None: ...

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()
    thread.join()


def command(server: Server, target: str, *flags: str) -> list[str]:
    own = [f"--from={server.url}/metrics", "--interval=100ms", *flags, target]
    return [sys.executable, "-m", "exporter", "push", *own]


@contextlib.contextmanager
def pushing(server: Server, target: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command(server, target), env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_file_is_there_while_there_is_a_page_and_until_the_end(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "training.prom"
    with pushing(server, str(path)) as process:
        wait_until(path.exists)
        first = path.read_bytes()
        mode = path.stat().st_mode & 0o777
        server.page = None
        wait_until(lambda: not path.exists())
        server.page = PAGE + OWN
        wait_until(path.exists)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=10 * PATIENCE)

    assert (first, mode, process.returncode) == (PAGE, 0o644, 0)
    assert list(tmp_path.iterdir()) == []
    assert told.count("cannot be read: HTTP Error 503") == 1
    assert told.count("works again") == 1


def test_a_group_of_a_pushgateway_is_replaced_and_deleted(server: Server) -> None:
    group = "/metrics/job/training/instance/node7"
    with pushing(server, server.url + group) as process:
        wait_until(lambda: server.groups)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10 * PATIENCE)

    assert process.returncode == 0
    assert server.groups == {}


def test_once_leaves_it_there_and_takes_it_away_where_there_is_none(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "training.prom"
    flags = ["--once", "--name=train_*", "--name=gpu_*"]
    done = finished(command(server, str(path), *flags))
    put = path.read_bytes()
    server.page = None
    failed = finished(command(server, str(path), "--once"))

    assert (done.returncode, failed.returncode) == (0, 1)
    assert put == PAGE
    assert not path.exists()
    assert server.paths[0] == "/metrics?name%5B%5D=train_%2A&name%5B%5D=gpu_%2A"


def test_what_a_killed_push_has_left_is_taken_away_by_the_next_while_there_is_no_page(
    server: Server, tmp_path: Path
) -> None:
    path = tmp_path / "training.prom"
    with pushing(server, str(path)) as process:
        wait_until(path.exists)
        process.kill()
        process.wait()
    left = path.exists()
    server.page = None

    with pushing(server, str(path)):
        wait_until(lambda: not path.exists())
    assert left


def test_a_page_that_can_no_longer_be_replaced_is_taken_away(server: Server, tmp_path: Path) -> None:
    class Full(TextFile):
        there = False

        def put(self, page: bytes) -> None:
            if self.there:
                raise OSError(28, "No space left on device")
            self.there = True

        def remove(self) -> None:
            self.there = False

    target = Full(tmp_path / "page.prom")
    push = Push(f"{server.url}/metrics", target)
    steps = [(push.step(), target.there) for _ in range(2)]

    assert steps == [(True, True), (False, False)]


@pytest.mark.parametrize(
    "wrong",
    [
        "ftp://x/y",
        "http://gateway:99999/metrics/job/x",
        "http://gateway:9091/",
        "/no/such/directory/x.prom",
        "/tmp",
    ],
)
def test_what_is_no_target_is_told_at_the_start(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match="metrics/job"):
        target_of([wrong])


@pytest.mark.parametrize("wrong", [["--interval=0s"], ["--from=foo"], ["--name"], ["a", "b"], []])
def test_a_wrong_command_line_is_told_at_the_start(wrong: list[str]) -> None:
    with pytest.raises(ConfigurationError):
        main([*wrong, "/tmp/x.prom"] if wrong != [] and wrong[0].startswith("--") else wrong)


@pytest.mark.skipif(shutil.which("prometheus-node-exporter") is None, reason="node_exporter is not installed")
def test_node_exporter_shows_the_file_on_its_page(server: Server, tmp_path: Path) -> None:
    finished(command(server, str(tmp_path / "training.prom"), "--once"))
    port = free_port()
    flags = ["--collector.disable-defaults", "--collector.textfile"]
    flags += [f"--collector.textfile.directory={tmp_path}", f"--web.listen-address=127.0.0.1:{port}"]
    with started(["prometheus-node-exporter", *flags], tmp_path, stderr=subprocess.DEVNULL):
        wait_until(lambda: "train_loss 0.5" in page(port))

        assert "process_cpu_seconds_total" in page(port)
