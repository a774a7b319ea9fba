"""`training-exporter check [flags]`: checks the path from a training process to Prometheus.

Each check has a thread and a deadline. No check creates or changes files, or opens a device.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
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
from exporter.cli.check_server import ports, refused
from exporter.cli.configuration import Configuration, resolve
from exporter.cli.findings import CheckFinding, Probe, fail, ok, warn
from exporter.cli.flags import FEED_DIRECTORY_VARIABLE, FLAGS, PROGRAM, Parser, add_flags, value_of
from exporter.cli.silence import look, remedy
from exporter.config.options import format_duration
from exporter.errors import ConfigurationError, FeedDirectoryError
from exporter.feed import runs
from exporter.feed.directory import check_directory, default_directory, own_uid
from exporter.feed.files import holder
from exporter.feed.reader import FeedEntry, FeedReader
from exporter.feed.snapshot import ProcessIdentity
from exporter.feed.writer import RIVAL_SECONDS
from exporter.ledger.energy.node_lock import NodeLock
from exporter.version import __version__

DESCRIPTION = """\
Checks everything between a training process and Prometheus. Changes nothing. Exits with 1 if a check fails.

    training-exporter check
    training-exporter check --check.python=/opt/conda/bin/python
"""
DEADLINE_SECONDS = 10.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LIBRARY_DIRECTORIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib")
WIDTH, INDENT = 110, " " * 5
SMALL_FREE_BYTES = 4 << 20
SHOWN_ENDED = 3
"""Number of completed processes with a separate line, latest first; the rest is only counted."""
# Record locks and renames on these depend on a server.
NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "fuse", "9p", "lustre", "gpfs", "ceph", "beegfs", "afs")


def python(path: str, environ: Mapping[str, str]) -> Iterator[CheckFinding]:
    """Check that an interpreter imports the package, as a job does: not from the current directory."""
    subject = f"python {path}"
    environment = {name: value for name, value in environ.items() if name != "PYTHONSTARTUP"}
    seen = look(path, first="/", environment=environment)
    if not seen.python:
        yield CheckFinding("FAIL", subject, seen.error, "set --check.python to a Python 3.10 or later")
    elif seen.ours and not seen.error:
        yield ok(subject, f"{seen.python} imports exporter {seen.version} from {seen.path}")
    elif seen.path and not seen.ours:
        yield fail(subject, diagnoses.SHADOWED.describe(python=path, path=seen.path))
    else:
        error = f": {seen.error}" if seen.error else ""
        install = remedy(path, seen.site)
        yield fail(subject, diagnoses.NOT_INSTALLED.describe(python=path, error=error, install=install))


def feed_directory(configuration: Configuration) -> Iterator[CheckFinding]:
    """Check that processes can write feed files."""
    path, subject = _feed(configuration), "feed directory"
    if not os.path.lexists(path):
        if os.access(path.parent, os.W_OK | os.X_OK):
            yield CheckFinding("warn", subject, f"{path} does not exist yet", "the first job creates it")
        else:
            found = f"{path} cannot be created: {path.parent} is not writable"
            yield CheckFinding("FAIL", subject, found, "choose another with --feed.dir and EXPORTER_FEED_DIR")
        return
    try:
        check_directory(path)
    except FeedDirectoryError as error:
        yield CheckFinding("FAIL", subject, str(error).removesuffix(f"; {error.remedy}"), error.remedy)
        return
    free, filesystem, about = psutil.disk_usage(str(path)).free, _filesystem_of(path), path.stat()
    mode = f"{stat.S_IMODE(about.st_mode):04o}"
    yield ok(subject, f"{path}, mode {mode}, file system {filesystem}, {free / 2**20:,.0f} MiB free")
    if not os.access(path, os.W_OK | os.X_OK):
        yield warn(subject, diagnoses.FEED_DIRECTORY_NOT_WRITABLE.describe(directory=path))
    elif free < SMALL_FREE_BYTES:
        level = warn if free else fail
        yield level(subject, diagnoses.FEED_DIRECTORY_FULL.describe(directory=path))
    elif filesystem.startswith(NETWORK_FILESYSTEMS):
        yield warn(subject, diagnoses.FEED_DIRECTORY_REMOTE.describe(directory=path, filesystem=filesystem))
    open_for_all = about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX
    if open_for_all and about.st_uid not in {0, own_uid()}:
        yield warn(
            subject, diagnoses.FEED_DIRECTORY_OPEN.describe(directory=path, uid=about.st_uid, mode=mode)
        )


def _filesystem_of(path: Path) -> str:
    mounts = {each.mountpoint: each.fstype for each in psutil.disk_partitions(all=True)}
    real = path.resolve()
    return next((mounts[str(each)] for each in (real, *real.parents) if str(each) in mounts), "unknown")


def _feed(configuration: Configuration) -> Path:
    """Return the feed directory that the sidecar uses."""
    return configuration.feed.dir or default_directory()


def sidecar(configuration: Configuration) -> Iterator[CheckFinding]:
    """Check that an exporter serves the feed directory."""
    owner = runs.owner(_feed(configuration))
    if owner is None:
        yield warn("sidecar", diagnoses.NO_SIDECAR.describe())
        return
    where = f"process {owner}" if owner else "an exporter in another container"
    with contextlib.suppress(psutil.Error):
        where += f" ({' '.join(psutil.Process(owner).cmdline())})" if owner else ""
    yield ok("sidecar", f"{where} serves the feed directory")


def writers(configuration: Configuration) -> Iterator[CheckFinding]:
    """List the processes that record, and the silent jobs of `run` with the reason."""
    feed, stale_seconds = _feed(configuration), configuration.feed.stale_after
    try:
        scan = FeedReader(feed).scan()
    except FeedDirectoryError:
        return  # reported by the check of the directory
    ended = sorted((each for each in scan.entries if not each.alive), key=lambda each: each.age_seconds)
    for entry in (*(each for each in scan.entries if each.alive), *ended[:SHOWN_ENDED]):
        yield _writer(entry, stale_seconds)
    if len(ended) > SHOWN_ENDED:
        yield ok("writer", f"{len(ended) - SHOWN_ENDED} more processes ended before these")
    yield from _rivals(each.snapshot.process for each in scan.entries if each.alive)
    for name, reason in scan.refused:
        yield warn("writer", diagnoses.REFUSED_FILES[reason].describe(name=name))
    if not scan.entries:
        remedy = (
            "check that the job's Python has training-exporter (--check.python=PATH), that the job has the same "
            "EXPORTER_FEED_DIR, and that it makes a Stat"
        )
        yield CheckFinding("warn", "writer", "no process has recorded anything here", remedy)
    recording = {entry.snapshot.process.run for entry in scan.entries}
    for job in runs.jobs(feed):
        if job.silence is not None and job.run not in recording:
            found = f'"{job.run}" records nothing: {job.silence.found}'
            yield CheckFinding("FAIL", "run", found, job.silence.remedy)


def _writer(entry: FeedEntry, stale_seconds: float) -> CheckFinding:
    process, recording, age = entry.snapshot.process, entry.snapshot.recording, entry.age_seconds
    rank = "no rank" if process.rank is None else f"rank {process.rank}"
    where = f"process {process.pid} on {process.node or 'an unknown node'}"
    who = f'run "{process.run}", {rank}, {process.role}, {where}: {len(recording.stats)} Stats'
    written = f"last written {f'{age:.1f} s' if age < 60 else format_duration(round(age))} ago"
    if not entry.alive:
        how = "ended in order" if recording.final else "ended without a final snapshot (killed?)"
        return ok("writer", f"{who}; {how}, {written}")
    if age > stale_seconds:
        remedy = "the process is alive but does not write: it is stopped or hung, or the directory is full"
        return CheckFinding("warn", "writer", f"{who}; {written}", remedy)
    return ok("writer", f"{who}; alive, {written}")


def _rivals(living: Iterable[ProcessIdentity]) -> Iterator[CheckFinding]:
    """Report processes that train as the same rank; a second look excludes a process that is being replaced."""
    firsts: dict[tuple[str, int | None], ProcessIdentity] = {}
    for process in sorted(living, key=lambda each: each.started):
        if process.trains and time.time() - process.started >= RIVAL_SECONDS:
            first = firsts.setdefault((process.run, process.rank), process)
            if first is not process:
                found = f'process {process.pid} trains as rank {process.rank} of run "{process.run}"'
                remedy = "give each process a rank (its launcher, RANK), or one of the jobs another run name"
                yield CheckFinding("warn", "writer", f"{found}, which process {first.pid} is already", remedy)


def addresses(configuration: Configuration) -> Iterator[CheckFinding]:
    """Check which program uses the exporter's addresses."""
    yield from ports(configuration, _feed(configuration))


def state_directory(configuration: Configuration) -> Iterator[CheckFinding]:
    """Check that totals can outlive restarts."""
    chosen, subject = configuration.state.dir, "state directory"
    path = chosen or _feed(configuration)
    if path.is_dir():
        if os.access(path, os.W_OK | os.X_OK):
            yield ok(subject, f"{path} is writable")
        else:
            remedy = "totals would restart from 0: give the exporter's user write access"
            yield CheckFinding("FAIL", subject, f"{path} is not writable", remedy)
    elif chosen is not None:  # otherwise reported by the check of the feed directory
        if os.access(path.parent, os.W_OK | os.X_OK) and not path.exists():
            yield ok(subject, f"{path} does not exist yet; the exporter creates it")
        else:
            yield CheckFinding(
                "FAIL", subject, f"{path} is not a directory", "create it, or choose another --state.dir"
            )


def rapl(_: Configuration, root: Path = Path("/")) -> Iterator[CheckFinding]:
    """Check that the CPU's energy counters are readable."""
    counters = sorted((root / "sys/class/powercap").glob("*rapl*/energy_uj"))
    unreadable = [path for path in counters if not os.access(path, os.R_OK)]
    if unreadable:
        described = diagnoses.RAPL_UNREADABLE.describe(
            unreadable=len(unreadable), counters=len(counters), path=unreadable[0]
        )
        yield warn("rapl", described)
    elif counters:
        yield ok("rapl", f"{len(counters)} energy counters are readable")
    else:
        yield ok("rapl", "no energy counters on this machine; CPU energy is absent")


def energy(configuration: Configuration) -> Iterator[CheckFinding]:
    """Check that no other exporter counts the energy of this machine."""
    owner = runs.owner(_feed(configuration))
    if not configuration.energy.enabled or not BOOT_ID.exists():
        return
    lock = NodeLock(configuration.energy.lock_dir, BOOT_ID.read_text(encoding="ascii").strip())
    try:
        pid = holder(str(lock.path))
    except OSError:
        return
    if pid is not None and pid != owner:
        yield warn("energy", diagnoses.ENERGY_COUNTED_ELSEWHERE.describe(pid=pid or "of another container"))


def nvidia(configuration: Configuration, root: Path = Path("/")) -> Iterator[CheckFinding]:
    """Compare the versions of NVIDIA's driver and library; no device is opened."""
    gpu, version = configuration.gpu, root / "proc/driver/nvidia/version"
    library = _library_version(root)
    if not gpu.enabled:
        yield ok("nvidia", "gpu.enabled is false; GPU families are absent")
    elif gpu.replay is not None:
        yield ok(
            "nvidia", f"gpu.replay plays the described machine {gpu.replay} instead of this machine's GPUs"
        )
    elif not version.exists():
        if library:
            yield warn("nvidia", diagnoses.DRIVER_NOT_LOADED.describe(library=library))
        else:
            yield ok("nvidia", "no NVIDIA driver here; GPU families are absent")
    else:
        text = version.read_text().partition("\n")[0].removeprefix("NVRM version:").strip()
        driver = re.search(r"\d+\.\d+(\.\d+)?", text)
        if library and driver is not None and driver[0] != library:
            yield fail("nvidia", diagnoses.DRIVER_MISMATCH.describe(driver=driver[0], library=library))
        else:
            yield ok("nvidia", f"driver {text}")


def _library_version(root: Path) -> str:
    """Return the version in the file name of libnvidia-ml; "" if none is found."""
    for directory in LIBRARY_DIRECTORIES:
        for path in sorted((root / directory).glob("libnvidia-ml.so.*.*")):
            return path.name.removeprefix("libnvidia-ml.so.")
    return ""


PROBES = (feed_directory, sidecar, writers, addresses, state_directory, energy, rapl, nvidia)
"""In the order of the data flow."""


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run all checks and print the findings; returns 1 if one failed."""
    parser = Parser(f"{PROGRAM} check", DESCRIPTION)
    add_flags(parser)
    own, text = parser.add_argument_group("check"), "output format (default text)"
    own.add_argument("--check.format", choices=("text", "json"), default="text", help=text)
    own.add_argument("--check.python", metavar="PATH", help="also check this Python, the job's")
    given = parser.parse_flags(arguments)
    findings = _consistent(_examine(given, environ))
    failed = any(finding.status == "FAIL" for finding in findings)
    if value_of(given, "--check.format") == "json":
        rows = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"version": __version__, "ok": not failed, "findings": rows}, indent=2))
        return 1 if failed else 0
    for finding in findings:
        print(f"{finding.status:<{len(INDENT)}}{finding.subject}: {finding.found}")
        if finding.remedy:
            text = f"-> {finding.remedy}"
            print(textwrap.fill(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT + " " * 3))
    return 1 if failed else 0


def _consistent(findings: Iterable[CheckFinding]) -> list[CheckFinding]:
    """Return the findings without an "ok" on the driver's files if the running exporter cannot use the driver."""
    found = list(findings)
    broken = any(each.subject == "nvidia" and each.status == "FAIL" for each in found)
    return [each for each in found if not (broken and each.subject == "nvidia" and each.status == "ok")]


def _examine(given: argparse.Namespace, environ: Mapping[str, str]) -> Iterator[CheckFinding]:
    """Run the checks in the order of the data flow."""
    configurations: list[Configuration] = []
    yield from ask({"configuration": partial(_configuration, given, environ, configurations)})
    if (disabled := environ.get("EXPORTER_DISABLED", "")) not in ("", "0"):
        effect = "is set here" if disabled == "1" else "has no effect: only 1 disables the exporter"
        yield CheckFinding(
            "warn", "environment", f"EXPORTER_DISABLED={disabled} {effect}", "unset it for the job"
        )
    probes: dict[str, Probe] = {}
    for path in dict.fromkeys(filter(None, (sys.executable, value_of(given, "--check.python")))):
        probes[f"python {path}"] = partial(python, path, environ)
    for configuration in configurations:
        probes |= {probe.__name__.replace("_", " "): partial(probe, configuration) for probe in PROBES}
    yield from ask(probes)


def _configuration(
    given: argparse.Namespace, environ: Mapping[str, str], made: list[Configuration]
) -> Iterator[CheckFinding]:
    """Check the configuration and append the result to `made`."""
    try:
        made.append(resolve(given, environ))
    except ConfigurationError as error:
        yield from refused("configuration", error)
        return
    sources = [f"${FEED_DIRECTORY_VARIABLE}"] if environ.get(FEED_DIRECTORY_VARIABLE) else []
    chosen = {flag: value_of(given, flag) for flag in FLAGS}
    sources += [str(chosen[flag]) if flag == "--config.file" else flag for flag in chosen if chosen[flag]]
    yield ok("configuration", f"valid; from {', '.join(sources) or 'the defaults alone'}")


def ask(probes: Mapping[str, Probe], deadline_seconds: float = DEADLINE_SECONDS) -> Iterator[CheckFinding]:
    """Run all checks concurrently and return the findings in order; a missed deadline is also a finding."""
    answers: dict[str, queue.SimpleQueue[list[CheckFinding]]] = {
        subject: queue.SimpleQueue() for subject in probes
    }
    for subject, probe in probes.items():
        answer = partial(_answer, subject, probe, answers[subject])
        threading.Thread(target=answer, name=f"check {subject}", daemon=True).start()
    until = time.monotonic() + deadline_seconds
    for subject, found in answers.items():
        try:
            yield from found.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:  # noqa: PERF203  # each may be late
            remedy = "a file system or a server may hang: try this step by hand"
            yield CheckFinding("FAIL", subject, f"no answer within {deadline_seconds:g} s", remedy)


def _answer(subject: str, probe: Probe, answer: queue.SimpleQueue[list[CheckFinding]]) -> None:
    try:
        found = list(probe())
    except OSError as error:
        found = [CheckFinding("FAIL", subject, str(error), "make it readable")]
    except Exception as error:  # noqa: BLE001  # one broken check must not hide the others
        found = [CheckFinding("FAIL", subject, f"the check itself failed: {error!r}", "please report this")]
    answer.put(found)
