"""Fork server of the tests: programs with their exit status, environment and signals, crashes of programs, and the end of the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fork_server
import psutil
import pytest
from fork_server import Program, forked_interpreter, run_forked
from waiting import WAIT_LIMIT_SECONDS, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the server uses process descriptors")

PRINT_SURROUNDINGS = """
import os, sys
print(sorted({"colorsys", "wave"} & sys.modules.keys()), os.getcwd(), sys.argv[1:], dict(os.environ), __name__)
sys.exit(3)
"""

PRINT_SIGNAL_AND_EXIT = """
import signal, sys, time
def exit_with_number(number, frame):
    print("received", signal.Signals(number).name)
    sys.exit(5)
signal.signal(signal.SIGTERM, exit_with_number)
print("ready", flush=True)
time.sleep(60)
"""
PRINT_PID_AND_SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.fixture(autouse=True)
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Yield the owner of a separate session, whose servers import small modules."""
    modules = {"colors": ("colorsys",), "sounds": ("wave",)}
    monkeypatch.setattr(fork_server, "MODULES", modules)
    monkeypatch.setattr(fork_server, "_SERVERS", [])
    with subprocess.Popen(["sleep", "600"]) as owner:
        monkeypatch.setenv(fork_server.DIRECTORY_VARIABLE, str(tmp_path))
        monkeypatch.setenv(fork_server.OWNER_VARIABLE, str(owner.pid))
        yield owner
        owner.kill()
    for server in fork_server._SERVERS:
        server.wait(WAIT_LIMIT_SECONDS)


def run(source: str, *arguments: str, library: str = "colors") -> subprocess.CompletedProcess[str]:
    return run_forked(library, Program(["-c", source, *arguments], "/", {"A": "b"}), WAIT_LIMIT_SECONDS)


def start(source: str) -> subprocess.Popen[str]:
    """Start a program by the executable, and wait for its first line."""
    process = subprocess.Popen(
        [forked_interpreter("colors"), "-c", source], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process


@pytest.mark.parametrize(
    ("library", "imported"), [("colors", ["colorsys"]), ("sounds", ["colorsys", "wave"])]
)
def test_a_program_has_its_own_surroundings_and_status_and_the_modules_of_its_library(
    library: str, imported: list[str]
) -> None:
    completed = run(PRINT_SURROUNDINGS, "x", "y", library=library)

    assert completed.stdout == f"{imported} / ['x', 'y'] {{'A': 'b'}} __main__\n"
    assert (completed.returncode, completed.stderr) == (3, "")


@pytest.mark.parametrize("is_module", [True, False], ids=["module", "script"])
def test_the_executable_runs_scripts_and_modules_with_its_input_and_output(
    tmp_path: Path, is_module: bool
) -> None:
    source = "import os, sys; print(sys.stdin.read(), sys.argv, __name__, os.getppid())\n"
    (tmp_path / "program.py").write_text(source)
    argument = ["-m", "program"] if is_module else ["-u", "program.py"]
    command = [forked_interpreter("colors"), *argument, "x"]
    completed = subprocess.run(
        command, cwd=tmp_path, input="hello", capture_output=True, text=True, check=True
    )

    path = tmp_path / "program.py" if is_module else "program.py"
    assert completed.stdout == f"hello ['{path}', 'x'] __main__ {os.getpid()}\n"


def test_the_executable_forwards_a_signal_and_has_the_status_of_the_program() -> None:
    with start(PRINT_SIGNAL_AND_EXIT) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)

        assert process.communicate()[0] == "received SIGTERM\n"
        assert process.returncode == 5


@pytest.mark.parametrize("is_program_killed", [True, False])
def test_a_program_and_its_executable_end_together(is_program_killed: bool) -> None:
    with start(PRINT_PID_AND_SLEEP) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        os.kill(pid if is_program_killed else process.pid, signal.SIGKILL)

        assert process.wait(WAIT_LIMIT_SECONDS) == -signal.SIGKILL
        wait_until(lambda: not psutil.pid_exists(pid))


def test_interpreters_that_a_program_starts_are_forked_with_their_open_files(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("""
import multiprocessing, sys
def send(connection):
    connection.send("colorsys" in sys.modules)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    context.Process(target=send, args=(sender,)).start()
    print(receiver.recv())
""")
    completed = run_forked("colors", Program([str(script)], "/", {}), WAIT_LIMIT_SECONDS)

    assert completed.stdout == "True\n"


def test_a_program_that_crashes_harms_neither_the_server_nor_another_program() -> None:
    with start(PRINT_PID_AND_SLEEP) as other_process:
        crashed = run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")

        assert crashed.returncode == -signal.SIGSEGV
        assert run("print('unharmed')").stdout == "unharmed\n"
        assert other_process.poll() is None
        other_process.kill()


def test_a_program_is_killed_at_its_timeout() -> None:
    program = Program(["-c", PRINT_PID_AND_SLEEP], "/", {})
    with pytest.raises(subprocess.TimeoutExpired) as expired:
        run_forked("colors", program, timeout=1)

    wait_until(lambda: not psutil.pid_exists(int(expired.value.output)))


def test_the_servers_end_with_the_session_that_is_killed(session: subprocess.Popen[bytes]) -> None:
    run("", library="sounds")
    (server,) = fork_server._SERVERS
    (server_of_sounds,) = psutil.Process(server.pid).children()
    os.kill(session.pid, signal.SIGKILL)

    assert server.wait(WAIT_LIMIT_SECONDS) == 0
    server_of_sounds.wait(WAIT_LIMIT_SECONDS)
