"""The job under `run`: its exit status, its environment, what it inherits."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_support import FIRST_LINE, environment, started, supervise_command
from waiting import wait_until

EXITS = [
    (["sh", "-c", "exit 0"], 0),
    (["sh", "-c", "exit 3"], 3),
    (["sh", "-c", "exit 255"], 255),
    (["sh", "-c", "kill -KILL $$"], -signal.SIGKILL),
    (["sh", "-c", "kill -TERM $$"], -signal.SIGTERM),
    (["sh", "-c", "kill -SEGV $$"], -signal.SIGSEGV),
]


# glibc's posix_spawn ignores its own two signals in the child; its thread library sets them up again.
GLIBC_SIGNALS = 0b11 << 31


def finish(feed: Path, *job: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a job to its end."""
    settings: dict[str, object] = {"env": environment(), "capture_output": True, "text": True, **options}
    return subprocess.run(supervise_command(feed, job), check=False, **settings)  # type: ignore[call-overload,no-any-return]  # by name


@pytest.mark.parametrize(("job", "status"), EXITS)
def test_run_ends_as_the_job_has_ended(tmp_path: Path, job: list[str], status: int) -> None:
    ended = finish(tmp_path, *job)

    assert ended.returncode == status


def test_a_job_is_not_kept_waiting_for_the_import_of_what_can_be_configured(tmp_path: Path) -> None:
    program = (
        "import sys; from exporter.cli import run; from exporter.cli.main import main; "
        f"run.make_plan(['python', 'train.py'], {{'EXPORTER_FEED_DIR': {str(tmp_path)!r}}}); "
        "print([name for name in ('yaml', 'psutil', 'prometheus_client', 'h11') if name in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )

    assert ended.stdout == "[]\n"


def test_a_command_that_is_not_there_gives_127_and_one_line(tmp_path: Path) -> None:
    ended = finish(tmp_path, "no-such-command-anywhere")

    assert ended.returncode == 127
    assert ended.stderr == "exporter: no-such-command-anywhere: command not found\n"


def test_a_path_that_is_not_there_gives_127(tmp_path: Path) -> None:
    ended = finish(tmp_path, f"{tmp_path}/nothing")

    assert (ended.returncode, ended.stderr) == (
        127,
        f"exporter: {tmp_path}/nothing: No such file or directory\n",
    )


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("#!/bin/sh\n", 0o600, "Permission denied"),
        ("#!/no/such/shell\n", 0o700, "bad interpreter: No such file or directory"),
        ("\x7fELF\0\0\0", 0o700, "Exec format error"),
    ],
)
def test_a_file_that_cannot_be_executed_gives_126_and_one_line(
    tmp_path: Path, content: str, mode: int, message: str
) -> None:
    program = tmp_path / "program"
    program.write_text(content)
    program.chmod(mode)

    ended = finish(tmp_path, str(program))

    assert (ended.returncode, ended.stderr) == (126, f"exporter: {program}: {message}\n")


def test_a_directory_as_the_command_gives_126(tmp_path: Path) -> None:
    ended = finish(tmp_path, str(tmp_path))

    assert (ended.returncode, ended.stderr) == (126, f"exporter: {tmp_path}: Is a directory\n")


def test_a_script_without_interpreter_line_runs_as_in_a_shell(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text('echo "$1"; exit 5\n')
    script.chmod(0o700)

    ended = finish(tmp_path, str(script), "two words")

    assert (ended.returncode, ended.stdout) == (5, "two words\n")


def test_no_sidecar_is_started_for_a_command_that_cannot_be(tmp_path: Path) -> None:
    trace = tmp_path / "sidecar"
    command = supervise_command(tmp_path, ["no-such-command"], sidecar=["/bin/sh", "-c", f"touch {trace}"])

    subprocess.run(command, env=environment(), stderr=subprocess.DEVNULL, check=False)

    assert not trace.exists()


def test_the_job_has_the_streams_of_run_to_itself(tmp_path: Path) -> None:
    ended = finish(tmp_path, "sh", "-c", "read line; echo out $line; echo err >&2", input="hello\n")

    assert (ended.stdout, ended.stderr) == ("out hello\n", f"{FIRST_LINE}err\n")


def test_the_job_shares_the_process_group_and_the_session(tmp_path: Path) -> None:
    program = (
        "import os; print(os.getpgrp() == os.getpgid(os.getppid()), os.getsid(0) == os.getsid(os.getppid()))"
    )

    ended = finish(tmp_path, sys.executable, "-c", program)

    assert ended.stdout == "True True\n"


def test_the_job_gets_the_signal_mask_and_dispositions_that_run_was_given(tmp_path: Path) -> None:
    look = ["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"]
    given = ["env", "--default-signal", "--ignore-signal=HUP", "--block-signal=USR1"]

    shown = [
        subprocess.run(
            [*given, *command], env=environment(), capture_output=True, text=True, check=True
        ).stdout
        for command in (supervise_command(tmp_path, look), look)
    ]
    masks = [[int(line.split()[1], 16) & ~GLIBC_SIGNALS for line in text.splitlines()] for text in shown]

    assert masks[0] == masks[1] == [1 << signal.SIGUSR1 - 1, 1 << signal.SIGHUP - 1]


def test_descriptors_that_the_shell_left_open_reach_the_job_but_not_the_sidecar(tmp_path: Path) -> None:
    note = tmp_path / "sidecar"
    look = "ls -l /proc/self/fd | grep -c 'given$'"
    sidecar = ["/bin/sh", "-c", f"{look} > {note}.new; mv {note}.new {note}"]
    command = supervise_command(
        tmp_path, ["sh", "-c", f"while [ ! -e {note} ]; do sleep 0.05; done; {look}"], sidecar=sidecar
    )

    with (tmp_path / "given").open("w") as given:
        ended = subprocess.run(
            command,
            env=environment(),
            pass_fds=[given.fileno()],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert (ended.stdout, note.read_text()) == ("1\n", "0\n")


def test_standard_streams_that_are_closed_stay_closed_and_nothing_breaks(tmp_path: Path) -> None:
    command = supervise_command(tmp_path, ["sh", "-c", f"ls /proc/$$/fd > {tmp_path}/open; exit 4"])

    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], env=environment(), check=False
    )

    assert ended.returncode == 4
    assert not {"0", "2"} & set((tmp_path / "open").read_text().split())


def test_the_job_goes_on_when_run_is_killed(tmp_path: Path) -> None:
    job = ["sh", "-c", f"touch {tmp_path}/begun; sleep 0.5; touch {tmp_path}/ended"]
    with started(supervise_command(tmp_path, job), tmp_path) as run:
        wait_until((tmp_path / "begun").exists)
        run.kill()

        wait_until((tmp_path / "ended").exists)


def test_run_reaps_orphans_when_it_is_the_first_process_of_a_container(tmp_path: Path) -> None:
    # A subshell leaves `sleep` behind as an orphan; zombies would be seen by the last `ps`.
    orphans = "(sleep 0.1 & ) ; sleep 0.5; ps -e -o stat= | grep -c '^Z'; exit 6"
    command = [
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        *supervise_command(tmp_path, ["sh", "-c", orphans]),
    ]

    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)

    if "unshare" in ended.stderr:
        pytest.skip(f"no pid namespaces here: {ended.stderr.strip()}")
    assert (ended.returncode, ended.stdout) == (6, "0\n")
