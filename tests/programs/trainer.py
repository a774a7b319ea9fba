"""Trainer whose children work, write, stop, exit and become zombies on command."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

WRITTEN_BYTES = 1 << 20


def obey_commands() -> None:
    """Execute the command of each line of standard input, and confirm the command with a line of standard output.

    A line is a command and the name of a worker. The command `program` has no name and starts a child that is no worker.
    """
    context = multiprocessing.get_context("fork")
    workers: dict[str, multiprocessing.process.BaseProcess] = {}
    connections: dict[str, Connection] = {}
    for line in sys.stdin:
        command, name = (*line.split(), "")[:2]
        if command == "fork":
            connections[name], worker_end = context.Pipe()
            workers[name] = context.Process(target=_work, args=(worker_end,), daemon=True)
            workers[name].start()
        elif command in {"burn", "write"}:
            connections[name].send(command)
            connections[name].recv()
        elif command == "exit":
            connections[name].send(command)
        elif command == "reap":
            workers[name].join()
        elif command == "stop":
            os.kill(workers[name].pid or 0, signal.SIGSTOP)
        elif command == "program":
            subprocess.Popen(["sleep", "60"])
        print("done", flush=True)
    for worker in workers.values():
        worker.kill()


def _work(connection: Connection) -> None:
    """Receive commands: use CPU time, write a file or exit."""
    while True:
        command = connection.recv()
        if command == "burn":
            end_seconds = time.process_time() + 0.3
            while time.process_time() < end_seconds:
                pass
        elif command == "write":
            with Path("written").open("wb") as file:
                file.write(bytes(WRITTEN_BYTES))
                file.flush()
                os.fsync(file.fileno())
        elif command == "exit":
            os._exit(3)
        connection.send("done")
