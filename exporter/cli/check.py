"""`training-exporter check [flags]`: checks the path from a training process to Prometheus.

Each check runs on a separate thread with a deadline. The checks change no file and open no device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import stat
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil

from exporter import diagnoses
from exporter.cli.check_server import address_findings, configuration_problems
from exporter.cli.configuration import Configuration, resolve
from exporter.cli.findings import Check, CheckFinding, failure, ok, warning
from exporter.cli.flags import FEED_DIRECTORY_VARIABLE, FLAGS, PROGRAM, Parser, add_flags, value_of
from exporter.cli.silence import install_command, probe_interpreter
from exporter.cli.silent_jobs import find_silent_jobs
from exporter.config.options import format_duration
from exporter.errors import ConfigurationError, FeedDirectoryError
from exporter.feed import runs
from exporter.feed.directory import check_directory, default_directory, own_uid
from exporter.feed.files import find_lock_holder
from exporter.feed.reader import FeedEntry, FeedReader
from exporter.feed.snapshot import ProcessIdentity
from exporter.feed.writer import CONFLICT_SECONDS
from exporter.ledger.energy.node_lock import NodeLock
from exporter.version import __version__

DESCRIPTION = """\
Checks the path from a training process to Prometheus without changing a file. Exits with 1 if a check fails.

    training-exporter check
    training-exporter check --check.python=/opt/conda/bin/python
"""
DEADLINE_SECONDS = 10.0
"""Time limit of all checks, which run concurrently."""
BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")
LIBRARY_DIRECTORIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib")
"""Directories, relative to the root directory, that may contain NVML."""
WIDTH = 110
"""Width of the output in characters."""
INDENT = " " * 5
"""Indentation of a remedy."""
MIN_FREE_BYTES = 4 << 20
"""Free space of the feed directory below which a finding warns, as the text of `diagnoses.FEED_DIRECTORY_FULL` says."""
MAX_ENDED_PROCESSES = 3
"""Maximum number of ended processes that are reported separately, the latest first. A further line counts the other processes."""
# On these file systems, record locks and renames depend on a server.
NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "fuse", "9p", "lustre", "gpfs", "ceph", "beegfs", "afs")


def check_python(path: str, environ: Mapping[str, str]) -> Iterator[CheckFinding]:
    """Check that an interpreter imports the installed package, from any directory: the current directory is not searched."""
    subject = f"python {path}"
    environment = {name: value for name, value in environ.items() if name != "PYTHONSTARTUP"}
    interpreter = probe_interpreter(path, search_path="/", environment=environment)
    if not interpreter.python:
        yield CheckFinding(
            "FAIL", subject, interpreter.error, "set --check.python to an interpreter of Python 3.10 or later"
        )
    elif interpreter.is_own_package and not interpreter.error:
        version = interpreter.version
        yield ok(subject, f"Python {interpreter.python} imports exporter {version} from {interpreter.path}")
    elif interpreter.path and not interpreter.is_own_package:
        yield failure(subject, diagnoses.SHADOWED.describe(python=path, path=interpreter.path))
    else:
        error = f": {interpreter.error}" if interpreter.error else ""
        install = install_command(path, interpreter.site)
        yield failure(subject, diagnoses.NOT_INSTALLED.describe(python=path, error=error, install=install))


def check_feed_directory(configuration: Configuration) -> Iterator[CheckFinding]:
    """Check that the feed directory is usable, writable and not full."""
    path, subject = _feed_directory_of(configuration), "feed directory"
    if not os.path.lexists(path):
        if os.access(path.parent, os.W_OK | os.X_OK):
            yield CheckFinding("warn", subject, f"{path} does not exist yet; the first job creates it")
        else:
            problem = f"{path} cannot be created: {path.parent} is not writable"
            yield CheckFinding(
                "FAIL", subject, problem, "set --feed.dir and EXPORTER_FEED_DIR to another directory"
            )
        return
    try:
        check_directory(path)
    except FeedDirectoryError as error:
        yield CheckFinding("FAIL", subject, str(error).removesuffix(f"; {error.remedy}"), error.remedy)
        return
    free_bytes, filesystem, status = psutil.disk_usage(str(path)).free, _filesystem_of(path), path.stat()
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    yield ok(subject, f"{path}, mode {mode}, file system {filesystem}, {free_bytes / 2**20:,.0f} MiB free")
    if not os.access(path, os.W_OK | os.X_OK):
        yield warning(subject, diagnoses.FEED_DIRECTORY_NOT_WRITABLE.describe(directory=path))
    elif free_bytes < MIN_FREE_BYTES:
        make_finding = warning if free_bytes else failure
        yield make_finding(subject, diagnoses.FEED_DIRECTORY_FULL.describe(directory=path))
    elif filesystem.startswith(NETWORK_FILESYSTEMS):
        yield warning(
            subject, diagnoses.FEED_DIRECTORY_REMOTE.describe(directory=path, filesystem=filesystem)
        )
    is_world_writable = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
    if is_world_writable and status.st_uid not in {0, own_uid()}:
        yield warning(
            subject, diagnoses.FEED_DIRECTORY_OPEN.describe(directory=path, uid=status.st_uid, mode=mode)
        )


def _filesystem_of(path: Path) -> str:
    """Return the type of the file system of a path, such as `tmpfs`, or "unknown"."""
    types = {partition.mountpoint: partition.fstype for partition in psutil.disk_partitions(all=True)}
    resolved_path = path.resolve()
    directories = map(str, (resolved_path, *resolved_path.parents))
    return next((types[directory] for directory in directories if directory in types), "unknown")


def _feed_directory_of(configuration: Configuration) -> Path:
    """Return the feed directory that the sidecar uses."""
    return configuration.feed.dir or default_directory()


def check_sidecar(configuration: Configuration) -> Iterator[CheckFinding]:
    """Check that a sidecar serves the feed directory."""
    owner = runs.owner(_feed_directory_of(configuration))
    if owner is None:
        yield warning("sidecar", diagnoses.NO_SIDECAR.describe())
        return
    server = f"process {owner}" if owner else "a sidecar in another container"
    with contextlib.suppress(psutil.Error):
        server += f" ({' '.join(psutil.Process(owner).cmdline())})" if owner else ""
    yield ok("sidecar", f"{server} serves the feed directory")


def check_writers(configuration: Configuration) -> Iterator[CheckFinding]:
    """Report the processes that record, and the jobs of `run` that record nothing, with the reason."""
    feed, stale_seconds = _feed_directory_of(configuration), configuration.feed.stale_after
    try:
        scan = FeedReader(feed).scan()
    except FeedDirectoryError:
        return  # reported by the check of the directory
    live_entries = [entry for entry in scan.entries if entry.is_alive]
    ended_entries = sorted(
        (entry for entry in scan.entries if not entry.is_alive), key=lambda entry: entry.age_seconds
    )
    for entry in (*live_entries, *ended_entries[:MAX_ENDED_PROCESSES]):
        yield _writer_finding(entry, stale_seconds)
    if len(ended_entries) > MAX_ENDED_PROCESSES:
        yield ok("writer", f"{len(ended_entries) - MAX_ENDED_PROCESSES} more processes ended before these")
    yield from _conflicting_ranks(entry.snapshot.process for entry in live_entries)
    for name, reason in scan.refused_files:
        yield warning("writer", diagnoses.REFUSED_FILES[reason].describe(name=name))
    if not scan.entries:
        remedy = (
            "check that training-exporter is installed for the job's Python (--check.python=PATH), that the job has the same "
            "EXPORTER_FEED_DIR, and that the job records something"
        )
        yield CheckFinding("warn", "writer", "no process has recorded in this feed directory", remedy)
    for job in find_silent_jobs(feed, (entry.snapshot.process for entry in scan.entries)):
        if job.silence is not None:
            problem = f'"{job.run}" records nothing: {job.silence.found}'
            yield CheckFinding("FAIL", "run", problem, job.silence.remedy)


def _writer_finding(entry: FeedEntry, stale_seconds: float) -> CheckFinding:
    """Return the finding about a recording process: "warn" if the process is running and its feed is older than *stale_seconds*."""
    process, recording, age = entry.snapshot.process, entry.snapshot.recording, entry.age_seconds
    rank = "no rank" if process.rank is None else f"rank {process.rank}"
    origin = f"process {process.pid} on {process.node or 'an unknown node'}"
    writer = f'run "{process.run}", {rank}, {process.role}, {origin}: {len(recording.stats)} recorded series'
    written = f"last written {f'{age:.1f} s' if age < 60 else format_duration(round(age))} ago"
    if not entry.is_alive:
        end = "ended normally" if recording.final else "ended without a final snapshot (killed?)"
        return ok("writer", f"{writer}; {end}, {written}")
    if age > stale_seconds:
        remedy = "check whether the process is stopped (`kill -CONT`) or hangs (`py-spy dump`), and free space in the feed directory"
        return CheckFinding("warn", "writer", f"{writer}; alive, but {written}", remedy)
    return ok("writer", f"{writer}; alive, {written}")


def _conflicting_ranks(processes: Iterable[ProcessIdentity]) -> Iterator[CheckFinding]:
    """Report processes that train as the same rank.

    A process younger than `CONFLICT_SECONDS` is ignored, because it may replace a process that is exiting.
    """
    first_process_by_rank: dict[tuple[str, int | None], ProcessIdentity] = {}
    for process in sorted(processes, key=lambda process: process.started):
        if process.trains and time.time() - process.started >= CONFLICT_SECONDS:
            first_process = first_process_by_rank.setdefault((process.run, process.rank), process)
            if first_process is not process:
                problem = f'process {process.pid} trains as rank {process.rank} of run "{process.run}"'
                remedy = "set RANK for each process, or use a different run name for one of the jobs"
                yield CheckFinding(
                    "warn", "writer", f"{problem}, and so does process {first_process.pid}", remedy
                )


def check_addresses(configuration: Configuration) -> Iterator[CheckFinding]:
    """Check which program uses the exporter's addresses."""
    yield from address_findings(configuration, _feed_directory_of(configuration))


def check_state_directory(configuration: Configuration) -> Iterator[CheckFinding]:
    """Check that the exporter can save totals, so that they continue after a restart."""
    configured_path, subject = configuration.state.dir, "state directory"
    path = configured_path or _feed_directory_of(configuration)
    if path.is_dir():
        if os.access(path, os.W_OK | os.X_OK):
            yield ok(subject, f"{path} is writable")
        else:
            remedy = "grant the exporter's user write access; without it, totals restart from 0"
            yield CheckFinding("FAIL", subject, f"{path} is not writable", remedy)
    elif configured_path is not None:  # otherwise reported by the check of the feed directory
        if os.access(path.parent, os.W_OK | os.X_OK) and not path.exists():
            yield ok(subject, f"{path} does not exist yet; the exporter creates it")
        else:
            yield CheckFinding(
                "FAIL", subject, f"{path} is not a directory", "create it, or choose a different --state.dir"
            )


def check_rapl(_: Configuration, root: Path = Path("/")) -> Iterator[CheckFinding]:
    """Check that the RAPL energy counters of the CPU are readable."""
    counters = sorted((root / "sys/class/powercap").glob("*rapl*/energy_uj"))
    unreadable = [path for path in counters if not os.access(path, os.R_OK)]
    if unreadable:
        statement = diagnoses.RAPL_UNREADABLE.describe(
            unreadable=len(unreadable), counters=len(counters), path=unreadable[0]
        )
        yield warning("rapl", statement)
    elif counters:
        yield ok("rapl", f"{len(counters)} energy counters are readable")
    else:
        yield ok("rapl", "no energy counters on this machine; CPU energy is absent")


def check_energy(configuration: Configuration) -> Iterator[CheckFinding]:
    """Warn if another exporter holds the energy lock, because this exporter then publishes no energy."""
    owner = runs.owner(_feed_directory_of(configuration))
    if not configuration.energy.enabled or not BOOT_ID_PATH.exists():
        return
    lock = NodeLock(configuration.energy.lock_dir, BOOT_ID_PATH.read_text(encoding="ascii").strip())
    try:
        pid = find_lock_holder(str(lock.path))
    except OSError:
        return
    if pid is not None and pid != owner:
        yield warning(
            "energy", diagnoses.ENERGY_COUNTED_ELSEWHERE.describe(pid=pid or "of another container")
        )


def check_nvidia(configuration: Configuration, root: Path = Path("/")) -> Iterator[CheckFinding]:
    """Compare the versions of the NVIDIA driver and the NVML library, without opening a device."""
    gpu, driver_version_path = configuration.gpu, root / "proc/driver/nvidia/version"
    library_version = _library_version(root)
    if not gpu.enabled:
        yield ok("nvidia", "gpu.enabled is false; GPU families are absent")
    elif gpu.replay is not None:
        yield ok(
            "nvidia", f"gpu.replay is {gpu.replay}: the replayed machine replaces the GPUs of this machine"
        )
    elif not driver_version_path.exists():
        if library_version:
            yield warning("nvidia", diagnoses.DRIVER_NOT_LOADED.describe(library=library_version))
        else:
            yield ok("nvidia", "no NVIDIA driver on this machine; GPU families are absent")
    else:
        description = driver_version_path.read_text().partition("\n")[0].removeprefix("NVRM version:").strip()
        driver = re.search(r"\d+\.\d+(\.\d+)?", description)
        if library_version and driver is not None and driver[0] != library_version:
            yield failure(
                "nvidia", diagnoses.DRIVER_MISMATCH.describe(driver=driver[0], library=library_version)
            )
        else:
            yield ok("nvidia", f"driver {description}")


def _library_version(root: Path) -> str:
    """Return the version in the file name of libnvidia-ml, or "" if the library is not found."""
    for directory in LIBRARY_DIRECTORIES:
        for path in sorted((root / directory).glob("libnvidia-ml.so.*.*")):
            return path.name.removeprefix("libnvidia-ml.so.")
    return ""


CHECKS = (
    check_feed_directory,
    check_sidecar,
    check_writers,
    check_addresses,
    check_state_directory,
    check_energy,
    check_rapl,
    check_nvidia,
)
"""Checks of a configuration, in the order of the data flow. The name of a function without `check_` is the subject."""


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run all checks and print the findings. Return 1 if a check failed."""
    parser = Parser(f"{PROGRAM} check", DESCRIPTION)
    add_flags(parser)
    group = parser.add_argument_group("check")
    format_help, python_help = "output format (default text)", "also check this Python interpreter of the job"
    group.add_argument("--check.format", choices=("text", "json"), default="text", help=format_help)
    group.add_argument("--check.python", metavar="PATH", help=python_help)
    flags = parser.parse_flags(arguments)
    findings = _without_contradicted(_all_findings(flags, environ))
    has_failed = any(finding.status == "FAIL" for finding in findings)
    if value_of(flags, "--check.format") == "json":
        findings_as_json = [finding.to_json() for finding in findings]
        print(
            json.dumps({"version": __version__, "ok": not has_failed, "findings": findings_as_json}, indent=2)
        )
        return 1 if has_failed else 0
    for finding in findings:
        print(f"{finding.status:<{len(INDENT)}}{finding.subject}: {finding.message}")
        if finding.remedy:
            remedy = f"-> {finding.remedy}"
            print(textwrap.fill(remedy, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT + " " * 3))
    return 1 if has_failed else 0


def _without_contradicted(findings: Iterable[CheckFinding]) -> list[CheckFinding]:
    """Drop the "ok" about the files of the NVIDIA driver if the running sidecar reports that it cannot use NVML."""
    findings = list(findings)
    has_nvidia_failure = any(finding.subject == "nvidia" and finding.status == "FAIL" for finding in findings)
    return [
        finding
        for finding in findings
        if not (has_nvidia_failure and finding.subject == "nvidia" and finding.status == "ok")
    ]


def _all_findings(flags: argparse.Namespace, environ: Mapping[str, str]) -> Iterator[CheckFinding]:
    """Run the checks in the order of the data flow."""
    configurations: list[Configuration] = []
    yield from run_checks({"configuration": partial(_configuration, flags, environ, configurations)})
    if (disabled_value := environ.get("EXPORTER_DISABLED", "")) not in ("", "0"):
        effect = (
            "disables recording for every job that is started from this shell"
            if disabled_value == "1"
            else "has no effect: only 1 disables the exporter"
        )
        yield CheckFinding(
            "warn", "environment", f"EXPORTER_DISABLED={disabled_value} {effect}", "unset it for the job"
        )
    checks: dict[str, Check] = {}
    for path in dict.fromkeys(filter(None, (sys.executable, value_of(flags, "--check.python")))):
        checks[f"python {path}"] = partial(check_python, path, environ)
    for configuration in configurations:
        for check in CHECKS:
            subject = check.__name__.removeprefix("check_").replace("_", " ")
            checks[subject] = partial(check, configuration)
    yield from run_checks(checks)


def _configuration(
    flags: argparse.Namespace, environ: Mapping[str, str], configurations: list[Configuration]
) -> Iterator[CheckFinding]:
    """Check the configuration, and append a valid configuration to *configurations*."""
    try:
        configurations.append(resolve(flags, environ))
    except ConfigurationError as error:
        yield from configuration_problems("configuration", error)
        return
    sources = [f"${FEED_DIRECTORY_VARIABLE}"] if environ.get(FEED_DIRECTORY_VARIABLE) else []
    values = {flag: value_of(flags, flag) for flag in FLAGS}
    sources += [str(value) if flag == "--config.file" else flag for flag, value in values.items() if value]
    yield ok("configuration", f"valid; read from {', '.join(sources) or 'the defaults'}")


def run_checks(
    checks: Mapping[str, Check], deadline_seconds: float = DEADLINE_SECONDS
) -> Iterator[CheckFinding]:
    """Run all checks concurrently and yield the findings in order. A check that has no result at the deadline yields a failure."""
    results: dict[str, queue.SimpleQueue[list[CheckFinding]]] = {
        subject: queue.SimpleQueue() for subject in checks
    }
    for subject, check in checks.items():
        target = partial(_run_check, subject, check, results[subject])
        threading.Thread(target=target, name=f"check {subject}", daemon=True).start()
    deadline = time.monotonic() + deadline_seconds
    for subject, result in results.items():
        try:
            yield from result.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:  # noqa: PERF203  # any check may miss the deadline
            remedy = "repeat this check by hand: a file system or a server may hang"
            yield CheckFinding("FAIL", subject, f"no result within {deadline_seconds:g} s", remedy)


def _run_check(subject: str, check: Check, result: queue.SimpleQueue[list[CheckFinding]]) -> None:
    """Put the findings of a check into *result*, or a failure for any exception."""
    try:
        findings = list(check())
    except OSError as error:
        findings = [CheckFinding("FAIL", subject, str(error), "grant this user read access")]
    except Exception as error:  # noqa: BLE001  # one broken check must not hide the others
        findings = [
            CheckFinding("FAIL", subject, f"the check itself failed: {error!r}", "report this as a bug")
        ]
    result.put(findings)
