"""FUSE filesystem whose daemon never responds to statfs, and programs that call statfs.

test_collectors_filesystem runs this program in a mount namespace. Exit status 77 means that FUSE is not permitted on this machine.

    fuse_child.py collect DIRECTORY        a collector in this process
    fuse_child.py run DIRECTORY            the sidecar of a job
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from exporter.collectors.host.filesystem import FilesystemCollector
from exporter.collectors.host.statvfs import StatvfsPool

REQUEST_HEADER = struct.Struct("<IIQQ")  # first fields of fuse_in_header: length, opcode, request id, node id
INIT, STATFS = 26, 17  # opcodes of linux/fuse.h
FUSE_NOT_PERMITTED = 77
"""Exit status if FUSE is not permitted on this machine."""


def serve(descriptor: int) -> None:
    """Complete the mount, and print a line for each statfs request, without a response."""
    while True:
        _, opcode, request_id, _ = REQUEST_HEADER.unpack_from(os.read(descriptor, 1 << 17))
        if opcode == INIT:
            response = struct.pack("<IIIIHHI", 7, 31, 0, 0, 0, 0, 4096).ljust(64, b"\0")  # protocol 7.31
            os.write(descriptor, struct.pack("<IiQ", 16 + len(response), 0, request_id) + response)
        if opcode == STATFS:
            print("statfs", flush=True)


def mount(descriptor: int, directory: Path) -> None:
    """Mount the filesystem, or exit."""
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"dead:/export", os.fsencode(directory), b"fuse.dead", 0, options) != 0:
        sys.exit(FUSE_NOT_PERMITTED)


def collect(directory: Path, daemon: subprocess.Popen[str]) -> object:
    """Collect three times and return the results."""
    pool = StatvfsPool(deadline_seconds=0.5)
    collector = FilesystemCollector(pool=pool, mount_points_include=[str(directory), "/"])
    passes = []
    for _ in range(3):
        start = time.monotonic()
        collected = collector.collect()
        errors = {
            sample.labels["mountpoint"]: sample.value
            for metric in collected
            if metric.name == "host_filesystem_device_error"
            for sample in metric.samples
        }
        reasons = [reason for reason, _ in collected.problems]
        passes.append({"errors": errors, "reasons": reasons, "seconds": time.monotonic() - start})
    assert daemon.stdout is not None
    first_line = daemon.stdout.readline()  # waits for the first request, which is late on a busy machine
    daemon.kill()  # the pending statfs call fails with the end of the connection
    return {"passes": passes, "calls": (first_line + daemon.communicate()[0]).count("statfs")}


def run(_: Path, daemon: subprocess.Popen[str]) -> object:
    """End a job with a sidecar that cannot end, and return the outcome."""
    flags = ["--web.listen-address=127.0.0.1:0", f"--feed.dir={tempfile.mkdtemp()}", "--run.linger=0s"]
    command = [sys.executable, "-m", "exporter", "run", *flags, "--", "sh", "-c", "read line; exit 3"]
    with tempfile.NamedTemporaryFile("w+") as log:
        running = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=log)
        assert daemon.stdout is not None
        daemon.stdout.readline()
        assert running.stdin is not None
        running.stdin.close()
        while running.poll() is None and "the job has ended" not in Path(log.name).read_text():
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)  # end without waiting for the sidecar
        start = time.monotonic()
        status = running.wait(60)
        return {"status": status, "seconds": time.monotonic() - start, "log": Path(log.name).read_text()}


PROGRAMS: dict[str, Callable[[Path, subprocess.Popen[str]], object]] = {"collect": collect, "run": run}


def main() -> None:
    directory = Path(sys.argv[2])
    try:
        descriptor = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        sys.exit(FUSE_NOT_PERMITTED)
    mount(descriptor, directory)
    command = [sys.executable, __file__, "daemon", str(descriptor)]
    daemon = subprocess.Popen(command, pass_fds=(descriptor,), stdout=subprocess.PIPE, text=True)
    os.close(descriptor)
    try:
        print(json.dumps(PROGRAMS[sys.argv[1]](directory, daemon)))
    finally:
        daemon.kill()


if __name__ == "__main__":
    if sys.argv[1] == "daemon":
        serve(int(sys.argv[2]))
    else:
        main()
