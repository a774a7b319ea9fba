"""The questions of `check`: what stands between a training process and a number in Prometheus.

Used by `check` only, each probe on a thread of its own with a deadline. A probe reads and asks; it creates
and changes nothing. In comes the configuration, out come findings: what was found, whether that is in
order, and the remedy where it is not.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import pwd
import ssl
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from exporter.cli.configuration import Configuration
from exporter.cli.finding import Finding, Surroundings, bytes_text
from exporter.cli.silence import look, remedy
from exporter.config.options import format_duration
from exporter.errors import ConfigurationError, FeedDirectoryError, FeedFormatError, ListenError
from exporter.feed import runs
from exporter.feed.directory import check_directory, default_directory, is_trusted, own_uid
from exporter.feed.overrides import read_overrides
from exporter.feed.reader import FeedEntry, FeedReader
from exporter.web.listen import bind, parse_addresses
from exporter.web.webconfig import load_web_config

ANSWER_SECONDS = 3.0
SMALL_FREE_BYTES = 4 << 20
# Record locks and renames over these depend on their servers.
NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "fuse", "9p", "lustre", "gpfs", "ceph", "beegfs", "afs")

_DAMAGED = "its bytes are damaged: the process's next snapshot replaces it, and what is dead can be removed"
_PLANTED = "no process of ours makes such a file: remove it"
_CLOSED = "this user may not open it: start the job with umask 022, or the exporter as the job's user"
REFUSED_REMEDIES = {
    "version": "the job's training-exporter has another format than this one: install the same version for both",
    "name": "it is a copy of another process's file, whose samples would count twice: remove it",
    "too_many": "more files than are read: remove what is not of a living process",
    "too_large": "raise feed.max_file_size, or make fewer Stats",
    "owner": "it belongs to another user: share a directory by --feed.dir and EXPORTER_FEED_DIR",
    "unreadable": _CLOSED,
    "lock": _CLOSED,
    **dict.fromkeys(("magic", "truncated", "checksum", "content"), _DAMAGED),
    **dict.fromkeys(("symlink", "links", "not_regular"), _PLANTED),
}
"""What to do about a feed file, by the reader's reason to refuse it."""


def feed_directory_of(configuration: Configuration) -> Path:
    """The feed directory that a sidecar of this configuration uses."""
    return configuration.feed.dir or default_directory(own_uid())


def feed_directory(configuration: Configuration, around: Surroundings) -> Iterator[Finding]:
    """Whether processes can hand over what they record."""
    path, uid = feed_directory_of(configuration), own_uid()
    subject = "feed directory"
    trusted = is_trusted(path, uid)
    if not trusted and not os.path.lexists(path):
        if not os.access(path.parent, os.W_OK | os.X_OK):
            remedy = "make that directory writable, or choose another with --feed.dir and EXPORTER_FEED_DIR"
            yield Finding("FAIL", subject, f"{path} cannot be created: {path.parent} is not writable", remedy)
            return
        yield Finding(
            "warn", subject, f"{path} does not exist yet", "it is made by the exporter or the first job"
        )
        return
    try:
        check_directory(path, trusted=trusted, uid=uid)
    except FeedDirectoryError as error:
        yield _refused(subject, error)
        return
    status, space = path.stat(), os.statvfs(path)
    free = space.f_bavail * space.f_frsize
    filesystem = _filesystem(path, around.proc)
    found = (
        f"{path}, mode {stat.S_IMODE(status.st_mode):04o}, owner {_user(status.st_uid)}, {filesystem}, "
        f"{bytes_text(free)} free"
    )
    if not os.access(path, os.W_OK | os.X_OK):
        remedy = "jobs of this user cannot record here; give them write access, or choose another --feed.dir"
        yield Finding("warn", subject, f"{found}, not writable", remedy)
    elif free < SMALL_FREE_BYTES:
        remedy = "what cannot be written is not seen; free some space, or choose another --feed.dir"
        yield Finding("FAIL" if free == 0 else "warn", subject, found, remedy)
    elif filesystem.startswith(NETWORK_FILESYSTEMS):
        remedy = "a memory-backed directory of the node (/dev/shm) is faster and its locks are certain"
        yield Finding("warn", subject, found, remedy)
    else:
        yield Finding("ok", subject, found)


def _refused(subject: str, error: FeedDirectoryError) -> Finding:
    return Finding("FAIL", subject, str(error).removesuffix(f"; {error.remedy}"), error.remedy)


def sidecar(configuration: Configuration, around: Surroundings) -> Iterator[Finding]:
    """Whether an exporter serves the feed directory."""
    owner = runs.owner(feed_directory_of(configuration))
    if owner is None:
        remedy = "start one: training-exporter, or run the job with: training-exporter run COMMAND"
        yield Finding("warn", "sidecar", "no exporter serves the feed directory", remedy)
        return
    where = "in another container" if owner == 0 else f"process {owner}"
    with contextlib.suppress(OSError):
        arguments = (around.proc / str(owner) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        where += f" ({' '.join(part.decode(errors='replace') for part in arguments)})"
    yield Finding("ok", "sidecar", f"{where} serves the feed directory")


def writers(configuration: Configuration, around: Surroundings) -> Iterator[Finding]:
    """Which processes record."""
    reader = FeedReader(feed_directory_of(configuration), max_bytes=configuration.feed.max_file_size)
    try:
        scan = reader.scan()
    except FeedDirectoryError:
        return  # told by the probe of the directory
    for entry in scan.entries:
        yield _writer(entry, configuration.feed.stale_after)
    for name, reason in scan.refused:
        yield Finding("warn", "writer", f"{name} is refused: {reason}", REFUSED_REMEDIES[reason])
    if not scan.entries:
        remedy = (
            "does the job's Python have training-exporter (--check.python=PATH asks it), does the job make a "
            "Stat, and has it the same EXPORTER_FEED_DIR?"
        )
        yield Finding("warn", "writer", "no process has recorded anything here", remedy)
    if around.environ.get("EXPORTER_DISABLED", "") not in ("", "0"):
        yield Finding("warn", "writer", "EXPORTER_DISABLED is set here", "unset it for the job")


def _writer(entry: FeedEntry, stale_seconds: float) -> Finding:
    process, recording = entry.snapshot.process, entry.snapshot.recording
    rank = "no rank" if process.rank is None else f"rank {process.rank}"
    who = (
        f'run "{process.run}", {rank}, {process.role}, process {process.pid} on {process.node or "an unknown node"}: '
        f"{len(recording.stats)} Stats"
    )
    if not entry.alive:
        ended = "ended in order" if recording.final else "ended without its last words (killed?)"
        return Finding("ok", "writer", f"{who}; {ended}, last written {_ago(entry.age_seconds)}")
    if entry.age_seconds > stale_seconds:
        remedy = "its process lives but does not write: stopped, hung, or its feed directory is full"
        return Finding("warn", "writer", f"{who}; last written {_ago(entry.age_seconds)}", remedy)
    return Finding("ok", "writer", f"{who}; alive, last written {_ago(entry.age_seconds)}")


def ports(configuration: Configuration, around: Surroundings) -> Iterator[Finding]:
    """Who answers at the exporter's addresses."""
    del around
    file = configuration.web.config_file
    tls = False
    if file is not None:
        try:
            tls = load_web_config(file).tls_server_config is not None
        except ConfigurationError as error:
            for problem in error.problems:
                yield Finding(
                    "FAIL", "web configuration", str(problem), "the exporter does not start with it"
                )
            return
        yield Finding(
            "ok", "web configuration", f"{file} is valid, TLS is {'enabled' if tls else 'disabled'}"
        )
    for address in parse_addresses(configuration.web.listen_address):
        subject = f"address {address.text}"
        try:
            bind(address, backlog=1).close()
        except ListenError as error:
            base = _base_url(address.host, address.port, tls=tls)
            yield _taken(subject, base, str(error))
        else:
            yield Finding("ok", subject, "free: nobody serves here now")


def _taken(subject: str, base: str, refusal: str) -> Finding:
    """What an address that cannot be had is used for."""
    try:
        status, body = _ask(base, "/-/healthy")
        ready, reason = _ask(base, "/-/ready") if status == 200 else (0, "")
    except (OSError, http.client.HTTPException, ValueError):
        found, _, remedy = refusal.partition("; ")
        who = f"ss -ltnp 'sport = :{urlsplit(base).port}' shows who has it"
        return Finding("FAIL", subject, f"{found}, and no exporter answers there", f"{who}; {remedy}")
    if status == 200 and body == "healthy":
        if ready != 200:
            return Finding(
                "warn", subject, f"an exporter answers, but is not ready: {reason}", "wait a moment"
            )
        return Finding("ok", subject, f"an exporter answers at {base}")
    if status == 401:
        return Finding("ok", subject, f"a server with passwords answers at {base}, probably the exporter")
    remedy = "choose another address with --web.listen-address=HOST:PORT"
    return Finding(
        "FAIL", subject, f"taken by another server, whose answer to /-/healthy is {status}", remedy
    )


def python(path: str, around: Surroundings) -> Iterator[Finding]:
    """Whether an interpreter can import the package, as a job would: not from the current directory."""
    subject = f"python {path}"
    environment = {name: value for name, value in around.environ.items() if name != "PYTHONSTARTUP"}
    seen = look(path, first="/", environment=environment)
    if not seen.python:
        yield Finding("FAIL", subject, seen.error, "give --check.python=PATH of a Python from 3.10 on")
    elif seen.ours and not seen.error:
        yield Finding("ok", subject, f"{seen.python} imports exporter {seen.version} from {seen.path}")
    elif seen.path and not seen.ours:
        found = f"imports {seen.path} as exporter, in place of this package"
        yield Finding("FAIL", subject, found, "give that file or folder another name")
    else:
        found = f"cannot import exporter ({seen.error or 'it is not installed'})"
        yield Finding("FAIL", subject, found, remedy(path, seen.site))


def silent_jobs(configuration: Configuration, around: Surroundings) -> Iterator[Finding]:
    """Which jobs of `run` record nothing, and why."""
    del around
    directory = feed_directory_of(configuration)
    recording = {entry.snapshot.process.run for entry in _scan(configuration)}
    for job in runs.jobs(directory):
        if job.silence is not None and job.run not in recording:
            yield Finding(
                "FAIL", "run", f'"{job.run}" records nothing: {job.silence.found}', job.silence.remedy
            )


def _scan(configuration: Configuration) -> Sequence[FeedEntry]:
    reader = FeedReader(feed_directory_of(configuration), max_bytes=configuration.feed.max_file_size)
    with contextlib.suppress(FeedDirectoryError):  # told by the probe of the directory
        return reader.scan().entries
    return ()


def recording_rules(configuration: Configuration, around: Surroundings) -> Iterator[Finding]:
    """Whether processes can read the recording rules that a sidecar left."""
    del around
    subject = "recording rules"
    try:
        rules = read_overrides(feed_directory_of(configuration))
    except FeedDirectoryError as error:
        yield _refused(subject, error)
        return
    except FeedFormatError as error:
        yield Finding("FAIL", subject, str(error), "restart the exporter, which writes them anew")
        return
    yield Finding(
        "ok", subject, "none in force" if not rules else f"{len(rules)} in force for processes that record"
    )


def state_directory(configuration: Configuration, around: Surroundings) -> Iterator[Finding]:
    """Whether totals can outlive restarts."""
    del around
    path, subject = configuration.state.dir or feed_directory_of(configuration), "state directory"
    if not path.is_dir():
        if configuration.state.dir is None:
            return  # told by the probe of the feed directory
        yield Finding("FAIL", subject, f"{path} is no directory", "create it, or choose another --state.dir")
        return
    if not os.access(path, os.W_OK | os.X_OK):
        remedy = "the totals would begin anew at every restart; give the exporter's user write access"
        yield Finding("FAIL", subject, f"{path} is not writable", remedy)
        return
    damaged = [each.name for each in (path / "ledger").glob("*.damaged-*")]
    if damaged:
        remedy = "its totals began anew; the file can be removed"
        yield Finding("warn", subject, f"{path} holds {len(damaged)} damaged files: {damaged[0]}", remedy)
        return
    yield Finding("ok", subject, f"{path} is writable")


PROBES = (feed_directory, sidecar, writers, silent_jobs, ports, recording_rules, state_directory)
"""In the order in which a person would look."""


def _ask(base: str, path: str) -> tuple[int, str]:
    """Status and beginning of the body of a GET, whoever answers."""
    parts = urlsplit(base)
    host = parts.hostname or ""
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        unverified = ssl.create_default_context()
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, parts.port, timeout=ANSWER_SECONDS, context=unverified)
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read(200).decode(errors="replace").strip()
    finally:
        connection.close()


def _base_url(host: str, port: int, *, tls: bool) -> str:
    name = host if host not in ("", "::", "0.0.0.0") else "127.0.0.1"
    return f"{'https' if tls else 'http'}://{f'[{name}]' if ':' in name else name}:{port}"


def _filesystem(path: Path, proc: Path) -> str:
    """The type of the file system that holds a path.

    Source: Linux, Documentation/filesystems/proc.rst, 3.5 /proc/<pid>/mountinfo.
    """
    found, longest = "file system unknown", -1
    wanted = os.path.realpath(path)
    with contextlib.suppress(OSError):
        for line in (proc / "self/mountinfo").read_text().splitlines():
            head, _, tail = line.partition(" - ")
            mount = head.split()[4].replace("\\040", " ")
            inside = wanted == mount or wanted.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= longest:
                found, longest = tail.split()[0], len(mount)
    return found


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _ago(seconds: float) -> str:
    return f"{seconds:.1f} s ago" if seconds < 60 else f"{format_duration(round(seconds))} ago"
