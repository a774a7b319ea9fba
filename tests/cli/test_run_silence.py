"""Reason and remedy for jobs that record nothing, and jobs beside a file named `exporter.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_support import make_process
from places import PROJECT
from run_support import (
    child_environment,
    fetch_page,
    free_port,
    run_to_completion,
    running_process,
    scrape,
    supervise_command,
)
from waiting import WAIT_LIMIT_SECONDS, wait_until

from exporter.cli.silence import (
    LaunchedProcess,
    install_command,
    may_write,
    probe_interpreter,
    silence_of,
)
from exporter.cli.silent_jobs import SilentJobs
from exporter.feed.runs import Job, Silence
from exporter.recording.values import ProcessIdentity

LAUNCHER = [sys.executable, str(PROJECT / "training_exporter.py")]


@contextlib.contextmanager
def sleeping_job(
    tmp_path: Path, program: str, *prefix: str, python: str = sys.executable, **variables: str
) -> Iterator[int]:
    """Run a Python job that sleeps after its program, in the environment that `run` sets, and yield its process id."""
    script = tmp_path / "train.py"
    script.write_text(f"{program}\nprint('ready', flush=True)\nimport time; time.sleep(60)\n")
    env = child_environment(EXPORTER_AUTO="1", EXPORTER_FEED_DIR=str(tmp_path)) | variables
    command = [*prefix, python, str(script)]
    with running_process(command, tmp_path, env=env, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid


def reported_silence(tmp_path: Path, pid: int) -> Silence:
    silence = silence_of(pid, "r", tmp_path)
    assert silence is not None
    return silence


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of an interpreter without the package."""
    directory = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    return str(directory / "bin" / "python")


def test_an_interpreter_without_the_package_is_named_with_a_remedy(tmp_path: Path, bare_python: str) -> None:
    with sleeping_job(tmp_path, "", python=bare_python, PYTHONPATH="") as pid:
        silence = reported_silence(tmp_path, pid)

    assert silence.reason == "not_installed"
    assert silence.found == f"training-exporter is not installed for {bare_python}"
    assert f"PYTHONPATH={PROJECT}" in silence.remedy or f"pip install {PROJECT}" in silence.remedy


@pytest.mark.parametrize("last_line", ["5", '{"step": 5}', "null"])
def test_output_of_exit_handlers_does_not_affect_the_diagnosis(tmp_path: Path, last_line: str) -> None:
    program = f"import atexit\natexit.register(print, {last_line!r})\n"
    (tmp_path / "sitecustomize.py").write_text(program, encoding="utf-8")

    interpreter = probe_interpreter(
        sys.executable, search_path=str(tmp_path), environment={"PYTHONPATH": str(tmp_path)}
    )

    assert not interpreter.error
    assert interpreter.python


def test_a_file_that_shadows_the_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "exporter.py").write_text("")
    with sleeping_job(tmp_path, "") as pid:
        silence = reported_silence(tmp_path, pid)

    assert silence.reason == "shadowed"
    assert str(tmp_path / "exporter.py") in silence.found


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"EXPORTER_DISABLED": "1"}, "turned_off"),
        ({"EXPORTER_AUTO": "0"}, "turned_off"),
        ({"EXPORTER_FEED_DIR": "/elsewhere"}, "environment"),
        ({}, "nothing_recorded"),
    ],
)
def test_the_reason_of_a_job_that_records_nothing_is_reported(
    tmp_path: Path, variables: dict[str, str], reason: str
) -> None:
    with sleeping_job(tmp_path, "", **variables) as pid:
        assert reported_silence(tmp_path, pid).reason == reason


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change to another user")
def test_a_directory_that_is_not_writable_for_the_job_is_reported(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with sleeping_job(tmp_path, "import os; os.setuid(65534)") as pid:
        assert reported_silence(tmp_path, pid).reason == "feed_directory"


@pytest.mark.parametrize(
    ("mode", "identity", "is_writable"),
    [
        (0o700, "os.setuid(65534)", False),
        (0o755, "os.setuid(65534)", False),
        (0o773, "os.setuid(65534)", True),
        (0o770, "os.setgroups([]); os.setgid(65534); os.setuid(65534)", False),
        (0o770, "os.setgroups([12345]); os.setgid(65534); os.setuid(65534)", True),
        (0o770, "os.setgroups([]); os.setgid(12345); os.setuid(65534)", True),
        (0o703, "os.setgroups([]); os.setgid(12345); os.setuid(65534)", False),
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change to another user")
def test_write_access_is_checked_with_the_credentials_of_the_job(
    tmp_path: Path, mode: int, identity: str, *, is_writable: bool
) -> None:
    os.chown(tmp_path, 0, 12345)
    tmp_path.chmod(mode)
    program = f"import os, time; {identity}; print('ready', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", program]
    env = child_environment()
    with running_process(command, tmp_path, env=env, cwd="/", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()

        assert may_write(tmp_path, process.pid) is is_writable


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change to another user")
def test_a_job_of_root_may_write_to_a_directory_that_the_exporter_may_not_write_to() -> None:
    program = (
        "import os, sys; from pathlib import Path; from exporter.cli.silence import may_write;"
        "os.setuid(65534); print(may_write(Path(sys.argv[1]), int(sys.argv[2])))"
    )
    # The parent directories of `tmp_path` are accessible to root only.
    with tempfile.TemporaryDirectory() as directory, subprocess.Popen(["sleep", "60"]) as job:
        Path(directory).chmod(0o755)
        output = run_to_completion([sys.executable, "-c", program, directory, str(job.pid)]).stdout
        job.kill()

    assert output == "True\n"


@pytest.mark.parametrize(
    ("arguments", "directory"),
    [
        ("code/train.py", "/job/code"),
        ("-u -X dev -Wignore /opt/train.py", "/opt"),
        ("-m train code/file.py", "/job"),
        ("-mtrain code/file.py", "/job"),
        ("-uX dev code/train.py", "/job/code"),
        ("-c pass code/file.py", "/job"),
        ("- code/file.py", "/job"),
        ("--check-hash-based-pycs always code/train.py", "/job/code"),
        ("", "/job"),
    ],
)
def test_the_import_directory_is_the_directory_of_the_script_or_the_working_directory(
    arguments: str, directory: str
) -> None:
    process = LaunchedProcess(1, ["python", *arguments.split()], {}, "/job")

    assert process.import_directory == directory


def test_a_recording_job_is_not_reported_as_silent(tmp_path: Path) -> None:
    program = "import exporter; exporter.Stat('a', ['mean']).add(1.0); exporter.flush()"
    with sleeping_job(tmp_path, program, "sh", "-c", '"$@"; true', "sh") as pid:
        assert silence_of(pid, "r", tmp_path) is None


def test_a_job_without_python_is_not_reported_as_silent(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"], env=child_environment()) as process:
        silence = silence_of(process.pid, "r", tmp_path)
        process.kill()

    assert silence is None


def test_a_path_with_a_space_is_quoted_in_the_remedy() -> None:
    assert "'/opt/my python/bin/python'" in install_command("/opt/my python/bin/python", "")


def test_the_remedy_needs_no_package_index(tmp_path: Path, bare_python: str) -> None:
    if "PYTHONPATH=" not in install_command(bare_python, ""):
        pytest.skip("the package is not installed from here")
    program = "import exporter, importlib.metadata as metadata; print([point.value for point in metadata.entry_points(group='torch.backends')])"
    result = run_to_completion([bare_python, "-c", program])

    assert "exporter_auto:start" in result.stdout


@pytest.mark.timeout(90)
def test_run_and_the_page_give_the_reason_of_a_silent_job_once(tmp_path: Path, bare_python: str) -> None:
    feed, port = tmp_path / "feed", free_port()
    feed.mkdir()
    flags = [f"--feed.dir={feed}", f"--web.listen-address=127.0.0.1:{port}", "--run.linger=0s"]
    command = [*LAUNCHER, "run", *flags, bare_python, "-c", "import time; time.sleep(60)"]
    log_file = tmp_path / "stderr"
    with (
        log_file.open("w") as stderr,
        running_process(command, feed, stderr=stderr, cwd=tmp_path, env=child_environment(PYTHONPATH="")),
    ):
        wait_until(lambda: "has recorded nothing" in log_file.read_text(), 40)
        wait_until(lambda: "training_run_silent{" in fetch_page(port))
        status_page, metrics = scrape(port, "/"), fetch_page(port)
        check_command = [*LAUNCHER, "check", f"--feed.dir={feed}", "--web.listen-address=127.0.0.1:0"]
        check_output = run_to_completion(check_command).stdout

    log = log_file.read_text()
    assert log.count("has recorded nothing") == 1
    assert f"not installed for {bare_python}" in log
    assert f"not installed for {bare_python}" in status_page
    assert metrics.count("\ntraining_run_silent{") == 1
    assert 'reason="not_installed"' in metrics
    assert "records nothing: training-exporter is not installed for" in check_output


def test_a_job_that_records_under_a_name_of_its_own_is_not_silent(tmp_path: Path) -> None:
    silence = Silence("nothing_recorded", "found", "remedy")
    with running_process(supervise_command(tmp_path, ["sleep", "60"]), tmp_path):
        (job_file,) = wait_until(lambda: [*(tmp_path / "runs").glob("*.job")])
        job = Job(7, "train-1", 0.0, silence, launch="5f2c")
        job_file.write_text(json.dumps(dataclasses.asdict(job)))
        recording_processes: list[ProcessIdentity] = []
        jobs = SilentJobs(tmp_path, lambda: recording_processes)
        jobs.collect()
        jobs_before_recording = jobs.jobs
        recording_processes.append(make_process(run="mine", launch="5f2c"))
        jobs.collect()

    assert jobs_before_recording == (job,)
    assert jobs.jobs == ()


@pytest.mark.parametrize(("name", "path"), [("exporter.py", "."), ("exporter/__init__.py", "")])
def test_a_module_named_exporter_of_the_job_shadows_nothing(tmp_path: Path, name: str, path: str) -> None:
    module_file = tmp_path / name
    module_file.parent.mkdir(exist_ok=True)
    module_file.write_text("print('the job of the user')\n")
    feed, port = tmp_path / "feed", free_port()
    feed.mkdir()
    flags = [f"--feed.dir={feed}", f"--web.listen-address=127.0.0.1:{port}", "--run.linger=0s"]
    program = "import exporter, sys; sys.stdin.readline()"
    command = [*LAUNCHER, "run", *flags, sys.executable, "-c", program]
    settings = {"cwd": tmp_path, "env": child_environment(PYTHONPATH=path), "stdin": subprocess.PIPE}
    with running_process(command, feed, stdout=subprocess.PIPE, **settings) as run:
        wait_until(lambda: "exporter_build_info" in fetch_page(port))
        output, _ = run.communicate("\n", timeout=WAIT_LIMIT_SECONDS)

    assert (run.returncode, output) == (0, "the job of the user\n")
