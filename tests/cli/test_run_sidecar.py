"""The sidecar of `run`: start, join, crash, restart and end, without an effect on the job."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from places import PROJECT
from run_support import (
    FIRST_LINE,
    child_environment,
    free_port,
    in_removed_directory,
    is_ready,
    processes_naming,
    read_lines,
    run_command,
    run_to_completion,
    running_process,
    sample_value,
    sidecar_command,
    sidecars,
    supervise_command,
)
from waiting import WAIT_LIMIT_SECONDS, wait_until

from exporter.cli import sidecar_process
from exporter.cli.sidecar_process import KILL_SECONDS, REAP_SECONDS, SidecarExit, SidecarProcess
from exporter.feed import runs

RECORDING_JOB = """
import sys, time
from pathlib import Path
from exporter import Aggregation, Stat, flush
steps, continue_file = int(sys.argv[1]), Path(sys.argv[2])
stat = Stat("job.steps", {Aggregation.COUNT}, window_seconds=0.5)
for _ in range(steps):
    stat.add(1.0)
flush()
deadline = time.monotonic() + 60
while not continue_file.exists() and time.monotonic() < deadline:
    time.sleep(0.05)
stat.add(1.0)
"""
"""Job that records a number of steps, and one more step once a file exists. Arguments: STEPS FILE."""


class Launch:
    """Launch of a job that records, waits for `continue_file`, and records again."""

    def __init__(self, directory: Path) -> None:
        self.feed, self.continue_file, self.port = directory / "feed", directory / "continue", free_port()
        self.feed.mkdir()

    def command(self, *flags: str, continue_file: Path | None = None, steps: int = 5) -> list[str]:
        job = [sys.executable, "-c", RECORDING_JOB, str(steps), str(continue_file or self.continue_file)]
        return run_command(self.feed, job, *flags, port=self.port)

    @contextlib.contextmanager
    def started_run(self, *flags: str, steps: int = 5) -> Iterator[subprocess.Popen[str]]:
        """Run a real job with a real sidecar whose page has the recorded steps."""
        with running_process(self.command(*flags, steps=steps), self.feed) as run:
            wait_until(lambda: self.steps is not None)
            yield run

    @property
    def steps(self) -> float | None:
        """Total of the recorded steps on the page, or None if absent."""
        return sample_value(self.port, "job_steps_count{")


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(tmp_path)


@pytest.fixture
def feed(launch: Launch) -> Path:
    return launch.feed


def test_the_page_has_the_recorded_values_and_no_process_or_file_remains(launch: Launch) -> None:
    with launch.started_run("--run.linger=0s") as run:
        assert launch.steps == 5

        launch.continue_file.touch()
        assert run.wait() == 0
    assert processes_naming(str(launch.feed)) == set()
    assert [path.suffix for path in (launch.feed / "runs").iterdir()] == [".ended"]


def test_job_and_sidecar_run_in_a_working_directory_that_was_removed(launch: Launch, tmp_path: Path) -> None:
    command = in_removed_directory(launch.command("--gpu.replay=t4", "--run.linger=0s"), tmp_path / "removed")
    with running_process(command, launch.feed) as run:
        wait_until(lambda: launch.steps == 5)
        launch.continue_file.touch()

        assert run.wait() == 0


def test_run_does_not_wait_for_a_scrape_after_the_feed_directory_was_removed(
    feed: Path, tmp_path: Path
) -> None:
    ready_file = tmp_path / "ready"
    wait = f"until test -e {ready_file}; do sleep 0.1; done"
    job = ["sh", "-c", f"{wait}; rm -rf {feed}; exit 3"]
    with running_process(run_command(feed, job, "--run.linger=1h"), feed) as run:
        wait_until(lambda: runs.attached_owner(feed) is not None)
        ready_file.touch()

        assert run.wait(timeout=WAIT_LIMIT_SECONDS) == 3


def test_the_sidecar_lingers_until_a_regular_scraper_has_the_final_values(launch: Launch) -> None:
    observed_steps: list[float | None] = []

    def scrape_until_exit() -> bool:
        if len(observed_steps) == 3:
            launch.continue_file.touch()
        observed_steps.append(launch.steps)
        time.sleep(1)  # as a regular scraper
        return run.poll() is not None

    # Longer than the wait: only the scrape can end the linger period in time.
    with launch.started_run("--run.linger=1h") as run:
        wait_until(scrape_until_exit)

        assert [steps for steps in observed_steps if steps is not None][-1] == 5 + 1
        assert run.returncode == 0


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_after_a_signal_run_waits_neither_for_the_linger_period_nor_for_the_end_of_the_sidecar(
    feed: Path, tmp_path: Path, signal_number: int
) -> None:
    job, sleeping_sidecar = ["sh", "-c", f"touch {tmp_path}/ready; exec sleep 600"], ["/bin/sleep", "600"]
    with running_process(
        supervise_command(feed, job, sidecar=sleeping_sidecar, linger_seconds=600), feed
    ) as run:
        wait_until((tmp_path / "ready").exists)
        run.send_signal(signal_number)

        assert run.wait(timeout=WAIT_LIMIT_SECONDS) == -signal_number  # both last 600 s


def test_after_a_signal_a_short_linger_is_kept_before_the_sidecar_is_terminated(
    feed: Path, tmp_path: Path
) -> None:
    (feed / f"{'0' * 32}.feed").touch()  # of a process that has recorded
    job = ["sh", "-c", f"touch {tmp_path}/ready; exec sleep 600"]
    with running_process(
        supervise_command(feed, job, sidecar=["/bin/sleep", "600"], linger_seconds=1), feed
    ) as run:
        wait_until((tmp_path / "ready").exists)
        signal_time = time.monotonic()
        run.send_signal(signal.SIGTERM)

        assert run.wait(timeout=WAIT_LIMIT_SECONDS) == -signal.SIGTERM
        assert time.monotonic() - signal_time >= 1


def test_run_does_not_wait_for_the_start_of_the_sidecar_of_a_job_that_recorded_nothing(feed: Path) -> None:
    command = supervise_command(
        feed, ["sh", "-c", "exit 3"], sidecar=["/bin/sleep", "3600"], linger_seconds=3600
    )

    with running_process(command, feed) as run:  # which ends `run` and the sidecar if the wait fails
        assert run.wait(timeout=WAIT_LIMIT_SECONDS) == 3


def test_a_signal_ends_the_linger_period(feed: Path, tmp_path: Path) -> None:
    log_file = tmp_path / "stderr"
    (feed / f"{'0' * 32}.feed").touch()  # of a process that has recorded
    command = supervise_command(feed, ["true"], sidecar=["/bin/sleep", "3600"], linger_seconds=3600)
    with log_file.open("w") as stderr, running_process(command, feed, stderr=stderr) as run:
        wait_until(lambda: "waiting up to 3600 s for a final scrape" in log_file.read_text())
        run.send_signal(signal.SIGINT)

        assert run.wait(timeout=WAIT_LIMIT_SECONDS) == 0


def without_configuration(command: list[str]) -> list[str]:
    """Return a command without the configuration file, which would set the log level."""
    return [argument for argument in command if not argument.startswith("--config.file=")]


def test_only_the_output_of_the_job_is_printed_by_default(feed: Path) -> None:
    # A sidecar that serves has written overrides.json. On a busy machine, the file appears late.
    wait = f"for i in $(seq 300); do [ -e {feed}/overrides.json ] && break; sleep 0.1; done"
    job = ["sh", "-c", f"rm -f {feed}/overrides.json; {wait}; echo the job >&2"]
    logs = [
        run_to_completion(without_configuration(run_command(feed, job, "--run.linger=0s", *flags))).stderr
        for flags in ([], ["--log.level=info"])
    ]

    run_line, *job_lines = logs[0].splitlines()
    assert re.fullmatch(r"exporter: run sh-\d{8}-\d{4}-\w+", run_line)
    assert job_lines == ["the job"]
    assert "listening on" in logs[1]


def test_a_port_in_use_is_reported_in_one_line_and_the_job_runs(feed: Path, tmp_path: Path) -> None:
    log_file = tmp_path / "stderr"
    wait = f"for i in $(seq 300); do grep -q 'cannot listen' {log_file} && break; sleep 0.1; done"
    job = ["sh", "-c", f"{wait}; sleep 0.5; exit 3"]
    with socket.create_server(("127.0.0.1", 0)) as listener, log_file.open("w") as stderr:
        port = listener.getsockname()[1]
        command = run_command(feed, job, "--log.level=error", port=port)
        result = run_to_completion(command, capture_output=False, stderr=stderr)

    assert result.returncode == 3
    first_line, error_line = log_file.read_text().splitlines()
    assert first_line.startswith("exporter: run ")
    assert str(port) not in first_line  # the printed address is never a foreign page
    assert f"cannot listen on 127.0.0.1:{port}" in error_line


RESOLVER_WITHOUT_RESPONSE = """
import socket, time
socket.getaddrinfo = lambda *arguments, **options: time.sleep(600)
"""
"""Module `sitecustomize` of a machine whose DNS server does not respond."""


def test_the_sidecar_is_terminated_before_it_is_killed_even_if_run_was_suspended() -> None:
    signals: list[int] = []
    now = [0.0]
    sidecar: Any = SimpleNamespace(pid=1, send=signals.append)
    sidecar_exit = SidecarExit(sidecar, linger_seconds=30.0, monotonic=lambda: now[0])
    results = []
    for seconds in (1000.0, KILL_SECONDS, REAP_SECONDS):  # suspended by Ctrl-Z for 1000 s
        now[0] += seconds
        results.append(sidecar_exit.advance())

    assert signals == [signal.SIGTERM, signal.SIGKILL]
    assert results == [True, True, False]


def test_the_job_does_not_wait_for_the_resolution_of_the_listen_address(feed: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(RESOLVER_WITHOUT_RESPONSE)
    command = run_command(feed, ["touch", str(tmp_path / "started")], "--web.listen-address=trainer:20909")
    command.remove("--web.listen-address=127.0.0.1:0")
    search_path = f"{tmp_path}:{PROJECT}"
    with running_process(command, feed, env=child_environment(PYTHONPATH=search_path)) as run:
        wait_until((tmp_path / "started").exists)

        assert run.wait(timeout=WAIT_LIMIT_SECONDS) == 0


def test_stat_rules_exist_before_the_first_value_of_the_job(feed: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("recording: [{match: demo.latency, aggregations: [histogram], buckets: [0.01, 0.1]}]")
    job = ["sh", "-c", "cat $EXPORTER_FEED_DIR/overrides.json"]
    result = run_to_completion(run_command(feed, job, f"--config.file={config}", "--run.linger=0s"))

    (rule,) = json.loads(result.stdout)["rules"]
    assert (result.returncode, rule["buckets"]) == (0, [0.01, 0.1])


def test_a_later_run_joins_the_sidecar_which_ends_with_the_last(launch: Launch, tmp_path: Path) -> None:
    second_continue_file = tmp_path / "second"
    with launch.started_run("--run.linger=0s") as first_run:
        (sidecar,) = sidecars(launch.feed)
        joining_command = launch.command("--run.linger=0s", continue_file=second_continue_file)
        with running_process(joining_command, tmp_path / "none") as second_run:
            wait_until(lambda: len(runs.jobs(launch.feed)) == 2)
            launch.continue_file.touch()
            assert first_run.wait(timeout=WAIT_LIMIT_SECONDS) == 0
            assert sidecars(launch.feed) == [sidecar]
            assert is_ready(launch.port)

            second_continue_file.touch()
            assert second_run.wait(timeout=WAIT_LIMIT_SECONDS) == 0
            assert sidecars(launch.feed) == []


def test_a_run_beside_a_running_exporter_starts_no_sidecar_and_does_not_stop_the_exporter(
    launch: Launch,
) -> None:
    command = sidecar_command(launch.feed, "--log.level=error", port=launch.port)
    with running_process(command, launch.feed) as exporter:
        wait_until(lambda: is_ready(launch.port))
        with launch.started_run() as run:
            launch.continue_file.touch()
            assert run.wait(timeout=WAIT_LIMIT_SECONDS) == 0

            assert exporter.poll() is None
            assert sidecars(launch.feed) == []
            assert is_ready(launch.port)


def test_the_job_is_unaffected_by_a_killed_sidecar_and_totals_continue(launch: Launch) -> None:
    with launch.started_run("--run.linger=0s") as run:
        (sidecar,) = sidecars(launch.feed)
        os.kill(sidecar, signal.SIGKILL)

        wait_until(lambda: sidecars(launch.feed) not in ([], [sidecar]))
        wait_until(lambda: launch.steps == 5)
        launch.continue_file.touch()
        assert run.wait(timeout=WAIT_LIMIT_SECONDS) == 0


def test_a_named_run_continues_the_totals_of_the_previous_launch(launch: Launch) -> None:
    with launch.started_run("--run.linger=0s", "--run.name=llama") as run:
        launch.continue_file.touch()
        run.wait()
    launch.continue_file.unlink()

    with launch.started_run("--run.linger=0s", "--run.name=llama", steps=10):
        wait_until(lambda: launch.steps == 5 + 1 + 10)


def test_after_run_is_killed_job_and_sidecar_continue_and_end_together(launch: Launch) -> None:
    with launch.started_run("--run.linger=0s") as run:
        run.kill()
        run.wait()
        time.sleep(1.5)  # three times the interval in which the sidecar looks for runs
        assert launch.steps == 5

        launch.continue_file.touch()
        markers = (launch.feed, launch.continue_file)
        wait_until(lambda: not any(processes_naming(str(marker)) for marker in markers))


# Supervision alone, with another program in place of the sidecar ------------------------------------


def test_a_crashed_sidecar_is_restarted_and_reported(feed: Path, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    starts.touch()
    sidecar = ["/bin/sh", "-c", f"echo x >> {starts}; [ $(wc -l < {starts}) -lt 2 ] && exit 9; exit 2"]
    job = ["sh", "-c", f"while [ $(wc -l < {starts}) -lt 2 ]; do sleep 0.1; done; sleep 0.2"]
    stderr = run_to_completion(supervise_command(feed, job, sidecar=sidecar)).stderr

    restart_line = "exporter: the sidecar ended with status 9; it restarts in 1 s; the job is not affected\n"
    assert stderr == FIRST_LINE + restart_line
    assert len(read_lines(starts)) == 2


def test_a_sidecar_that_fails_after_the_job_is_reported(feed: Path, tmp_path: Path) -> None:
    end = tmp_path / "end"
    sidecar = ["/bin/sh", "-c", f"while [ ! -e {end} ]; do sleep 0.05; done; sleep 0.5; exit 9"]
    job = [
        "sh",
        "-c",
        f"touch {feed / ('0' * 32)}.feed {end}",
    ]  # with a recording, `run` waits for the sidecar
    stderr = run_to_completion(supervise_command(feed, job, sidecar=sidecar, linger_seconds=600)).stderr

    report = "the sidecar ended with status 9 after the job; the last values of the job may be missing"
    assert f"exporter: {report}\n" in stderr


def test_the_sidecar_has_its_own_session_and_no_standard_input(feed: Path, tmp_path: Path) -> None:
    report = tmp_path / "report"
    # Writes the process id, the session id and the target of standard input.
    script = (
        f"cut -d' ' -f1,6 /proc/self/stat > {report}.new; readlink /proc/self/fd/0 >> {report}.new;"
        f" mv {report}.new {report}"
    )
    job = ["sh", "-c", f"while [ ! -e {report} ]; do sleep 0.05; done"]
    run_to_completion(supervise_command(feed, job, sidecar=["/bin/sh", "-c", script]))

    process_and_session, standard_input = read_lines(report)
    assert int(process_and_session.split()[1]) != os.getsid(0)
    assert standard_input == "/dev/null"


def test_a_sidecar_that_ignores_sigterm_is_killed(feed: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    sigterm_ignoring_sidecar = ["/bin/sh", "-c", f"trap '' TERM; touch {ready}; while :; do sleep 0.1; done"]
    job = ["sh", "-c", f"while [ ! -e {ready} ]; do sleep 0.05; done"]
    with running_process(
        supervise_command(feed, job, sidecar=sigterm_ignoring_sidecar, linger_seconds=600), feed
    ) as run:
        wait_until(lambda: ready.exists() and not runs.needs_sidecar(feed))
        time.sleep(0.3)
        # `run` is stopped when the time limit of the sidecar expires.
        for signal_number, seconds in ((signal.SIGTERM, 0.5), (signal.SIGSTOP, 3.0), (signal.SIGCONT, 0.0)):
            run.send_signal(signal_number)
            time.sleep(seconds)
        assert run.wait(timeout=WAIT_LIMIT_SECONDS) == 0
    assert processes_naming(str(ready)) == set()


def test_a_sidecar_that_cannot_be_started_is_given_up_after_growing_delays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0  # the machine has run for longer than `STABLE_SECONDS`
    monkeypatch.setattr(sidecar_process, "time", SimpleNamespace(monotonic=lambda: now))
    sidecar = SidecarProcess(("/missing/python",), tmp_path, mask=())
    delays = []
    for _ in range(sidecar_process.MAX_RESTARTS + 1):
        sidecar.check()
        delays.append(sidecar.wait_seconds())
        now += delays[-1]

    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, math.inf]
    assert "6 times in a row" in capfd.readouterr().err


def test_the_job_runs_despite_a_listen_address_that_is_no_host_name(tmp_path: Path) -> None:
    flags = [f"--feed.dir={tmp_path}", "--web.listen-address=a..b:9123"]
    result = run_to_completion([sys.executable, "-m", "exporter", "run", *flags, "--", "echo", "job"])

    assert (result.returncode, result.stdout) == (0, "job\n")
