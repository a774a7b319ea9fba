"""Client of `fork_server.py`: requests a program, and waits for its end.

As a script, in the place of an interpreter: `fork_client.py SOCKET ARGUMENT...` runs a program in a process that the server forks.
The process has the environment, working directory and standard streams of this process and receives its signals. It is killed if
this process ends first; otherwise, this process ends with its exit status or by its signal. The parent of the process is the server.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import IO

FORWARDED_SIGNALS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def send_request(connection: socket.socket, program: Mapping[str, object], streams: Sequence[int]) -> IO[str]:
    """Request a program with three descriptors as its standard streams. Returns the answers, whose first line is the process id."""
    request = json.dumps(program).encode()
    descriptors = array.array("i", streams)
    connection.sendmsg(
        [len(request).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
    )
    connection.sendall(request)
    return connection.makefile("r", encoding="ascii")


def main() -> None:
    """Run a program and end as the program."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    program = {
        "arguments": sys.argv[2:],
        "directory": os.getcwd(),  # noqa: PTH109  # pathlib is slow to import
        "environment": dict(os.environ),
    }
    with send_request(connection, program, (0, 1, 2)) as answers:
        pid = int(answers.readline())
        for number in FORWARDED_SIGNALS:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        status = int(answers.readline())
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
