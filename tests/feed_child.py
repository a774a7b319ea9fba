"""Training process for the tests of the feed, which reads commands from standard input and prints a line after each command.

A command is the name of a function of this module, followed by integers. The first printed line is the id of the process in the
feed. The module imports only what a training process imports, and not pytest.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

from exporter.feed.files import find_lock_holder, remove_process
from exporter.feed.reader import FeedReader
from exporter.feed.snapshot import ProcessIdentity
from exporter.feed.writer import FeedWriter
from exporter.recording.values import Aggregation, Recording, StatDefinition, StatReading

DIRECTORY = Path(sys.argv[1])
IDENTITY = ProcessIdentity(id=os.urandom(16).hex(), pid=os.getpid(), started=time.time(), run="r", rank=0)


def main() -> None:
    writer = FeedWriter(DIRECTORY, IDENTITY)
    print_line(IDENTITY.id)
    for line in sys.stdin:
        command, *arguments = line.split()
        print_line(str(globals()[command](writer, *map(int, arguments))))  # one of the functions below


def print_line(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # unbuffered, also after a fork


def recording(stats: int = 1, *, count: int = 1, final: bool = False) -> Recording:
    definitions = [
        StatDefinition(f"train.stat{index}", frozenset({Aggregation.MEAN})) for index in range(stats)
    ]
    return Recording(
        tuple(StatReading(definition, count=count, sum=1.0) for definition in definitions), final=final
    )


def publish(writer: FeedWriter, stats: int = 1) -> bool:
    return writer.publish(recording(stats))


def finish(writer: FeedWriter) -> bool:
    is_published = writer.publish(recording(final=True))
    writer.close()
    return is_published


def close_all(writer: FeedWriter) -> str:
    os.closerange(3, 1024)
    return "closed"


def open_own_lock(writer: FeedWriter) -> str:
    with (DIRECTORY / f"{IDENTITY.id}.lock").open("rb"):
        return "opened"


def fork(writer: FeedWriter, close: int = 0) -> int:
    """Fork a child like a DataLoader worker, which attempts to publish as a child and as an orphan. Return its pid."""
    parent = os.getpid()
    ready_pipe, ready_writer = os.pipe()
    child = os.fork()
    if not child:
        writer.publish(recording())
        if close:
            writer.close()
        os.write(ready_writer, b"x")
        os.closerange(0, 3)  # a reader of our output would also wait for the end of this process
        while os.getppid() == parent:
            time.sleep(0.01)
        writer.publish(recording())
        (DIRECTORY / "orphan").touch()
        time.sleep(60)
        os._exit(0)
    os.read(ready_pipe, 1)
    return child


def holder_in_fork(writer: FeedWriter) -> int:
    """Return the holder of the lock as seen by a forked child."""
    reader, writer_end = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer_end, str(find_lock_holder(str(DIRECTORY / f"{IDENTITY.id}.lock"))).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(reader, 100))


def remove_repeatedly(writer: FeedWriter) -> str:
    """Remove the files of a process repeatedly until killed, like two competing sidecars."""
    print_line("removing")
    while True:
        remove_process(str(DIRECTORY), "0" * 32)


def scan_self(writer: FeedWriter) -> str:
    (entry,) = FeedReader(DIRECTORY).scan().entries
    return f"{entry.is_alive} {entry.pid}"


def limit_descriptors(writer: FeedWriter, maximum: int) -> str:
    resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, 1024))
    return "limited"


def flood(writer: FeedWriter) -> str:
    """Write as fast as possible and print each sequence number after its write, until killed."""
    for sequence in range(1, 1_000_000_000):
        if writer.publish(recording(50, count=sequence)):
            print_line(str(sequence))
    return "never"


def simulate_processes(writer: FeedWriter, count: int) -> str:
    """Simulate consecutive processes that write two snapshots and exit normally."""
    for _ in range(count):
        simulated_writer = FeedWriter(DIRECTORY, IDENTITY.replace(id=os.urandom(16).hex()))
        simulated_writer.publish(recording(count=1))
        simulated_writer.publish(recording(count=2, final=True))
        simulated_writer.close()
    return "simulated"


if __name__ == "__main__":
    main()
