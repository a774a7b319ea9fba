"""Job under `run`: exit status, environment, inherited resources, and the recorded exit status."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import PROJECT
from run_support import (
    FIRST_LINE,
    child_environment,
    in_removed_directory,
    run_command,
    run_to_completion,
    running_process,
    supervise_command,
)
from waiting import wait_until

from exporter.feed import runs
from exporter.feed.ownership import DirectoryOwnership

GLIBC_SIGNALS = 0b11 << 31
"""Mask of the two internal signals of glibc, which posix_spawn ignores in the child until the thread library restores them."""


@pytest.fixture
def owned_feed(feed: Path) -> Iterator[Path]:
    """Return a feed directory that another exporter owns, so that `run` starts no sidecar."""
    feed.mkdir()
    ownership = DirectoryOwnership(feed)
    assert ownership.acquire()
    yield feed
    ownership.release()


def run_job(feed: Path, *job: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a job until its exit."""
    return run_to_completion(supervise_command(feed, job), **options)


@pytest.mark.parametrize(
    ("program", "status"),
    [("exit 0", 0), ("exit 255", 255), ("kill -KILL $$", -9), ("kill -TERM $$", -15), ("kill -SEGV $$", -11)],
)
def test_run_exits_with_the_status_of_the_job(tmp_path: Path, program: str, status: int) -> None:
    start_time = time.time()
    result = run_job(tmp_path, "sh", "-c", program)
    (end,) = runs.process_ends(tmp_path)

    assert (result.returncode, end.status, end.run) == (status, status, "r")
    assert start_time < end.started_at < end.noticed_at < time.time()


def test_the_plan_of_a_job_is_made_without_the_packages_of_the_sidecar(tmp_path: Path) -> None:
    program = (
        "import sys; from exporter.cli import run; from exporter.cli.main import main; "
        f"run.make_plan(['python', 'train.py'], {{'EXPORTER_FEED_DIR': {str(tmp_path)!r}}}); "
        "print([name for name in ('yaml', 'psutil', 'prometheus_client', 'h11') if name in sys.modules])"
    )

    assert run_to_completion([sys.executable, "-c", program]).stdout == "[]\n"


@pytest.mark.parametrize(
    ("name", "program", "mode", "status", "message"),
    [
        ("no-such-command-anywhere", None, 0, 127, "no-such-command-anywhere: command not found"),
        ("{}/nothing", None, 0, 127, "{}/nothing: No such file or directory"),
        ("{}/program", "#!/bin/sh\n", 0o600, 126, "{}/program: Permission denied"),
        ("{}/program", "#!/no/such/shell\n", 0o700, 126, "{}/program: No such file or directory"),
        ("{}/program", "echo", 0o700, 126, "{}/program: Exec format error"),
    ],
)
def test_a_command_that_cannot_be_executed_exits_as_in_a_shell_with_one_line(
    tmp_path: Path, name: str, program: str | None, mode: int, status: int, message: str
) -> None:
    if program is not None:
        (tmp_path / "program").write_text(program)
        (tmp_path / "program").chmod(mode)
    sidecar_file = tmp_path / "sidecar"  # created by the stand-in for the sidecar
    result = run_to_completion(
        supervise_command(tmp_path, [name.format(tmp_path)], sidecar=["/bin/touch", str(sidecar_file)])
    )

    assert (result.returncode, result.stderr) == (status, f"exporter: {message.format(tmp_path)}\n")
    assert not sidecar_file.exists()


def test_the_job_owns_the_standard_streams(tmp_path: Path) -> None:
    result = run_job(tmp_path, "sh", "-c", "read line; echo out $line; echo err >&2", input="hello\n")

    assert result.stdout == "out hello\n"
    assert {*result.stderr.splitlines(keepends=True)} == {FIRST_LINE, "err\n"}


def test_the_job_shares_the_process_group_and_the_session(tmp_path: Path) -> None:
    program = "import os; print([read_id(0) == read_id(os.getppid()) for read_id in (os.getpgid, os.getsid)])"

    assert run_job(tmp_path, sys.executable, "-c", program).stdout == "[True, True]\n"


def test_the_job_inherits_the_signal_mask_and_dispositions_of_run(tmp_path: Path) -> None:
    print_masks = ["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"]
    env_command = ["env", "--default-signal", "--ignore-signal=HUP", "--block-signal=USR1"]

    outputs = [
        run_to_completion([*env_command, *command]).stdout
        for command in (supervise_command(tmp_path, print_masks), print_masks)
    ]
    masks_under_run, masks_without_run = (
        [int(line.split()[1], 16) & ~GLIBC_SIGNALS for line in output.splitlines()] for output in outputs
    )

    assert masks_under_run == masks_without_run == [1 << signal.SIGUSR1 - 1, 1 << signal.SIGHUP - 1]


def test_inherited_descriptors_reach_the_job_but_not_the_sidecar(tmp_path: Path) -> None:
    sidecar_output = tmp_path / "sidecar"
    count_inherited = "ls -l /proc/self/fd | grep -c 'inherited$'"
    sidecar = [
        "/bin/sh",
        "-c",
        f"{count_inherited} > {sidecar_output}.new; mv {sidecar_output}.new {sidecar_output}",
    ]
    job = ["sh", "-c", f"while [ ! -e {sidecar_output} ]; do sleep 0.05; done; {count_inherited}"]
    with (tmp_path / "inherited").open("w") as file:
        result = run_to_completion(
            supervise_command(tmp_path, job, sidecar=sidecar), pass_fds=[file.fileno()]
        )

    assert (result.stdout, sidecar_output.read_text()) == ("1\n", "0\n")


def test_run_works_with_closed_standard_streams(tmp_path: Path) -> None:
    command = run_command(tmp_path, ["sh", "-c", "exit 4"])

    assert run_to_completion(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]).returncode == 4


def test_run_reaps_orphans_as_the_first_process_of_a_container(tmp_path: Path) -> None:
    # A subshell leaves `sleep` as an orphan; the last `ps` would list zombies.
    orphans = "(sleep 0.1 & ) ; sleep 0.5; ps -e -o stat= | grep -c '^Z'; exit 6"
    job = supervise_command(tmp_path, ["sh", "-c", orphans])
    result = run_to_completion(["unshare", "--pid", "--fork", "--mount-proc", *job])

    if "unshare" in result.stderr:
        pytest.skip(f"no pid namespaces here: {result.stderr.strip()}")
    assert (result.returncode, result.stdout) == (6, "0\n")


def test_a_live_launch_names_run_and_job_and_a_killed_launch_does_not(tmp_path: Path) -> None:
    command = run_command(tmp_path, ["sleep", "60"], "--run.name=llama")
    with running_process(command, tmp_path) as run:
        wait_until(lambda: runs.jobs(tmp_path))
        (job,) = runs.jobs(tmp_path)
        # Directly after the spawn, the process still has the name of the parent.
        wait_until(lambda: Path(f"/proc/{job.pid}/comm").read_text() == "sleep\n")
        run.kill()
        run.wait()

        assert job.run == "llama"
        assert runs.jobs(tmp_path) == []


def test_an_exit_record_is_removed_after_a_day(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    path = tmp_path / "runs" / "2-b.ended"
    path.write_text(json.dumps({"pid": 2, "status": -9, "at": 5.0}))
    runs.remove_old_ends(tmp_path)
    existed_before = path.exists()
    runs.remove_old_ends(tmp_path, clock=lambda: path.stat().st_mtime + runs.END_RETENTION_SECONDS + 1)

    assert existed_before
    assert not path.exists()


# The command line -------------------------------------------------------------------------------------


def test_the_separator_is_optional_and_the_job_keeps_its_flags(owned_feed: Path) -> None:
    job = ["sh", "-c", "echo $0 $*", "--web.listen-address=x", "--", "-v"]
    flags = ["--feed.dir", str(owned_feed), "--web.listen-address=127.0.0.1:0"]
    result = run_to_completion([sys.executable, "-m", "exporter", "run", *flags, *job])

    assert (result.returncode, result.stdout) == (0, "--web.listen-address=x -- -v\n")


@pytest.mark.parametrize(
    ("arguments", "error_text"),
    [(["--run.lingr=1s", "touch", "{}/started"], "--run.linger"), ([], "[--] COMMAND ARG...")],
)
def test_an_invalid_command_line_is_refused_before_the_job_starts(
    tmp_path: Path, arguments: list[str], error_text: str
) -> None:
    job_arguments = [argument.format(tmp_path) for argument in arguments]
    result = run_to_completion(
        [sys.executable, "-m", "exporter", "run", f"--feed.dir={tmp_path}", *job_arguments]
    )

    assert result.returncode == 2
    assert error_text in result.stderr
    assert not (tmp_path / "started").exists()


def test_a_job_with_the_exporter_disabled_runs_unchanged(tmp_path: Path) -> None:
    command = run_command(tmp_path, ["sh", "-c", f"sleep 0.5; exec ls {tmp_path}"])
    result = run_to_completion(command, env=child_environment(EXPORTER_DISABLED="1"))

    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_an_unusable_feed_directory_is_reported_in_one_line_and_the_job_runs(tmp_path: Path) -> None:
    feed_file = tmp_path / "file"
    feed_file.touch()
    result = run_to_completion(run_command(feed_file, ["sh", "-c", "echo $EXPORTER_FEED_DIR; exit 3"]))

    assert (result.returncode, result.stdout) == (3, f"{feed_file}\n")
    assert len(result.stderr.splitlines()) == 1
    assert "the job runs without metrics" in result.stderr


def test_a_relative_feed_directory_in_a_removed_directory_is_reported_and_the_job_runs(
    tmp_path: Path,
) -> None:
    command = run_command(Path("feed"), ["sh", "-c", "exit 3"])
    result = run_to_completion(in_removed_directory(command, tmp_path / "removed"))

    assert result.returncode == 3
    assert "the job runs without metrics: cannot create the feed directory" in result.stderr


def test_the_environment_of_the_job_names_feed_directory_and_run(owned_feed: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("echo $EXPORTER_FEED_DIR $EXPORTER_AUTO $EXPORTER_LAUNCH $EXPORTER_RUN")

    def job_environment(*flags: str, **variables: str) -> list[str]:
        result = run_to_completion(
            run_command(owned_feed, ["bash", str(script)], *flags), env=child_environment(**variables)
        )
        fields = result.stdout.split()
        assert f"exporter: run {fields[-1]}" in result.stderr
        return fields

    (*_, launch), (*_, other_launch) = job_environment(), job_environment()
    assert launch != other_launch
    assert re.fullmatch(r"train-\d{8}-\d{4}-\w+", launch)
    assert job_environment("--run.name=llama")[::3] == [str(owned_feed), "llama"]
    assert job_environment(EXPORTER_RUN="mine", EXPORTER_AUTO="0")[1::2] == ["0", "mine"]


def test_two_threads_may_import_the_first_bridged_libraries_at_the_same_time(owned_feed: Path) -> None:
    # Both threads hold the finder before the first of them removes the finder from `sys.meta_path`.
    program = (
        "import sys; finder = next(hook for hook in sys.meta_path if 'sitecustomize' in str(hook));"
        "specs = [finder.find_spec('keras'), finder.find_spec('ignite.engine')]; print(len(specs))"
    )
    result = run_to_completion(run_command(owned_feed, [sys.executable, "-c", program]))

    assert (result.returncode, result.stdout) == (0, "2\n"), result.stderr


@pytest.mark.parametrize(("auto", "has_hook"), [("1", True), ("0", False)])
def test_libraries_without_entry_points_are_hooked_and_a_sitecustomize_of_the_user_is_loaded(
    auto: str, has_hook: bool, owned_feed: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("")
    program = (
        "import sitecustomize as own, sys; hooks = [hook for hook in sys.meta_path if 'sitecustomize' in str(hook)];"
        "print(own.__file__, bool(hooks), [path for path in sys.path if 'autoload' in path])"
    )
    path = f"{PROJECT}:{tmp_path}"
    command = run_command(owned_feed, [sys.executable, "-c", program])
    result = run_to_completion(command, env=child_environment(PYTHONPATH=path, EXPORTER_AUTO=auto))

    assert result.stdout.split(maxsplit=2) == [str(tmp_path / "sitecustomize.py"), str(has_hook), "[]\n"]


def test_a_failed_import_in_the_sitecustomize_of_the_user_is_reported_by_python(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import missing_library")
    path = f"{PROJECT}/exporter/autoload:{PROJECT}:{tmp_path}"
    command = [sys.executable, "-c", "print('job')"]
    result = run_to_completion(command, env=child_environment(PYTHONPATH=path, EXPORTER_AUTO="1"))

    assert (result.returncode, result.stdout) == (0, "job\n")
    assert "No module named 'missing_library'" in result.stderr
