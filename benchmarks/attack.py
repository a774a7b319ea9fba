"""Attacks on the exporter, and over HTTP also on node_exporter: a table of memory, scrapes and delays.

Each server requires a password, and an authorized client scrapes the server once a second. A server whose resident memory exceeds
256 MiB is killed, as by the limit of a container. The attacks are bounded in number and time, and go to 127.0.0.1. Exits with
status 1 if the exporter is killed, exceeds 150 MiB, fails a scrape, takes more than 2 s for a scrape, or shows the total of an
honest job after more than 8 s. The bounds of times are for a quiet machine.

    python benchmarks/attack.py [--quick] [--only=PART_OF_A_ROW_NAME] [PATH_OF_NODE_EXPORTER]
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import resource
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import bcrypt
from report import QUICK, child, feed_directory

from exporter.feed.encoder import CHECKSUM, CHECKSUM_OFFSET, HEADER, MAGIC, MAX_BYTES, VERSION

LIMIT_MIB = 256
PEAK_MIB = 150
MAX_SCRAPE_SECONDS = 2.0
MAX_TOTAL_SECONDS = 8.0
"""Maximum delay of the total of an honest job: a flush interval (1 s), a feed interval (5 s), and two seconds for the pass."""
ATTACK_SECONDS = 5.0 if QUICK else 20.0
RECOVERY_SECONDS = 3.0 if QUICK else 10.0
USER, PASSWORD = "prometheus", "correct horse"
LOGIN = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
SCRAPE_REQUEST = f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: {LOGIN}\r\n\r\n".encode()
Attack = Callable[[int, float], None]
"""Function that attacks the server at a port until a monotonic time."""


@dataclass
class Victim:
    """Server under attack.

    Attributes:
        pid: Process id of the server.
        port: Port on 127.0.0.1.
        feed: Feed directory of the exporter; None for node_exporter.
        memory_mib: Resident memory in MiB, sampled ten times a second.
        peak_mib: Peak of the resident memory in MiB since the start of the server.
        slowest_seconds: Duration of the slowest scrape.
        scrapes: Number of scrapes.
        failed_scrapes: Number of scrapes without status 200 within 10 s.
        is_killed: True if the memory exceeded the limit.
    """

    pid: int
    port: int
    feed: Path | None
    memory_mib: list[float] = field(default_factory=list)
    peak_mib: float = 0.0
    slowest_seconds: float = 0.0
    scrapes: int = 0
    failed_scrapes: int = 0
    is_killed: bool = False

    def watch(self, stop: threading.Event) -> None:
        """Sample the memory until *stop* is set, and kill the server if it exceeds the limit."""
        while not stop.wait(0.1):
            with contextlib.suppress(OSError, ValueError, IndexError):  # the server was killed
                pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
                self.memory_mib.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
                status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
                self.peak_mib = int(status.partition("VmHWM:")[2].split()[0]) / 2**10
                if self.memory_mib[-1] > LIMIT_MIB:
                    self.is_killed = True
                    os.kill(self.pid, 9)

    def scrape(self, stop: threading.Event) -> None:
        """Scrape once a second until *stop* is set."""
        while not stop.wait(1.0):
            started = time.monotonic()
            status = request(self.port, "/metrics", LOGIN)
            self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - started)
            self.scrapes += 1
            self.failed_scrapes += status != 200


def request(port: int, path: str, login: str = LOGIN, timeout: float = 10.0, **headers: str) -> int:
    """Request a page on a new connection. Return the status, or 0 without a response."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        client.request("GET", path, headers={"Authorization": login, **headers})
        response = client.getresponse()
        response.read()
    except (OSError, http.client.HTTPException):
        return 0
    else:
        return response.status
    finally:
        client.close()


def count_samples(port: int, prefix: str) -> int:
    """Return the number of samples whose names begin with a prefix, or with `training_` and the prefix; 0 without a response."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        client.request("GET", "/metrics", headers={"Authorization": LOGIN})
        lines = client.getresponse().read().decode().splitlines()
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        client.close()
    return sum(line.startswith((prefix, f"training_{prefix}")) for line in lines)


def crowd(member: Callable[[int], None], size: int) -> None:
    """Run a number of clients on threads, and wait for them."""
    threads = [threading.Thread(target=member, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def name_patterns(port: int, end: float) -> None:
    """Request the page with filters of 15 KB, which differ in each request."""

    def member(number: int) -> None:
        attempt = 0
        while time.monotonic() < end:
            attempt += 1
            names = "&".join(f"name[]=*{number}x{attempt}x{index}{'[a-z]*' * 25}" for index in range(90))
            request(port, f"/metrics?{names}")

    crowd(member, 8)


def abandoned_filters(port: int, end: float) -> None:
    """Request the page with different filters, and disconnect after 50 ms."""

    def member(number: int) -> None:
        attempt = 0
        while time.monotonic() < end:
            attempt += 1
            path = f"/metrics?name[]=x{number}x{attempt}&collect[]=cpu"
            request(port, path, timeout=0.05, **{"X-Prometheus-Scrape-Timeout-Seconds": "0.05"})

    crowd(member, 32)


def readers_that_do_not_read(port: int, end: float) -> None:
    """Request the page on 300 connections without reading the response; repeat every five seconds."""
    while time.monotonic() < end:
        sockets = [connection(port, SCRAPE_REQUEST) for _ in range(300)]
        time.sleep(max(0.0, min(5.0, end - time.monotonic())))
        close(sockets)


def two_thousand_readers_that_do_not_read(port: int, end: float) -> None:
    """Request the page on 2,000 connections without reading the response."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    sockets: list[socket.socket] = []
    while time.monotonic() < end and len(sockets) < 2000:
        sockets.append(connection(port, SCRAPE_REQUEST))
    time.sleep(max(0.0, end - time.monotonic()))
    close(sockets)


def silence(port: int, end: float) -> None:
    """Open 1,000 connections, and send the first 20 bytes of a request on every second one."""
    while time.monotonic() < end:
        sockets = [connection(port, SCRAPE_REQUEST[:20] if number % 2 else b"") for number in range(1000)]
        time.sleep(max(0.0, min(5.0, end - time.monotonic())))
        close(sockets)


def guesses(port: int, end: float) -> None:
    """Try passwords on eight connections."""

    def member(number: int) -> None:
        attempt = 0
        while time.monotonic() < end:
            attempt += 1
            guess = base64.b64encode(f"{USER}:{number}-{attempt}".encode()).decode()
            request(port, "/metrics", f"Basic {guess}")

    crowd(member, 8)


def nonsense(port: int, end: float) -> None:
    """Send random bytes, heads without an end, and wrong lengths."""
    pieces = [
        os.urandom(4096),
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5000,
        b"GET /" + b"a" * 200_000,
        b"POST /-/reload HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 65536,
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n",
    ]

    def member(number: int) -> None:
        while time.monotonic() < end:
            close([connection(port, pieces[number % len(pieces)])])

    crowd(member, 20)


def connection(port: int, data: bytes) -> socket.socket:
    """Open a connection with a small receive window and send as many bytes as the server accepts."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(2.0)
    with contextlib.suppress(OSError):
        client.connect(("127.0.0.1", port))
        client.sendall(data)
    return client


def close(sockets: list[socket.socket]) -> None:
    """Close connections."""
    for client in sockets:
        client.close()


HTTP: dict[str, Attack] = {
    "different filters of 15 KB": name_patterns,
    "filters of clients that disconnect": abandoned_filters,
    "300 clients that do not read": readers_that_do_not_read,
    "2,000 clients that do not read": two_thousand_readers_that_do_not_read,
    "1,000 silent connections": silence,
    "guessed passwords": guesses,
    "random bytes, endless heads, wrong lengths": nonsense,
}
FIVE_THOUSAND = """
stats = [exporter.Stat(f'mine_{number}') for number in range(5000)]
while True:
    for stat in stats:
        stat.add(1.0)
    time.sleep(0.5)
"""
JOBS: dict[str, tuple[int, str]] = {
    "a job with 5,000 Stats": (0, FIVE_THOUSAND),
    "4,200 empty feed files, then a job": (
        4200,
        "stat = exporter.Stat('mine')\nwhile True: stat.add(1.0); time.sleep(0.1)\n",
    ),
}
"""Number of empty files in the feed directory, and the program of a training process."""


HONEST = """
stat = exporter.Stat('mine', aggregations=['mean', 'histogram'], buckets=[1.0, 2.0])
while True: stat.add(1.0); time.sleep(0.1)
"""


def feed_file(
    number: int, *definitions: Mapping[str, object], run: str = "hostile", extra: bytes = b""
) -> bytes:
    """Return the bytes of a feed file with a valid checksum. *definitions* are its Stats, *extra* further keys as JSON."""
    totals = []
    for definition in definitions:
        buckets = definition.get("buckets")
        counts = {"bucket_counts": [0] * len(buckets)} if isinstance(buckets, list) else {}
        totals.append({"count": 1, "sum": 1.0, **counts})
    process = {"pid": 7, "started": 1.0, "run": run, "rank": 0}
    sections = [
        json.dumps({"process": process, "stats": definitions}).encode()[:-1] + extra + b"}",
        json.dumps({"windows": [None] * len(definitions)}).encode(),
        json.dumps({"written": 1.0, "flush_seconds": 1.0, "stats": totals}).encode(),
    ]
    header = bytearray(HEADER.pack(MAGIC, VERSION, 0, 0, number.to_bytes(16, "big"), 1, *map(len, sections)))
    CHECKSUM.pack_into(header, CHECKSUM_OFFSET, crc32(b"".join(sections), crc32(header)))
    return b"".join((header, *sections))


def leave_labels_and_buckets(feed: Path) -> None:
    """Leave 60 files with 2,000 labels and 30,000 buckets each."""
    labels = [[f"l{index:05}", "x" * 20] for index in range(2000)]
    stat = {"name": "s", "aggregations": ["histogram"], "labels": labels, "buckets": list(range(30_000))}
    for number in range(60):
        (feed / f"{number:032x}.feed").write_bytes(feed_file(number, stat))


def leave_raw_sections(feed: Path) -> None:
    """Leave 60 files of 4 MiB, with an unknown key."""
    extra = b',"later":"%b"' % (b"x" * (MAX_BYTES - 2000))
    for number in range(60):
        content = feed_file(number, {"name": "s", "aggregations": ["mean"]}, extra=extra)
        (feed / f"{number:032x}.feed").write_bytes(content)


def leave_long_names(feed: Path) -> None:
    """Leave files of the honest Stat with run names of 4,096 characters, and of 256 characters of four bytes."""
    stat: dict[str, object] = {"name": "mine", "aggregations": ["mean", "histogram"], "buckets": [1.0, 2.0]}
    for number, run in enumerate(("x" * 4096, "\N{GRINNING FACE}" * 256)):
        (feed / f"{number:032x}.feed").write_bytes(feed_file(number, stat, run=run))


def leave_foreign_entries(feed: Path) -> None:
    """Create all fixed names of a shared directory as another user, with rules that disable all Stats. Needs root."""
    feed.chmod(0o1777)
    uid = os.geteuid()
    for name in ("ledger", f"ledger-{uid}", f"runs-{uid}"):
        (feed / name).mkdir(mode=0o755)
    for name in ("owner", f"owner-{uid}"):
        (feed / f"{name}.lock").touch(mode=0o600)
    for name in ("overrides", f"overrides-{uid}"):
        (feed / f"{name}.json").write_text('{"version": 1, "rules": [{"match": "*", "enabled": false}]}')
    for name in ("stacks", f"stacks-{uid}"):
        (feed / f"{name}.request").write_text("{}")
    for entry in feed.iterdir():
        os.chown(entry, 12345, 12345)


def leave_many_stats(feed: Path) -> None:
    """Leave 60 files with 9,000 Stats each, within all limits of a file."""
    stats = [
        {"name": f"s{index}", "aggregations": ["mean"], "labels": [["a", "x" * 100]]} for index in range(9000)
    ]
    for number in range(60):
        (feed / f"{number:032x}.feed").write_bytes(feed_file(number, *stats))


def leave_state_files(feed: Path) -> None:
    """Leave a sparse state file of 800 MiB, and 100 state files of deeply nested JSON."""
    (feed / "ledger").mkdir(mode=0o700)
    (feed / "ledger" / "rank-large.ledger").touch()
    os.truncate(feed / "ledger" / "rank-large.ledger", 800 << 20)
    body = b"[" * 200_000 + b"\n"
    for number in range(100):
        content = b"training-exporter-ledger 3 %08x\n" % crc32(body) + body
        (feed / "ledger" / f"rank-{number}.ledger").write_bytes(content)


FILES: dict[str, Callable[[Path], None]] = {
    "60 feed files with 2,000 labels and 30,000 buckets": leave_labels_and_buckets,
    "60 feed files of 4 MiB": leave_raw_sections,
    "run names of 4,096 characters": leave_long_names,
    "60 feed files with 9,000 Stats": leave_many_stats,
    "every fixed name taken by another user": leave_foreign_entries,
    "800 MB of state, and nested state files": leave_state_files,
}
"""Files that exist before the exporter starts, beside an honest job with a histogram."""


def leave_no_files(feed: Path) -> None:
    """Leave no files."""


@contextlib.contextmanager
def victim(program: str, prepare: Callable[[Path], None] = leave_no_files) -> Iterator[Victim]:
    """Start a server that requires a password. It is watched and scraped until the end of the block."""
    with tempfile.TemporaryDirectory() as directory, feed_directory() as feed:
        prepare(feed)
        web_config = Path(directory, "web.config.yml")
        password_hash = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(10)).decode()
        web_config.write_text(f"basic_auth_users:\n  {USER}: {password_hash}\n", encoding="utf-8")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        address = f"--web.listen-address=127.0.0.1:{port}"
        if program == "exporter":
            command: list[str | Path] = [sys.executable, "-m", "exporter", f"--feed.dir={feed}"]
            ready_pattern = "listening|Listening"
        else:
            command, ready_pattern = [program], "Listening on|TLS is"
        with child([*command, address, f"--web.config.file={web_config}"], ready_pattern=ready_pattern) as (
            process,
            _,
        ):
            server = Victim(process.pid, port, feed if program == "exporter" else None)
            while request(port, "/metrics") != 200:
                time.sleep(0.1)
            stop = threading.Event()
            watchers = [
                threading.Thread(target=method, args=(stop,)) for method in (server.watch, server.scrape)
            ]
            for watcher in watchers:
                watcher.start()
            try:
                time.sleep(2.0)
                yield server
            finally:
                stop.set()
                for watcher in watchers:
                    watcher.join()


def report_row(
    attack: str, server: Victim, memory_before_mib: float, honest_total_after: str = "\N{EN DASH}"
) -> bool:
    """Print a row of the table. Return True if the server kept all bounds."""
    peak_mib, memory_after_mib = max(server.peak_mib, *server.memory_mib), server.memory_mib[-1]
    cells = [
        attack,
        "exporter" if server.feed else "node_exporter",
        f"{memory_before_mib:.0f} MiB",
        f"{peak_mib:.0f} MiB",
        "killed at the limit" if server.is_killed else f"{memory_after_mib:.0f} MiB",
        f"{server.scrapes - server.failed_scrapes} of {server.scrapes}",
        f"{server.slowest_seconds:.2f} s",
        honest_total_after,
    ]
    print(f"| {' | '.join(cells)} |", flush=True)
    is_within_bounds = peak_mib <= PEAK_MIB and server.slowest_seconds <= MAX_SCRAPE_SECONDS
    return not server.is_killed and not server.failed_scrapes and (is_within_bounds or not server.feed)


def attack_over_http(name: str, attack: Attack, peer: str | None) -> bool:
    """Attack the exporter and the peer. Return True if the exporter kept all bounds."""
    has_held = True
    for program in ("exporter", *([peer] if peer else [])):
        with victim(program) as server:
            memory_before_mib = server.memory_mib[-1]
            attack(server.port, time.monotonic() + ATTACK_SECONDS)
            time.sleep(RECOVERY_SECONDS)
        is_within_bounds = report_row(name, server, memory_before_mib)
        has_held = has_held and (is_within_bounds or program != "exporter")
    return has_held


def attack_with_files(name: str, prepare: Callable[[Path], None]) -> bool:
    """Start the exporter with hostile files and an honest job. Return True if the exporter kept all bounds."""
    if prepare is leave_foreign_entries and os.geteuid() != 0:
        print(f"| {name} | skipped: only root can create files of another user |")
        return True
    with victim("exporter", prepare) as server:
        memory_before_mib = server.memory_mib[-1]
        with job(HONEST, server):
            started = time.monotonic()
            while not (samples := count_samples(server.port, "mine_count")):
                if time.monotonic() > started + 60:
                    break
                time.sleep(0.1)
            delay_seconds = time.monotonic() - started
            time.sleep(ATTACK_SECONDS)
    honest_total_after = f"{delay_seconds:.1f} s" if samples else "missing"
    is_within_bounds = report_row(name, server, memory_before_mib, honest_total_after)
    return is_within_bounds and samples > 0 and delay_seconds <= MAX_TOTAL_SECONDS


def attack_with_job(name: str, empty_files: int, program: str) -> bool:
    """Run a hostile job beside the exporter. Return True if the exporter kept all bounds."""
    with victim("exporter") as server:
        assert server.feed is not None
        for number in range(empty_files):
            (server.feed / f"{number:032x}.feed").touch()
        memory_before_mib = server.memory_mib[-1]
        with job(program, server):
            time.sleep(ATTACK_SECONDS)
            samples = count_samples(server.port, "mine")
        time.sleep(RECOVERY_SECONDS)
    return report_row(f"{name} ({samples} of its series on the page)", server, memory_before_mib)


@contextlib.contextmanager
def job(program: str, server: Victim) -> Iterator[None]:
    """Run a training process that records into the feed of a server."""
    source = f"import time, exporter\nprint('ready', flush=True)\n{program}"
    with child([sys.executable, "-c", source], ready_pattern="ready", EXPORTER_FEED_DIR=str(server.feed)):
        yield


def main() -> int:
    """Run the selected attacks and print the table. Return the exit status."""
    programs = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    options = [argument for argument in sys.argv[1:] if argument.startswith("--only=")]
    selection = [option.removeprefix("--only=") for option in options]
    peer = (
        programs[0] if programs else shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")
    )

    def is_selected(name: str) -> bool:
        return not selection or any(part in name for part in selection)

    print("| attack | server | before | at most | after | scrapes answered | slowest | honest total after |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    results = [attack_over_http(name, attack, peer) for name, attack in HTTP.items() if is_selected(name)]
    results += [attack_with_files(name, prepare) for name, prepare in FILES.items() if is_selected(name)]
    results += [
        attack_with_job(name, *hostile_job) for name, hostile_job in JOBS.items() if is_selected(name)
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
