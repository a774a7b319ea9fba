"""Client of `fork_server.py`: requests a program, and waits for its end.

As a script, in the place of an interpreter: `fork_client.py SOCKET ARGUMENT...` runs a program in a process that the server forks.
The process has the environment, working directory and open files of this process and receives its signals. If this process ends
first, the process and its group are killed; otherwise, this process ends with its exit status or by its signal. The parent of the
process is a server, but `os.getppid` returns the parent of this process.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import IO

FORWARDED_SIGNALS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def send_request(
    connection: socket.socket, program: Mapping[str, object], files: Mapping[int, int]
) -> IO[str]:
    """Request a program. Returns the answers, whose first line is the process id.

    Args:
        program: Fields of `fork_server.Program`.
        files: Open descriptor for each descriptor of the program.
    """
    request = json.dumps({"program": program, "descriptors": list(files)}).encode()
    descriptors = array.array("i", files.values())
    connection.sendmsg(
        [len(request).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
    )
    connection.sendall(request)
    return connection.makefile("r", encoding="ascii")


def _is_inherited(descriptor: int) -> bool:
    """Return True if this process has inherited a descriptor. Python does not open inheritable descriptors."""
    try:
        return os.get_inheritable(descriptor)
    except OSError:  # the descriptor of the listed directory
        return False


def main() -> None:
    """Run a program and end as the program."""
    open_files = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208  # pathlib is slow to import
    files = {descriptor: descriptor for descriptor in open_files if _is_inherited(descriptor)}
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    program = {
        "arguments": sys.argv[2:],
        "directory": os.getcwd(),  # noqa: PTH109  # pathlib is slow to import
        "environment": dict(os.environ),
        "parent_id": os.getppid(),
    }
    with send_request(connection, program, files) as answers:
        pid = int(answers.readline())
        for number in FORWARDED_SIGNALS:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        status = int(answers.readline())
    if status < 0:
        if -status in FORWARDED_SIGNALS:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
