"""The sidecar beside the job: started, joined, lost, started again, and seen out; the job never notices."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from run_support import (
    FIRST_LINE,
    answers,
    finished,
    free_port,
    lines,
    page,
    processes_naming,
    run_command,
    scrape,
    sidecars,
    started,
    supervise_command,
)
from waiting import PATIENCE, wait_until

from exporter.feed import runs

# Records as many steps as the first argument says, then goes on when a file appears.
RECORDING_JOB = """
import sys, time
from pathlib import Path
from exporter import Aggregation, Stat, flush
steps, go_on = int(sys.argv[1]), Path(sys.argv[2])
stat = Stat("job.steps", {Aggregation.COUNT}, window_seconds=0.5)
for _ in range(steps):
    stat.add(1.0)
flush()
until = time.monotonic() + 15
while not go_on.exists() and time.monotonic() < until:
    time.sleep(0.05)
stat.add(1.0)
"""


def recording_job(go_on: Path, steps: int = 5) -> list[str]:
    """A job that records and waits for a file; it records once more after that."""
    return [sys.executable, "-c", RECORDING_JOB, str(steps), str(go_on)]


def steps_on(port: int) -> float | None:
    """The total of the recorded steps on the page."""
    found = [line for line in page(port).splitlines() if line.startswith("job_steps_count{")]
    return float(found[0].split()[-1]) if found else None


@contextlib.contextmanager
def recording_run(
    feed: Path, go_on: Path, port: int, *flags: str, steps: int = 5
) -> Iterator[subprocess.Popen[str]]:
    """A real run with a real sidecar, whose recorded steps are on the page."""
    with started(run_command(feed, recording_job(go_on, steps), *flags, port=port), feed) as run:
        wait_until(lambda: steps_on(port) is not None)
        yield run


@pytest.fixture
def feed(tmp_path: Path) -> Path:
    """A feed directory."""
    directory = tmp_path / "feed"
    directory.mkdir()
    return directory


def test_the_page_has_what_the_job_records_and_nothing_is_left_afterwards(feed: Path, tmp_path: Path) -> None:
    port, go_on = free_port(), tmp_path / "go-on"
    with recording_run(feed, go_on, port, "--run.linger=0s") as run:
        assert steps_on(port) == 5

        go_on.touch()
        assert run.wait() == 0
    assert processes_naming(str(feed)) == set()
    assert [path.suffix for path in (feed / "runs").iterdir()] == [".ended"]


def test_the_sidecar_lingers_until_a_regular_scraper_has_the_final_values(feed: Path, tmp_path: Path) -> None:
    port, go_on = free_port(), tmp_path / "go-on"
    # Far longer than a test may take: only the scrape can end it.
    with recording_run(feed, go_on, port, "--run.linger=60s") as run:
        seen: list[float | None] = []
        while run.poll() is None:
            if len(seen) == 3:
                go_on.touch()
            seen.append(steps_on(port))
            time.sleep(1)

        assert [steps for steps in seen if steps is not None][-1] == 5 + 1
        assert run.returncode == 0


def test_after_a_sigterm_run_waits_three_seconds_at_most(feed: Path, tmp_path: Path) -> None:
    port, go_on = free_port(), tmp_path / "go-on"
    with recording_run(feed, go_on, port, "--run.linger=60s") as run:
        for _ in range(3):
            scrape(port)
            time.sleep(1.2)  # a regular scraper
        began = time.monotonic()
        run.send_signal(signal.SIGTERM)

        assert run.wait(timeout=10 * PATIENCE) == -signal.SIGTERM
        assert time.monotonic() - began < 3 + 1 * PATIENCE


def test_nothing_but_the_job_is_heard_unless_somebody_wants_more(feed: Path) -> None:
    # What a sidecar writes as soon as it serves: a busy machine takes its time.
    wait = f"for i in $(seq 300); do [ -e {feed}/overrides.json ] && break; sleep 0.1; done"
    job = ["sh", "-c", f"rm -f {feed}/overrides.json; {wait}; echo the job >&2"]
    heard = [
        finished(run_command(feed, job, "--run.linger=0s", *flags)).stderr
        for flags in ([], ["--log.level=info"])
    ]

    first, *rest = heard[0].splitlines()
    assert re.fullmatch(r"exporter: run sh-\d{8}-\d{4}-\w+", first)
    assert rest == ["the job"]
    assert "listening on" in heard[1]


def test_a_signal_ends_the_lingering_at_once(feed: Path, tmp_path: Path) -> None:
    port, go_on = free_port(), tmp_path / "go-on"
    with recording_run(feed, go_on, port, "--run.linger=60s") as run:
        for _ in range(3):
            scrape(port)
            time.sleep(3)
        go_on.touch()
        wait_until(lambda: not runs.any_active(feed))
        time.sleep(0.2)
        run.send_signal(signal.SIGINT)

        assert run.wait(timeout=8 * PATIENCE) == 0
    assert sidecars(feed) == []


def test_a_port_that_is_taken_costs_one_line_and_not_the_job(feed: Path, tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    wait = f"for i in $(seq 300); do grep -q 'cannot listen' {heard} && break; sleep 0.1; done"
    with socket.create_server(("127.0.0.1", 0)) as taken, heard.open("w") as stderr:
        port = taken.getsockname()[1]
        command = run_command(
            feed, ["sh", "-c", f"{wait}; sleep 0.5; exit 3"], "--log.level=error", port=port
        )
        ended = finished(command, capture_output=False, stderr=stderr)

    assert ended.returncode == 3
    first, refused = heard.read_text().splitlines()
    assert first.startswith("exporter: run ")
    assert str(port) not in first  # nobody is sent to a foreign page
    assert f"cannot listen on 127.0.0.1:{port}" in refused


def test_rules_for_recording_are_there_before_the_jobs_first_value(feed: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("recording: [{match: demo.latency, aggregations: [histogram], buckets: [0.01, 0.1]}]")
    job = "import os, pathlib; print(pathlib.Path(os.environ['EXPORTER_FEED_DIR'], 'overrides.json').read_text())"
    command = run_command(
        feed, [sys.executable, "-c", job], f"--config.file={config}", "--run.linger=0s", port=free_port()
    )

    ended = finished(command)

    assert ended.returncode == 0
    (rule,) = json.loads(ended.stdout)["rules"]
    assert rule["buckets"] == [0.01, 0.1]


def test_a_later_run_joins_the_sidecar_which_ends_with_the_last(feed: Path, tmp_path: Path) -> None:
    port, first_go_on, second_go_on = free_port(), tmp_path / "first", tmp_path / "second"
    with recording_run(feed, first_go_on, port, "--run.linger=0s") as first:
        (sidecar,) = sidecars(feed)
        joining = run_command(feed, recording_job(second_go_on), "--run.linger=0s", port=port)
        with started(joining, tmp_path / "none") as second:
            wait_until(lambda: len(runs.jobs(feed)) == 2)
            first_go_on.touch()
            assert first.wait(timeout=8 * PATIENCE) == 0
            assert sidecars(feed) == [sidecar]
            assert answers(port)

            second_go_on.touch()
            assert second.wait(timeout=8 * PATIENCE) == 0
            assert sidecars(feed) == []


def test_a_run_beside_a_standing_exporter_leaves_it_alone(feed: Path, tmp_path: Path) -> None:
    port, go_on = free_port(), tmp_path / "go-on"
    flags = [f"--feed.dir={feed}", f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with started([sys.executable, "-m", "exporter", *flags], feed) as exporter:
        wait_until(lambda: answers(port))
        with recording_run(feed, go_on, port) as run:
            go_on.touch()
            assert run.wait(timeout=5 * PATIENCE) == 0

            assert exporter.poll() is None
            assert sidecars(feed) == []
            assert answers(port)


def test_the_job_does_not_notice_that_the_sidecar_is_killed_and_totals_continue(
    feed: Path, tmp_path: Path
) -> None:
    port, go_on = free_port(), tmp_path / "go-on"
    with recording_run(feed, go_on, port, "--run.linger=0s") as run:
        (sidecar,) = sidecars(feed)
        os.kill(sidecar, signal.SIGKILL)

        wait_until(lambda: sidecars(feed) not in ([], [sidecar]))
        wait_until(lambda: steps_on(port) == 5)
        go_on.touch()
        assert run.wait(timeout=8 * PATIENCE) == 0


def test_a_named_run_continues_the_totals_of_the_launch_before(feed: Path, tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "at-once").touch()
    with recording_run(feed, tmp_path / "first", port, "--run.linger=0s", "--run.name=llama") as first:
        (tmp_path / "first").touch()
        first.wait()

    with recording_run(feed, tmp_path / "second", port, "--run.linger=0s", "--run.name=llama", steps=10):
        wait_until(lambda: steps_on(port) == 5 + 1 + 10)


def test_when_run_is_killed_the_job_and_its_sidecar_go_on_and_both_end(feed: Path, tmp_path: Path) -> None:
    port, go_on = free_port(), tmp_path / "go-on"
    with recording_run(feed, go_on, port, "--run.linger=0s") as run:
        run.kill()
        run.wait()
        time.sleep(1.5)  # three times as long as the sidecar looks for runs
        assert steps_on(port) == 5

        go_on.touch()
        wait_until(lambda: processes_naming(str(feed)) == set() and processes_naming(str(go_on)) == set())


def test_a_sidecar_that_crashes_is_started_again_and_told_about(feed: Path, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    starts.touch()
    sidecar = ["/bin/sh", "-c", f"echo x >> {starts}; [ $(wc -l < {starts}) -lt 2 ] && exit 9; exit 2"]
    ended = supervised(
        feed, ["sh", "-c", f"while [ $(wc -l < {starts}) -lt 2 ]; do sleep 0.1; done; sleep 0.2"], sidecar
    )

    assert (
        ended.stderr
        == f"{FIRST_LINE}exporter: the sidecar ended with status 9; starting it again in 1 s, the job is not affected\n"
    )
    assert len(lines(starts)) == 2


def test_the_sidecar_has_a_session_of_its_own_and_no_input(feed: Path, tmp_path: Path) -> None:
    note = tmp_path / "note"
    look = f"cut -d' ' -f1,6 /proc/self/stat > {note}.new; readlink /proc/self/fd/0 >> {note}.new; mv {note}.new {note}"
    supervised(feed, ["sh", "-c", f"while [ ! -e {note} ]; do sleep 0.05; done"], ["/bin/sh", "-c", look])

    (ids, stream) = lines(note)
    assert int(ids.split()[1]) != os.getsid(0)
    assert stream == "/dev/null"


def test_a_sidecar_that_does_not_end_is_ended(feed: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    stubborn = ["/bin/sh", "-c", f"trap '' TERM; touch {ready}; while :; do sleep 0.1; done"]
    with started(
        supervise_command(
            feed,
            ["sh", "-c", f"while [ ! -e {ready} ]; do sleep 0.05; done"],
            sidecar=stubborn,
            linger_seconds=60,
        ),
        feed,
    ) as run:
        wait_until(ready.exists)
        wait_until(lambda: not runs.any_active(feed))
        time.sleep(0.3)
        run.send_signal(signal.SIGTERM)

        assert run.wait(timeout=8 * PATIENCE) == 0
    assert processes_naming(str(ready)) == set()


def supervised(feed: Path, job: Sequence[str], sidecar: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A job beside some program in place of the sidecar."""
    return finished(supervise_command(feed, job, sidecar=sidecar))
