"""Process that has imported a library, such as torch, and forks the programs of tests, which then need not import the library.

The client, `run_forked`, starts a server per library on demand; all workers of pytest-xdist share it. A program is a process with
its own id, arguments, environment, working directory, standard streams and exit status, in which only the library was imported
before. The server has not imported the exporter. Programs whose result depends on a new interpreter or on the order of the imports
run without the server.

As a script: `fork_server.py LISTENER MODULE...`, with the descriptor of a listening socket.
"""

from __future__ import annotations

import array
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import IO

DIRECTORY_VARIABLE = "FORK_SERVER_DIRECTORY"
"""Environment variable with the directory of the sockets, which is set by conftest.py."""

MODULES = {
    "torch": ("torch", "torch._dynamo"),  # the first step of an optimizer imports torch._dynamo
    "lightning": ("torch", "torch._dynamo", "lightning.pytorch"),
    "transformers": ("torch", "torch._dynamo", "transformers.trainer"),
}
"""Modules that each server imports."""

POLL_SECONDS = 1.0
"""Interval at which a server checks whether the directory of the sockets still exists, which ends with the test session."""

MAX_IDLE_SECONDS = 600.0
"""Time without a request after which a server exits, for a session that was killed and has not removed the directory."""

_SERVERS: list[subprocess.Popen[bytes]] = []  # `Popen` warns if it is deleted while the process runs


@dataclass(frozen=True, slots=True)
class Program:
    """Program to run, as the arguments of an interpreter.

    Attributes:
        arguments: `-c` and the source text, or the path of a script; then the arguments of the program.
        warning_action: Action of `python -W`.
    """

    arguments: Sequence[str]
    directory: str
    environment: Mapping[str, str]
    warning_action: str = "ignore"


# Client ---------------------------------------------------------------------------------------------------------


def run_forked(library: str, program: Program, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a program in a process forked by the server of a library. Kills the process and raises TimeoutExpired after *timeout*."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as stdout,
        tempfile.TemporaryFile("w+", encoding="utf-8") as stderr,
        _connect(library) as connection,
        connection.makefile("r", encoding="utf-8") as answers,
    ):
        request = json.dumps(asdict(program)).encode()
        descriptors = array.array("i", [stdout.fileno(), stderr.fileno()])
        connection.sendmsg(
            [len(request).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        )
        connection.sendall(request)
        pid = int(answers.readline())
        status: int | None = None
        connection.settimeout(timeout)
        try:
            status = int(answers.readline())
        except TimeoutError as error:
            raise subprocess.TimeoutExpired(
                list(program.arguments), timeout, *_texts(stdout, stderr)
            ) from error
        finally:
            if status is None:
                os.kill(pid, signal.SIGKILL)
        return subprocess.CompletedProcess(list(program.arguments), status, *_texts(stdout, stderr))


def _texts(*files: IO[str]) -> list[str]:
    for file in files:
        file.seek(0)
    return [file.read() for file in files]


def _connect(library: str) -> socket.socket:
    """Return a connection to the server of a library. Start the server if it does not run."""
    path = Path(os.environ[DIRECTORY_VARIABLE]) / library
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(FileNotFoundError, ConnectionRefusedError):
            return _connected_socket(path)
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(100)
            command = [sys.executable, "-W", "ignore", __file__, str(listener.fileno()), *MODULES[library]]
            null = subprocess.DEVNULL
            server = subprocess.Popen(
                command, env=_server_environment(), pass_fds=[listener.fileno()], stdin=null, stdout=null
            )
            _SERVERS.append(server)
        return _connected_socket(path)


def _connected_socket(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


def _server_environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("EXPORTER_")}
    inherited.pop("PYTHONPATH", None)
    # With more than one thread, the libraries start threads at their import, which a forked process lacks.
    return inherited | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


# Server ---------------------------------------------------------------------------------------------------------


def _serve(listener: socket.socket, modules: Sequence[str]) -> Program:
    """Fork a process for each request. Returns the program in the forked process, and never in the server."""
    directory, last_request_time = Path(listener.getsockname()).parent, time.monotonic()
    for module in modules:
        importlib.import_module(module)
    assert "exporter" not in sys.modules
    assert (
        len(list(Path("/proc/self/task").iterdir())) == 1
    )  # a forked process has only the thread that forks
    gc.collect()
    gc.freeze()
    listener.settimeout(POLL_SECONDS)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the processes that wait for the programs
    while directory.exists() and time.monotonic() < last_request_time + MAX_IDLE_SECONDS:
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            last_request_time = time.monotonic()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return _fork_program(connection)
            connection.close()
    sys.exit()


def _fork_program(connection: socket.socket) -> Program:
    """Receive a request, fork the process of the program, and answer with its id and exit status. Returns in the forked process."""
    connection.setblocking(True)
    size, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(2 * array.array("i").itemsize))
    descriptors = array.array("i", ancillary[0][2])
    request = b""
    while len(request) < int.from_bytes(size, "big"):
        request += connection.recv(1 << 20)
    pid = os.fork()
    if pid == 0:
        connection.close()
        for target, descriptor in enumerate(descriptors, start=1):
            os.dup2(descriptor, target)
            os.close(descriptor)
        return Program(**json.loads(request))
    connection.sendall(f"{pid}\n".encode())
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError):  # after a timeout, no client waits
        connection.sendall(f"{status}\n".encode())
    os._exit(0)


def _prepare(program: Program, library_path: Sequence[str]) -> tuple[CodeType, ModuleType]:
    """Give this process the environment of a program. Returns the code and the main module of the program."""
    os.chdir(program.directory)
    os.environ.clear()
    os.environ.update(program.environment)
    sys.warnoptions[:] = [program.warning_action]
    warnings.resetwarnings()
    warnings.simplefilter(program.warning_action)  # type: ignore[arg-type]  # the actions are those of `python -W`
    main = ModuleType("__main__")
    if program.arguments[0] == "-c":
        source, filename, first_path = program.arguments[1], "<string>", ""
        sys.argv = ["-c", *program.arguments[2:]]
    else:
        script = Path(program.arguments[0])
        source, filename, first_path = (
            script.read_text(encoding="utf-8"),
            str(script),
            str(script.resolve().parent),
        )
        sys.argv = list(program.arguments)
        main.__file__ = filename
    search_path = program.environment.get("PYTHONPATH", "")
    sys.path[:] = [first_path, *filter(None, search_path.split(os.pathsep)), *library_path]
    importlib.invalidate_caches()
    sys.modules["__main__"] = main
    if "torch" in sys.modules:
        importlib.import_module(
            "torch"
        )._import_device_backends()  # calls the entry points, as the end of `import torch`
    return compile(source, filename, "exec"), main


if __name__ == "__main__":
    _library_path = sys.path[1:]
    _listener = socket.socket(fileno=int(sys.argv[1]))
    _code, _main = _prepare(_serve(_listener, sys.argv[2:]), _library_path)
    exec(_code, vars(_main))
