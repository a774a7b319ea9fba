"""Process that has imported a library, such as torch, and forks the programs of tests, which then need not import the library.

A program is a process with its own id, arguments, environment, working directory, open files, process group and exit status, in
which only the library was imported before. The server has not imported the exporter. `run_forked` runs a program, and
`forked_interpreter` is an executable for tests whose job starts an interpreter itself. Interpreters that a program starts, such as
the ranks of torchrun and the children of multiprocessing, are forked from the same server. Programs whose result depends on a new
interpreter or on the order of the imports run without the server.

The first request of a test session starts the server of torch, which forks the servers of the other libraries at their first
request. All workers of pytest-xdist share the servers, which end with the session.

As a script: `fork_server.py OWNER LISTENER=MODULE,MODULE...`, with the process id of the session, and for each library the descriptor
of a listening socket and the modules to import.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import IO

import fork_client

DIRECTORY_VARIABLE, OWNER_VARIABLE = "FORK_SERVER_DIRECTORY", "FORK_SERVER_OWNER"
"""Environment variables with the directory of the sockets, and with the process id of the test session."""

MODULES = {
    "torch": ("torch", "torch._dynamo"),  # the first step of an optimizer imports torch._dynamo
    "lightning": ("lightning.pytorch",),
    "transformers": ("transformers.trainer",),
}
"""Modules that each server imports. Each server but the first is forked from the first, and thus has imported torch, too."""

MAX_FILES = 100
"""Maximum number of open files that a program inherits."""

_SERVERS: list[subprocess.Popen[bytes]] = []  # `Popen` warns if it is deleted while the process runs


@dataclass(frozen=True, slots=True)
class Program:
    """Program to run, as the arguments of an interpreter.

    Attributes:
        arguments: `-c` and the source text, `-m` and a module, or the path of a script; then the arguments of the program. The options
            `-u` and `-WACTION` may precede.
        parent_id: Result of `os.getppid` in the process; by default the id of the real parent, which is a server.
        warning_action: Action of `python -W`.
    """

    arguments: Sequence[str]
    directory: str
    environment: Mapping[str, str]
    parent_id: int | None = None
    warning_action: str = "ignore"


# Client ---------------------------------------------------------------------------------------------------------


def open_session() -> None:
    """Create the directory of the sockets. The servers end with this process. A worker of pytest-xdist inherits the directory."""
    if DIRECTORY_VARIABLE not in os.environ:
        os.environ[DIRECTORY_VARIABLE] = tempfile.mkdtemp(prefix="exporter-fork-servers-")
        os.environ[OWNER_VARIABLE] = str(os.getpid())
        atexit.register(shutil.rmtree, os.environ[DIRECTORY_VARIABLE], ignore_errors=True)


def run_forked(library: str, program: Program, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a program in a process forked by the server of a library. Kills the process and raises TimeoutExpired after *timeout*."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as stdout,
        tempfile.TemporaryFile("w+", encoding="utf-8") as stderr,
        Path(os.devnull).open(encoding="utf-8") as stdin,
        _connect(library) as connection,
    ):
        files = {0: stdin.fileno(), 1: stdout.fileno(), 2: stderr.fileno()}
        with fork_client.send_request(connection, asdict(program), files) as answers:
            answers.readline()
            connection.settimeout(timeout)
            try:
                status = int(answers.readline())
            except TimeoutError as error:
                connection.shutdown(socket.SHUT_WR)  # the server kills the process
                raise subprocess.TimeoutExpired(
                    list(program.arguments), timeout, *_texts(stdout, stderr)
                ) from error
        return subprocess.CompletedProcess(list(program.arguments), status, *_texts(stdout, stderr))


def forked_interpreter(library: str) -> str:
    """Return the path of an executable that runs a program, like `python`, in a process forked by the server of a library.

    With other options than those of `Program`, the executable runs a new interpreter.
    """
    _ensure_server(library)
    return _executable_path(_socket_path(library))


def _texts(*files: IO[str]) -> list[str]:
    for file in files:
        file.seek(0)
    return [file.read() for file in files]


def _connect(library: str) -> socket.socket:
    """Return a connection to the server of a library."""
    _ensure_server(library)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(_socket_path(library)))
    return connection


def _ensure_server(library: str) -> None:
    """Start the server at the first call of the session."""
    with _socket_path("lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _socket_path(library).exists():
            _start_server()


def _socket_path(library: str) -> Path:
    return Path(os.environ[DIRECTORY_VARIABLE]) / library


def _executable_path(socket_path: str | Path) -> str:
    return f"{socket_path}.python"


_EXECUTABLE = """#!/bin/sh
case "$1" in
-c | -m | -u | -W?* | [!-]*) exec {python} -IS {client} {socket} "$@" ;;
*) exec {python} "$@" ;;
esac
"""


def _start_server() -> None:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in MODULES]
        for library, listener in zip(MODULES, listeners, strict=True):
            socket_path = _socket_path(library)
            executable = Path(_executable_path(socket_path))
            parts = {"python": sys.executable, "client": fork_client.__file__, "socket": str(socket_path)}
            quoted_parts = {name: shlex.quote(part) for name, part in parts.items()}
            executable.write_text(_EXECUTABLE.format(**quoted_parts), encoding="utf-8")
            executable.chmod(0o700)
            listener.bind(str(socket_path))
            listener.listen(100)
        descriptors = [listener.fileno() for listener in listeners]
        arguments = [
            f"{descriptor}={','.join(modules)}"
            for descriptor, modules in zip(descriptors, MODULES.values(), strict=True)
        ]
        server = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, os.environ[OWNER_VARIABLE], *arguments],
            env=_server_environment(),
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        _SERVERS.append(server)


def _server_environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("EXPORTER_")}
    inherited.pop("PYTHONPATH", None)
    # With more than one thread, the libraries start threads at their import, which a forked process lacks.
    return inherited | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


# Server ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Library:
    listener: socket.socket
    modules: Sequence[str]


def _serve(library: _Library, other_libraries: Sequence[_Library], session: int) -> Program:
    """Import a library, and fork a process for each request. Returns the program in the forked process, and never in the server.

    The first request for another library forks the server of this library.
    """
    for module in library.modules:
        importlib.import_module(module)
    assert "exporter" not in sys.modules
    # A forked process has only the thread that forks.
    assert len(list(Path("/proc/self/task").iterdir())) == 1
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the processes that wait for the programs
    libraries = {each.listener.fileno(): each for each in (library, *other_libraries)}
    while session not in (ready := select.select([session, *libraries], [], [])[0]):
        for descriptor in ready:
            if libraries[descriptor] is library:
                connection, _ = library.listener.accept()
                if os.fork() == 0:
                    _close(libraries.values())
                    os.close(session)
                    return _fork_program(connection)
                connection.close()
            else:
                requested_library = libraries.pop(descriptor)
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    _close(libraries.values())
                    return _serve(requested_library, (), session)
                _close([requested_library])
    sys.exit()


def _close(libraries: Iterable[_Library]) -> None:
    for library in libraries:
        library.listener.close()


def _fork_program(connection: socket.socket) -> Program:
    """Receive a request, fork the process of the program, and answer with its id and exit status. Returns in the forked process.

    The process and its group are killed if the client closes its side of the connection.
    """
    executable = _executable_path(connection.getsockname())
    size, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(MAX_FILES * array.array("i").itemsize))
    files = array.array("i", ancillary[0][2])
    text = b""
    while len(text) < int.from_bytes(size, "big"):
        text += connection.recv(1 << 20)
    request = json.loads(text)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        connection.close()
        os.setpgid(0, 0)
        _place(files, request["descriptors"])
        sys.executable = executable
        multiprocessing.set_executable(executable)
        return Program(**request["program"])
    with suppress(PermissionError):  # the process already runs another program
        os.setpgid(pid, pid)
    disconnection_errors = (BrokenPipeError, ConnectionResetError)
    with suppress(*disconnection_errors):
        connection.sendall(f"{pid}\n".encode())
    if connection.fileno() in select.select([connection.fileno(), os.pidfd_open(pid)], [], [])[0]:
        os.killpg(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(*disconnection_errors):
        connection.sendall(f"{status}\n".encode())
    os._exit(0)


def _parent_id(program_id: int, parent_id: int, real_parent_id: Callable[[], int]) -> int:
    """Return the parent of a program, or of a process that the program has forked."""
    return parent_id if os.getpid() == program_id else real_parent_id()


def _place(files: Sequence[int], descriptors: Sequence[int]) -> None:
    """Give open files the descriptors of the program."""
    first_unused = max(*files, *descriptors) + 1
    moved_files = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, first_unused) for file in files]
    for file in files:
        os.close(file)
    for file, descriptor in zip(moved_files, descriptors, strict=True):
        os.dup2(file, descriptor)
        os.close(file)


def _prepare(program: Program, library_path: Sequence[str]) -> Callable[[], object]:
    """Give this process the environment of a program. Returns a function that runs the program."""
    os.chdir(program.directory)
    os.environ.clear()
    os.environ.update(program.environment)
    if program.parent_id is not None:
        os.getppid = partial(_parent_id, os.getpid(), program.parent_id, os.getppid)
    arguments, warning_action = list(program.arguments), program.warning_action
    while arguments[0].startswith(("-u", "-W")):
        option = arguments.pop(0)
        if option == "-u":
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a TextIOWrapper
        else:
            warning_action = option.removeprefix("-W")
    sys.warnoptions[:] = [warning_action]
    warnings.resetwarnings()
    warnings.simplefilter(warning_action)  # type: ignore[arg-type]  # the actions are those of `python -W`
    main = ModuleType("__main__")
    first_path = ""
    run: Callable[[], object]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        run = partial(exec, compile(arguments[1], "<string>", "exec"), vars(main))
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        run = partial(runpy.run_module, arguments[1], run_name="__main__", alter_sys=True)
        first_path = program.directory
    else:
        sys.argv = arguments
        main.__file__ = arguments[0]
        script = Path(arguments[0]).resolve()
        run = partial(exec, compile(script.read_text(encoding="utf-8"), arguments[0], "exec"), vars(main))
        first_path = str(script.parent)
    search_path = program.environment.get("PYTHONPATH", "")
    sys.path[:] = [first_path, *filter(None, search_path.split(os.pathsep)), *library_path]
    importlib.invalidate_caches()
    sys.modules["__main__"] = main
    # As the start of an interpreter, in which `run` has added its own module to the search path.
    sys.modules.pop("sitecustomize", None)
    with suppress(ImportError):
        importlib.import_module("sitecustomize")
    if "torch" in sys.modules:
        # Calls the entry points, as the end of `import torch`.
        importlib.import_module("torch")._import_device_backends()
    return run


if __name__ == "__main__":
    _library_path = sys.path[1:]
    _owner, *_arguments = sys.argv[1:]
    _pairs = [argument.split("=") for argument in _arguments]
    _libraries = [
        _Library(socket.socket(fileno=int(descriptor)), modules.split(",")) for descriptor, modules in _pairs
    ]
    _prepare(_serve(_libraries[0], _libraries[1:], os.pidfd_open(int(_owner))), _library_path)()
