"""`training-exporter check [flags]`: what stands between a training process and a number in Prometheus.

Each question has a thread and a deadline. Creates and changes nothing, and opens no device.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import queue
import ssl
import stat
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import psutil

from exporter.cli.configuration import Configuration, resolve
from exporter.cli.flags import FEED_DIRECTORY_VARIABLE, FLAGS, PROGRAM, Parser, add_flags, value_of
from exporter.cli.silence import look, remedy
from exporter.config.options import format_duration
from exporter.errors import ConfigurationError, FeedDirectoryError, ListenError
from exporter.feed import runs
from exporter.feed.directory import check_directory, default_directory, is_trusted
from exporter.feed.reader import FeedEntry, FeedReader
from exporter.feed.snapshot import ProcessIdentity
from exporter.feed.writer import RIVAL_SECONDS
from exporter.version import __version__
from exporter.web.listen import bind, parse_address
from exporter.web.webconfig import load_web_config

DESCRIPTION = """\
Checks everything between a training process and Prometheus. Changes nothing. Exits with 1 if a check fails.

    training-exporter check
    training-exporter check --check.python=/opt/conda/bin/python
"""
DEADLINE_SECONDS = 10.0
ANSWER_SECONDS = 3.0
WIDTH, INDENT = 110, " " * 5
SMALL_FREE_BYTES = 4 << 20
SHOWN_ENDED = 3
"""Processes that have ended, the latest; the others are counted."""
# Record locks and renames over these depend on their servers.
NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "fuse", "9p", "lustre", "gpfs", "ceph", "beegfs", "afs")

_CLOSED = "this user may not open it: start the job with umask 022, or the exporter as the job's user"
REFUSED_REMEDIES = {
    "version": "the job's training-exporter has another format than this one: install the same version for both",
    "name": "it is a copy of another process's file, whose samples would count twice: remove it",
    "too_many": "more files than are read: remove what is not of a living process",
    "too_large": "make fewer Stats",
    "memory": "the feed files together need more memory than the sidecar uses: make fewer Stats",
    "owner": "it belongs to another user: share a directory by --feed.dir and EXPORTER_FEED_DIR",
    **dict.fromkeys(("unreadable", "lock"), _CLOSED),
    **dict.fromkeys(
        ("magic", "truncated", "checksum", "content"),
        "the file is damaged: a living process replaces it; a dead one's can be removed",
    ),
    **dict.fromkeys(("symlink", "links", "not_regular"), "the exporter makes no such file: remove it"),
}
"""What to do about a feed file, by the reader's reason to refuse it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question."""

    status: Literal["ok", "warn", "FAIL"]  # warn: may be meant so; FAIL: keeps numbers from showing up
    subject: str
    found: str
    remedy: str = ""


ok, warn, fail = partial(Finding, "ok"), partial(Finding, "warn"), partial(Finding, "FAIL")
Probe = Callable[[], Iterable[Finding]]


def python(path: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether an interpreter can import the package, as a job would: not from the current directory."""
    subject = f"python {path}"
    environment = {name: value for name, value in environ.items() if name != "PYTHONSTARTUP"}
    seen = look(path, first="/", environment=environment)
    if not seen.python:
        yield fail(subject, seen.error, "point --check.python at a Python 3.10 or later")
    elif seen.ours and not seen.error:
        yield ok(subject, f"{seen.python} imports exporter {seen.version} from {seen.path}")
    elif seen.path and not seen.ours:
        shadowed = f"imports {seen.path} as exporter, in place of this package"
        yield fail(subject, shadowed, "rename that file or folder")
    else:
        missing = f"cannot import exporter ({seen.error or 'it is not installed'})"
        yield fail(subject, missing, remedy(path, seen.site))


def feed_directory(configuration: Configuration) -> Iterator[Finding]:
    """Whether processes can hand over what they record."""
    tell: partial[Finding]
    path, subject = _feed(configuration), "feed directory"
    if not is_trusted(path) and not os.path.lexists(path):
        if os.access(path.parent, os.W_OK | os.X_OK):
            yield warn(subject, f"{path} does not exist yet", "the first job creates it")
        else:
            found = f"{path} cannot be created: {path.parent} is not writable"
            yield fail(subject, found, "choose another with --feed.dir and EXPORTER_FEED_DIR")
        return
    try:
        check_directory(path)
    except FeedDirectoryError as error:
        yield fail(subject, str(error).removesuffix(f"; {error.remedy}"), error.remedy)
        return
    free = psutil.disk_usage(str(path)).free
    mounts = {each.mountpoint: each.fstype for each in psutil.disk_partitions(all=True)}
    real = path.resolve()
    filesystem = next((mounts[str(each)] for each in (real, *real.parents) if str(each) in mounts), "unknown")
    mode = f"mode {stat.S_IMODE(path.stat().st_mode):04o}"
    found, tell, remedy = f"{path}, {mode}, file system {filesystem}, {free / 2**20:,.0f} MiB free", ok, ""
    if not os.access(path, os.W_OK | os.X_OK):
        found, tell = f"{found}, not writable", warn
        remedy = "this user's jobs cannot record here: allow writing, or choose another --feed.dir"
    elif free < SMALL_FREE_BYTES:
        tell = warn if free else fail
        remedy = "what cannot be written is lost: free some space, or choose another --feed.dir"
    elif filesystem.startswith(NETWORK_FILESYSTEMS):
        tell = warn
        remedy = "use a memory-backed directory of the node, such as /dev/shm: its locks are reliable"
    yield tell(subject, found, remedy)


def _feed(configuration: Configuration) -> Path:
    """The feed directory that the sidecar uses."""
    return configuration.feed.dir or default_directory()


def sidecar(configuration: Configuration) -> Iterator[Finding]:
    """Whether an exporter serves the feed directory."""
    owner = runs.owner(_feed(configuration))
    if owner is None:
        remedy = "start one: training-exporter, or run the job with: training-exporter run COMMAND"
        yield warn("sidecar", "no exporter serves the feed directory", remedy)
        return
    where = f"process {owner}" if owner else "an exporter in another container"
    with contextlib.suppress(psutil.Error):
        where += f" ({' '.join(psutil.Process(owner).cmdline())})" if owner else ""
    yield ok("sidecar", f"{where} serves the feed directory")


def writers(configuration: Configuration) -> Iterator[Finding]:
    """Which processes record, and which jobs of `run` do not, and why."""
    feed, stale_seconds = _feed(configuration), configuration.feed.stale_after
    try:
        scan = FeedReader(feed).scan()
    except FeedDirectoryError:
        return  # told by the probe of the directory
    ended = sorted((each for each in scan.entries if not each.alive), key=lambda each: each.age_seconds)
    for entry in (*(each for each in scan.entries if each.alive), *ended[:SHOWN_ENDED]):
        yield _writer(entry, stale_seconds)
    if len(ended) > SHOWN_ENDED:
        yield ok("writer", f"{len(ended) - SHOWN_ENDED} more processes ended before these")
    yield from _rivals(each.snapshot.process for each in scan.entries if each.alive)
    for name, reason in scan.refused:
        yield warn("writer", f"{name} is refused: {reason}", REFUSED_REMEDIES[reason])
    if not scan.entries:
        remedy = (
            "check that the job's Python has training-exporter (--check.python=PATH), that the job has the same "
            "EXPORTER_FEED_DIR, and that it makes a Stat"
        )
        yield warn("writer", "no process has recorded anything here", remedy)
    recording = {entry.snapshot.process.run for entry in scan.entries}
    for job in runs.jobs(feed):
        if job.silence is not None and job.run not in recording:
            yield fail("run", f'"{job.run}" records nothing: {job.silence.found}', job.silence.remedy)


def _writer(entry: FeedEntry, stale_seconds: float) -> Finding:
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
        return warn("writer", f"{who}; {written}", remedy)
    return ok("writer", f"{who}; alive, {written}")


def _rivals(living: Iterable[ProcessIdentity]) -> Iterator[Finding]:
    """Who trains as a rank that another process is already; one that is being replaced is gone a while later."""
    firsts: dict[tuple[str, int | None], ProcessIdentity] = {}
    for process in sorted(living, key=lambda each: each.started):
        if process.trains and time.time() - process.started >= RIVAL_SECONDS:
            first = firsts.setdefault((process.run, process.rank), process)
            if first is not process:
                found = f'process {process.pid} trains as rank {process.rank} of run "{process.run}"'
                remedy = "give each process a rank (its launcher, RANK), or one of the jobs another run name"
                yield warn("writer", f"{found}, which process {first.pid} is already", remedy)


def ports(configuration: Configuration) -> Iterator[Finding]:
    """Who answers at the exporter's addresses."""
    file, tls = configuration.web.config_file, False
    if file is not None:
        try:
            tls = load_web_config(file).tls_server_config is not None
        except ConfigurationError as error:
            yield from _refused("web configuration", error)
            return
        yield ok("web configuration", f"{file} is valid, TLS is {'enabled' if tls else 'disabled'}")
    for address in map(parse_address, configuration.web.listen_address):
        try:
            bind(address, backlog=1).close()
        except ListenError as error:  # noqa: PERF203  # each may be taken
            host = address.host if address.host not in ("", "::", "0.0.0.0") else "127.0.0.1"
            base = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{address.port}"
            yield _taken(f"address {address.text}", base, str(error))
        else:
            yield ok(f"address {address.text}", "free")


def _refused(subject: str, error: ConfigurationError) -> Iterator[Finding]:
    for problem in error.problems:
        yield fail(subject, str(problem), "correct it: the exporter refuses to start")


def _taken(subject: str, base: str, refusal: str) -> Finding:
    """What an address that cannot be had is used for."""
    try:
        status, body = _ask(base, "/-/healthy")
        ready, reason = _ask(base, "/-/ready") if status == 200 else (0, "")
    except (OSError, http.client.HTTPException, ValueError):
        found, _, remedy = refusal.partition("; ")
        who = f"ss -ltnp 'sport = :{urlsplit(base).port}' shows who has it"
        return fail(subject, f"{found}, and no exporter answers there", f"{who}; {remedy}")
    if status == 200 and body == "healthy":
        if ready == 200:
            return ok(subject, f"an exporter answers at {base}")
        return warn(subject, f"an exporter answers, but is not ready: {reason}", "wait a moment")
    if status == 401:
        return ok(subject, f"a server with passwords answers at {base}, probably the exporter")
    found = f"taken by another server, whose answer to /-/healthy is {status}"
    return fail(subject, found, "choose another address with --web.listen-address=HOST:PORT")


def _ask(base: str, path: str) -> tuple[int, str]:
    """Status and beginning of the body of a GET, whoever answers; not redirected nor sent to a proxy."""
    context = ssl._create_unverified_context()  # noqa: S323, SLF001  (nothing secret is asked)
    opener = urllib.request.OpenerDirector()
    for handler in (urllib.request.HTTPHandler(), urllib.request.HTTPSHandler(context=context)):
        opener.add_handler(handler)
    with opener.open(base + path, timeout=ANSWER_SECONDS) as answer:
        return answer.status, answer.read(200).decode(errors="replace").strip()


def state_directory(configuration: Configuration) -> Iterator[Finding]:
    """Whether totals can outlive restarts."""
    chosen, subject = configuration.state.dir, "state directory"
    path = chosen or _feed(configuration)
    if path.is_dir():
        if os.access(path, os.W_OK | os.X_OK):
            yield ok(subject, f"{path} is writable")
        else:
            remedy = "totals would restart from 0: give the exporter's user write access"
            yield fail(subject, f"{path} is not writable", remedy)
    elif chosen is not None:  # else told by the probe of the feed directory
        yield fail(subject, f"{path} is no directory", "create it, or choose another --state.dir")


def rapl(_: Configuration, root: Path = Path("/")) -> Iterator[Finding]:
    """Whether the CPU's energy counters can be read."""
    counters = sorted((root / "sys/class/powercap").glob("*rapl*/energy_uj"))
    unreadable = [path for path in counters if not os.access(path, os.R_OK)]
    if unreadable:
        found = f"{len(unreadable)} of {len(counters)} energy counters are unreadable"
        yield warn("rapl", found, f"only root may read them by default: chmod a+r {unreadable[0]}")
    elif counters:
        yield ok("rapl", f"{len(counters)} energy counters are readable")
    else:
        yield ok("rapl", "no energy counters on this machine; CPU energy is absent")


def nvidia(configuration: Configuration, root: Path = Path("/")) -> Iterator[Finding]:
    """Whether there is a driver, and whether it is used; it is not touched."""
    gpu, version = configuration.gpu, root / "proc/driver/nvidia/version"
    if not gpu.enabled:
        found = "gpu.enabled is false; GPU families are absent"
    elif gpu.replay is not None:
        found = f"gpu.replay plays the described machine {gpu.replay} instead of this machine's GPUs"
    elif not version.exists():
        found = "no NVIDIA driver here; GPU families are absent"
    else:
        driver = version.read_text().partition("\n")[0].removeprefix("NVRM version:").strip()
        found = f"driver {driver}"
    yield ok("nvidia", found)


PROBES = (feed_directory, sidecar, writers, ports, state_directory, rapl, nvidia)
"""In the order in which a person would look."""


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Ask, and print the answers; 0 when nothing failed, otherwise 1."""
    parser = Parser(f"{PROGRAM} check", DESCRIPTION)
    add_flags(parser)
    own, text = parser.add_argument_group("check"), "output format (default text)"
    own.add_argument("--check.format", choices=("text", "json"), default="text", help=text)
    own.add_argument("--check.python", metavar="PATH", help="also check this Python, the job's")
    given = parser.parse_flags(arguments)
    findings = list(_examine(given, environ))
    failed = any(finding.status == "FAIL" for finding in findings)
    if value_of(given, "--check.format") == "json":
        told = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"version": __version__, "ok": not failed, "findings": told}, indent=2))
        return 1 if failed else 0
    for finding in findings:
        print(f"{finding.status:<{len(INDENT)}}{finding.subject}: {finding.found}")
        if finding.remedy:
            text = f"-> {finding.remedy}"
            print(textwrap.fill(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT + " " * 3))
    return 1 if failed else 0


def _examine(given: argparse.Namespace, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Everything that can be found out, in the order in which a person would look."""
    configurations: list[Configuration] = []
    yield from ask({"configuration": partial(_configuration, given, environ, configurations)})
    if (disabled := environ.get("EXPORTER_DISABLED", "")) not in ("", "0"):
        told = "is set here" if disabled == "1" else "turns nothing off: only 1 does"
        yield warn("environment", f"EXPORTER_DISABLED={disabled} {told}", "unset it for the job")
    probes: dict[str, Probe] = {}
    for path in dict.fromkeys(filter(None, (sys.executable, value_of(given, "--check.python")))):
        probes[f"python {path}"] = partial(python, path, environ)
    for configuration in configurations:
        probes |= {probe.__name__.replace("_", " "): partial(probe, configuration) for probe in PROBES}
    yield from ask(probes)


def _configuration(
    given: argparse.Namespace, environ: Mapping[str, str], made: list[Configuration]
) -> Iterator[Finding]:
    """Whether the configuration is valid, and where it came from; what it is goes into `made`."""
    try:
        made.append(resolve(given, environ))
    except ConfigurationError as error:
        yield from _refused("configuration", error)
        return
    sources = [f"${FEED_DIRECTORY_VARIABLE}"] if environ.get(FEED_DIRECTORY_VARIABLE) else []
    chosen = {flag: value_of(given, flag) for flag in FLAGS}
    sources += [str(chosen[flag]) if flag == "--config.file" else flag for flag in chosen if chosen[flag]]
    yield ok("configuration", f"valid; from {', '.join(sources) or 'the defaults alone'}")


def ask(probes: Mapping[str, Probe], deadline_seconds: float = DEADLINE_SECONDS) -> Iterator[Finding]:
    """Ask all at once and give the answers in order; one that does not come is a finding too."""
    answers: dict[str, queue.SimpleQueue[list[Finding]]] = {
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
            yield fail(subject, f"no answer within {deadline_seconds:g} s", remedy)


def _answer(subject: str, probe: Probe, answer: queue.SimpleQueue[list[Finding]]) -> None:
    try:
        found = list(probe())
    except OSError as error:
        found = [fail(subject, str(error), "make it readable")]
    except Exception as error:  # noqa: BLE001  # one broken question must not hide the others
        found = [fail(subject, f"the check itself failed: {error!r}", "please report this")]
    answer.put(found)
