"""`training-exporter check`: findings, remedies, and absence of side effects."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import http.server
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_nvml_support import FakeNvml, needs_fake_nvml
from feed_support import new_identity, new_recording, publish_once
from run_support import (
    child_environment,
    free_port,
    is_ready,
    run_to_completion,
    running_process,
    sidecar_command,
    supervise_command,
)
from waiting import WAIT_LIMIT_SECONDS, wait_until
from web_support import CertificateAuthority

from exporter.cli.check import BOOT_ID_PATH, MIN_FREE_BYTES, check_nvidia, run_checks
from exporter.cli.check_server import check_own_metrics
from exporter.cli.configuration import Configuration
from exporter.cli.findings import CheckFinding
from exporter.cli.main import main
from exporter.diagnoses import FEED_DIRECTORY_FULL, REFUSED_FILES
from exporter.feed import runs
from exporter.feed.encoder import MAX_BYTES
from exporter.feed.reader import MAX_DECODED_BYTES, MAX_FILES
from exporter.feed.writer import FeedWriter
from exporter.ledger.energy.node_lock import NodeLock
from exporter.ledger.families.feed import REFUSAL_REASONS

RECORDING_PROGRAM = """
import sys
from exporter import Aggregation, Stat, flush
Stat("check.steps", {Aggregation.MEAN}).add(1.0)
flush()
print("recorded", flush=True)
sys.stdin.read()
"""


def check_arguments(feed: Path, *flags: str, port: int | None = None) -> list[str]:
    """Return the arguments of `check` for a feed directory, by default with a free port as the address of the exporter."""
    address = f"--web.listen-address=127.0.0.1:{free_port() if port is None else port}"
    return ["check", f"--feed.dir={feed}", address, "--check.format=json", *flags]


@pytest.fixture(autouse=True)
def _late_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend the time limits of the checks to the limit of a wait, because a busy machine exceeds the limits of the command."""
    run_late_checks = functools.partial(run_checks, deadline_seconds=WAIT_LIMIT_SECONDS)
    monkeypatch.setattr("exporter.cli.check.run_checks", run_late_checks)
    monkeypatch.setattr("exporter.cli.check_server.REQUEST_TIMEOUT_SECONDS", WAIT_LIMIT_SECONDS)


def check(feed: Path, *flags: str, port: int | None = None) -> tuple[int, list[dict[str, str]]]:
    """Run `check` in this process and return the exit status and the findings."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = main(check_arguments(feed, *flags, port=port), child_environment())
    return status, json.loads(output.getvalue())["findings"]


def check_from_another_process(feed: Path, *flags: str) -> list[dict[str, str]]:
    """Return the findings of a `check` process, because the locks of this process are invisible to this process."""
    result = run_to_completion([sys.executable, "-m", "exporter", *check_arguments(feed, *flags)])
    findings: list[dict[str, str]] = json.loads(result.stdout)["findings"]
    return findings


def finding_of(findings: list[dict[str, str]], subject: str) -> dict[str, str]:
    """Return the only finding about a subject."""
    (match,) = (finding for finding in findings if finding["subject"].startswith(subject))
    return match


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a running process that has recorded a value."""
    command = [sys.executable, "-c", RECORDING_PROGRAM]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    env = child_environment(EXPORTER_FEED_DIR=str(tmp_path), EXPORTER_RUN="mine", RANK="3")
    with running_process(command, tmp_path, env=env, **streams) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process


def test_an_empty_directory_is_a_warning_with_the_remedy(tmp_path: Path) -> None:
    flags = [f"--feed.dir={tmp_path}", "--web.listen-address=127.0.0.1:0"]
    command = [sys.executable, "-m", "exporter", "check", *flags]
    result = run_to_completion(command, env=child_environment(EXPORTER_DISABLED="yes"))
    output_lines = result.stdout.splitlines()

    assert result.returncode == 0
    assert "ok   configuration: valid; read from --web.listen-address, --feed.dir" in output_lines
    for line_start in (
        "environment: EXPORTER_DISABLED=yes has",
        "sidecar: no exporter",
        "writer: no process",
    ):
        (index,) = (index for index, line in enumerate(output_lines) if line.startswith(f"warn {line_start}"))
        assert output_lines[index + 1].startswith("     -> ")


def test_a_silent_job_fails_until_its_launch_records_under_any_name(tmp_path: Path) -> None:
    silence = runs.Silence("nothing_recorded", "found", "remedy")
    with running_process(supervise_command(tmp_path, ["sleep", "3600"]), tmp_path):
        (job_file,) = wait_until(lambda: [*(tmp_path / "runs").glob("*.job")])
        job = runs.Job(7, "train-1", 0.0, silence, launch="5f2c")
        job_file.write_text(json.dumps(dataclasses.asdict(job)))
        silent_finding = finding_of(check(tmp_path)[1], "run")
        publish_once(tmp_path, run="mine", launch="5f2c")
        later_findings = check(tmp_path)[1]

    assert (silent_finding["status"], silent_finding["found"]) == ("FAIL", '"train-1" records nothing: found')
    assert "run" not in {finding["subject"] for finding in later_findings}


def test_a_live_writer_is_named_and_a_writer_without_recent_data_is_a_warning(
    tmp_path: Path, recorder: subprocess.Popen[str]
) -> None:
    recorder.send_signal(signal.SIGSTOP)
    initial_files = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in tmp_path.rglob("*")}
    writer = finding_of(check(tmp_path)[1], "writer")

    assert writer["status"] == "ok"
    assert f'run "mine", rank 3, trainer, process {recorder.pid}' in writer["found"]
    assert "1 recorded series; alive, last written" in writer["found"]
    assert {
        path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in tmp_path.rglob("*")
    } == initial_files
    assert initial_files
    os.utime(next(tmp_path.glob("*.feed")), (time.time() - 40,) * 2)
    writer = finding_of(check(tmp_path)[1], "writer")
    assert (writer["status"], "kill -CONT" in writer["remedy"]) == ("warn", True)


def test_the_latest_of_many_ended_processes_are_named_and_killed_ones_marked(
    tmp_path: Path, recorder: subprocess.Popen[str]
) -> None:
    recorder.kill()
    recorder.wait()
    (killed_feed,) = tmp_path.glob("*.feed")
    for age in (90, 80, 70, 60):
        initial_files = set(tmp_path.glob("*.feed"))
        env = child_environment(EXPORTER_FEED_DIR=str(tmp_path), EXPORTER_RUN=f"age{age}")
        run_to_completion([sys.executable, "-c", RECORDING_PROGRAM], env=env, stdin=subprocess.DEVNULL)
        (new_feed,) = set(tmp_path.glob("*.feed")) - initial_files
        os.utime(new_feed, (time.time() - age,) * 2)
    os.utime(killed_feed, (time.time() - 65,) * 2)

    messages = [finding["found"] for finding in check(tmp_path)[1] if finding["subject"] == "writer"]
    names_and_endings = [
        (message.split('"')[1], message.split("; ")[1].split(",")[0]) for message in messages[:3]
    ]
    killed_text = "ended without a final snapshot (killed?)"
    assert names_and_endings == [
        ("age60", "ended normally"),
        ("mine", killed_text),
        ("age70", "ended normally"),
    ]
    assert messages[3:] == ["2 more processes ended before these"]


@pytest.mark.parametrize(
    ("trains", "seconds_since_start", "is_reported"),
    [
        (True, 60.0, True),
        (False, 60.0, False),
        (True, -60.0, False),  # a new process, even if the check takes a minute
    ],
)
def test_a_second_trainer_of_a_rank_is_reported_and_a_helper_or_successor_is_not(
    tmp_path: Path, trains: bool, seconds_since_start: float, is_reported: bool
) -> None:
    trainer = new_identity(started=time.time() - 90, pid=7, trains=True)
    newcomer = new_identity(started=time.time() - seconds_since_start, pid=8, trains=trains)
    # The writers hold the locks of live processes.
    writers = [FeedWriter(tmp_path, process) for process in (trainer, newcomer)]
    for writer in writers:
        assert writer.publish(new_recording())
    findings = check_from_another_process(tmp_path)
    warnings = [finding["found"] for finding in findings if finding["status"] == "warn"]

    expected = 'process 8 trains as rank 0 of run "r", and so does process 7'
    assert (expected in warnings) is is_reported


def test_a_file_that_is_not_a_feed_is_refused_by_name(tmp_path: Path) -> None:
    name = f"{'b' * 32}.feed"
    (tmp_path / name).write_bytes(b"garbage" * 100)

    (finding,) = [finding for finding in check(tmp_path)[1] if f"{name} is damaged" in finding["found"]]
    assert finding["remedy"].startswith("a running process replaces")


def test_every_refusal_of_a_feed_file_has_a_remedy() -> None:
    assert set(REFUSED_FILES) == set(REFUSAL_REASONS)


def test_the_sentences_about_refused_files_and_full_directories_name_the_limits() -> None:
    limits = {
        "too_many": f"{MAX_FILES:,} feed files",
        "too_large": f"{MAX_BYTES >> 20} MiB",
        "memory": f"{MAX_DECODED_BYTES >> 20} MiB",
    }

    assert all(limit in REFUSED_FILES[reason].sentence for reason, limit in limits.items())
    assert f"{MIN_FREE_BYTES >> 20} MiB" in FEED_DIRECTORY_FULL.sentence


def test_a_directory_that_cannot_be_created_fails(tmp_path: Path) -> None:
    status, findings = check(tmp_path / "missing" / "feed")

    assert status == 1
    assert finding_of(findings, "feed directory")["status"] == "FAIL"
    assert "--feed.dir" in finding_of(findings, "feed directory")["remedy"]
    assert all(finding["remedy"] for finding in findings if finding["status"] != "ok")


def test_an_invalid_configuration_is_reported_with_its_place_and_other_checks_run(
    tmp_path: Path,
) -> None:
    file = tmp_path / "exporter.yaml"
    file.write_text("feed:\n  intervall: 1s\n")

    status, findings = check(tmp_path, f"--config.file={file}")

    assert status == 1
    assert f"{file}:2:3" in finding_of(findings, "configuration")["found"]
    assert finding_of(findings, "python")["status"] == "ok"


def test_a_running_exporter_is_recognized_by_port_and_owner_lock(tmp_path: Path) -> None:
    port = free_port()
    command = sidecar_command(tmp_path, "--log.level=error", port=port)
    with running_process(command, tmp_path) as exporter:
        wait_until(lambda: is_ready(port))
        status, findings = check(tmp_path, port=port)

        assert [finding for finding in findings if finding["status"] == "FAIL"] == []
        assert (status, finding_of(findings, "address")["status"]) == (0, "ok")
        assert finding_of(findings, "address")["found"].startswith("an exporter responds at")
        assert finding_of(findings, "sidecar")["found"].startswith(f"process {exporter.pid} (")


def test_a_port_in_use_by_another_program_fails(tmp_path: Path) -> None:
    # The handler of the standard library answers every request with 501.
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        status, findings = check(tmp_path, port=server.server_port)
        server.shutdown()

    assert status == 1
    assert "used by a different server" in finding_of(findings, "address")["found"]
    assert "--web.listen-address" in finding_of(findings, "address")["remedy"]


def test_an_address_of_another_machine_fails_without_a_request_to_that_machine(tmp_path: Path) -> None:
    status, findings = check(tmp_path, "--web.listen-address=192.0.2.1:20909")  # an address for documentation
    finding = finding_of(findings, "address 192.0.2.1:20909")

    assert (status, finding["status"]) == (1, "FAIL")
    assert (
        finding["found"] == "cannot listen on 192.0.2.1:20909: no interface of this machine has this address"
    )
    assert finding["remedy"] == "choose another with --web.listen-address=HOST:PORT"


def test_a_port_whose_owner_never_answers_fails_within_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exporter.cli.check_server.REQUEST_TIMEOUT_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start_time = time.monotonic()
        status, findings = check(tmp_path, port=silent.getsockname()[1])

    assert (status, finding_of(findings, "address")["status"]) == (1, "FAIL")
    assert "ss -ltnp" in finding_of(findings, "address")["remedy"]
    assert time.monotonic() - start_time < WAIT_LIMIT_SECONDS


def test_a_missing_package_is_reported_with_the_install_command(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o700)

    status, findings = check(tmp_path, f"--check.python={bare}")

    assert status == 1
    assert "is not installed for" in finding_of(findings, f"python {bare}")["found"]
    assert f"{bare} -m pip install" in finding_of(findings, f"python {bare}")["remedy"]


def test_a_check_that_hangs_affects_only_its_own_line() -> None:
    release = threading.Event()
    finding = CheckFinding("ok", "fine", "found")
    checks = {"hung": lambda: iter([finding] if release.wait() else []), "fine": lambda: [finding]}

    findings = list(run_checks(checks, deadline_seconds=0.2))

    assert [(finding.status, finding.subject) for finding in findings] == [("FAIL", "hung"), ("ok", "fine")]
    release.set()


def test_energy_counters_for_root_only_are_reported_with_the_chmod_command() -> None:
    program = (
        "import os, sys; from pathlib import Path; from exporter.cli.check import check_rapl;"
        "from exporter.cli.configuration import Configuration; os.geteuid() or os.setuid(65534);"
        "(finding,) = check_rapl(Configuration(), Path(sys.argv[1])); print(finding.status, finding.remedy)"
    )
    # The parent directories of `tmp_path` are accessible to root only.
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        counter = Path(directory) / "sys/class/powercap/intel-rapl:0/energy_uj"
        counter.parent.mkdir(parents=True)
        counter.touch(0)
        output = run_to_completion([sys.executable, "-c", program, directory]).stdout

    assert output.startswith("warn ")
    assert f"chmod a+r {counter}" in output


def test_the_nvidia_driver_is_named_without_loading_nvml(tmp_path: Path) -> None:
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Tue Jan  7 2025\nGCC version:\n"
    )

    (finding,) = check_nvidia(Configuration(), tmp_path)

    assert "570.86.10" in finding.message


@pytest.mark.parametrize(("library", "status"), [("570.86.10", "ok"), ("575.57.08", "FAIL")])
def test_a_library_of_another_version_than_the_driver_fails(
    tmp_path: Path, library: str, status: str
) -> None:
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Tue Jan  7 2025\n")
    library_directory = tmp_path / "usr/lib/x86_64-linux-gnu"
    library_directory.mkdir(parents=True)
    (library_directory / f"libnvidia-ml.so.{library}").touch()

    (finding,) = check_nvidia(Configuration(), tmp_path)

    assert finding.status == status


def test_failures_in_the_metrics_of_a_running_exporter_are_reported(tmp_path: Path) -> None:
    page = (
        'exporter_collector_success{collector="cpu"} 1\n'
        'exporter_collector_success{collector="nfs"} 0\n'
        "exporter_feed_owner 0\n"
        "gpu_nvml_up 0\n"
        'gpu_nvml_error_info{reason="lib_rm_version_mismatch"} 1\n'
    )

    statuses_and_subjects = [
        (finding.status, finding.subject)
        for finding in check_own_metrics(page, "http://localhost:1", tmp_path)
    ]

    assert statuses_and_subjects == [("warn", "collector nfs"), ("warn", "sidecar"), ("FAIL", "nvidia")]


@needs_fake_nvml
def test_a_running_exporter_whose_nvml_refuses_the_driver_fails_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeNvml(tmp_path / "nvml")
    fake.fail(*(f"{name} -1 18 0 1e12" for name in ("nvmlInit_v2", "nvmlInitWithFlags")))
    config = tmp_path / "c.yaml"
    config.write_text(f"gpu: {{mode: required}}\nenergy: {{lock_dir: {tmp_path}}}\n")
    for variable, setting in fake.environment.items():
        monkeypatch.setenv(variable, setting)
    port = free_port()
    flags = [f"--feed.dir={tmp_path}", f"--config.file={config}", f"--web.listen-address=127.0.0.1:{port}"]
    findings: list[dict[str, str]] = []

    def nvidia_fails() -> bool:
        findings[:] = check(tmp_path, f"--config.file={config}", port=port)[1]
        return any((finding["subject"], finding["status"]) == ("nvidia", "FAIL") for finding in findings)

    with running_process([sys.executable, "-m", "exporter", *flags], tmp_path):
        wait_until(nvidia_fails)

    assert [finding["status"] for finding in findings if finding["subject"] == "nvidia"] == ["FAIL"]
    assert "different versions" in finding_of(findings, "nvidia")["found"]
    assert "collector gpu fails" in finding_of(findings, "collector gpu")["found"]


def test_a_second_exporter_on_the_feed_directory_is_reported(tmp_path: Path) -> None:
    port = free_port()
    with running_process(sidecar_command(tmp_path, "--log.level=error"), tmp_path) as owner:
        wait_until(lambda: runs.owner(tmp_path) == owner.pid)
        with running_process(sidecar_command(tmp_path, "--log.level=error", port=port), tmp_path):
            wait_until(lambda: is_ready(port))
            findings = check(tmp_path, port=port)[1]

    warnings = [finding["found"] for finding in findings if finding["status"] == "warn"]
    assert any(f"process {owner.pid} does, and saves the totals" in warning for warning in warnings)


def test_an_exporter_that_requires_client_certificates_is_not_a_failure(tmp_path: Path) -> None:
    port, authority = free_port(), CertificateAuthority(tmp_path)
    client_settings = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"
    web_flag = f"--web.config.file={authority.write_web_config(client_settings)}"
    with running_process(sidecar_command(tmp_path, web_flag, port=port), tmp_path) as sidecar:
        wait_until(lambda: runs.owner(tmp_path) == sidecar.pid)
        finding = finding_of(check(tmp_path, web_flag, port=port)[1], "address")

    assert (finding["status"], "requires client certificates" in finding["found"]) == ("ok", True)


def test_a_certificate_that_does_not_exist_fails(tmp_path: Path) -> None:
    file = tmp_path / "web.yml"
    file.write_text("tls_server_config: {cert_file: none.pem, key_file: none.pem}")

    finding = finding_of(check(tmp_path, f"--web.config.file={file}")[1], "web configuration")

    assert (finding["status"], "none.pem cannot be read" in finding["found"]) == ("FAIL", True)


def test_an_exporter_that_holds_the_energy_lock_is_named(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"energy: {{lock_dir: {tmp_path}}}")
    lock = NodeLock(tmp_path, BOOT_ID_PATH.read_text().strip())
    assert lock.acquire()

    finding = finding_of(check_from_another_process(tmp_path, f"--config.file={config}"), "energy")
    lock.release()

    assert f"process {os.getpid()} counts the energy" in finding["found"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a directory")
def test_a_world_writable_directory_of_another_user_is_reported(tmp_path: Path) -> None:
    shared_directory = tmp_path / "shared"
    shared_directory.mkdir()
    os.chown(shared_directory, 1234, 1234)
    shared_directory.chmod(0o777)

    findings = [finding for finding in check(shared_directory)[1] if finding["subject"] == "feed directory"]

    assert [finding["status"] for finding in findings] == ["ok", "warn"]
    assert "uid 1234" in findings[1]["found"]
