"""The questions of `check`: what stands between a training process and a number in Prometheus.

Used by `check` only, each probe on a thread of its own with a deadline. A probe reads and asks; it creates and changes
nothing and opens no device. What a machine does not have is a normal state, and its families are absent.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import pwd
import ssl
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import psutil

from exporter.cli.configuration import Configuration
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
# Docker gives a container 64 MiB of /dev/shm, which DataLoader workers fill first.
SMALL_SHM_BYTES = 1 << 30
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


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question."""

    status: Literal["ok", "warn", "FAIL"]  # warn: may be meant so; FAIL: keeps numbers from showing up
    subject: str
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """What is asked about: a sidecar of some configuration on this machine, or on one below another root."""

    configuration: Configuration = field(default_factory=Configuration)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")

    @property
    def feed(self) -> Path:
        """The feed directory that the sidecar uses."""
        return self.configuration.feed.dir or default_directory(own_uid())


def python(path: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether an interpreter can import the package, as a job would: not from the current directory."""
    subject = f"python {path}"
    environment = {name: value for name, value in environ.items() if name != "PYTHONSTARTUP"}
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


def feed_directory(machine: Machine) -> Iterator[Finding]:
    """Whether processes can hand over what they record."""
    path, uid, subject = machine.feed, own_uid(), "feed directory"
    trusted = is_trusted(path, uid)
    if not trusted and not os.path.lexists(path):
        if os.access(path.parent, os.W_OK | os.X_OK):
            made = "it is made by the exporter or the first job"
            yield Finding("warn", subject, f"{path} does not exist yet", made)
        else:
            remedy = "make that directory writable, or choose another with --feed.dir and EXPORTER_FEED_DIR"
            yield Finding("FAIL", subject, f"{path} cannot be created: {path.parent} is not writable", remedy)
        return
    try:
        check_directory(path, trusted=trusted, uid=uid)
    except FeedDirectoryError as error:
        yield _refused(subject, error)
        return
    status, space = path.stat(), os.statvfs(path)
    free = space.f_bavail * space.f_frsize
    try:
        user = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        user = str(status.st_uid)
    mounts = {each.mountpoint: each.fstype for each in psutil.disk_partitions(all=True)}
    real = path.resolve()
    filesystem = next((mounts[str(each)] for each in (real, *real.parents) if str(each) in mounts), "unknown")
    mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
    found = f"{path}, {mode}, owner {user}, file system {filesystem}, {_mebibytes(free)} free"
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


def sidecar(machine: Machine) -> Iterator[Finding]:
    """Whether an exporter serves the feed directory."""
    owner = runs.owner(machine.feed)
    if owner is None:
        remedy = "start one: training-exporter, or run the job with: training-exporter run COMMAND"
        yield Finding("warn", "sidecar", "no exporter serves the feed directory", remedy)
        return
    where = f"process {owner}" if owner else "an exporter in another container"
    with contextlib.suppress(psutil.Error):
        where += f" ({' '.join(psutil.Process(owner).cmdline())})" if owner else ""
    yield Finding("ok", "sidecar", f"{where} serves the feed directory")


def writers(machine: Machine) -> Iterator[Finding]:
    """Which processes record, and which jobs of `run` do not, and why."""
    settings = machine.configuration.feed
    try:
        scan = FeedReader(machine.feed, max_bytes=settings.max_file_size).scan()
    except FeedDirectoryError:
        return  # told by the probe of the directory
    for entry in scan.entries:
        yield _writer(entry, settings.stale_after)
    for name, reason in scan.refused:
        yield Finding("warn", "writer", f"{name} is refused: {reason}", REFUSED_REMEDIES[reason])
    if not scan.entries:
        remedy = (
            "does the job's Python have training-exporter (--check.python=PATH asks it), does the job make a "
            "Stat, and has it the same EXPORTER_FEED_DIR?"
        )
        yield Finding("warn", "writer", "no process has recorded anything here", remedy)
    if machine.environ.get("EXPORTER_DISABLED", "") not in ("", "0"):
        yield Finding("warn", "writer", "EXPORTER_DISABLED is set here", "unset it for the job")
    recording = {entry.snapshot.process.run for entry in scan.entries}
    for job in runs.jobs(machine.feed):
        if job.silence is not None and job.run not in recording:
            found = f'"{job.run}" records nothing: {job.silence.found}'
            yield Finding("FAIL", "run", found, job.silence.remedy)


def _writer(entry: FeedEntry, stale_seconds: float) -> Finding:
    process, recording, age = entry.snapshot.process, entry.snapshot.recording, entry.age_seconds
    rank = "no rank" if process.rank is None else f"rank {process.rank}"
    where = f"process {process.pid} on {process.node or 'an unknown node'}"
    who = f'run "{process.run}", {rank}, {process.role}, {where}: {len(recording.stats)} Stats'
    written = f"last written {f'{age:.1f} s' if age < 60 else format_duration(round(age))} ago"
    if not entry.alive:
        ended = "ended in order" if recording.final else "ended without its last words (killed?)"
        return Finding("ok", "writer", f"{who}; {ended}, {written}")
    if age > stale_seconds:
        remedy = "its process lives but does not write: stopped, hung, or its feed directory is full"
        return Finding("warn", "writer", f"{who}; {written}", remedy)
    return Finding("ok", "writer", f"{who}; alive, {written}")


def ports(machine: Machine) -> Iterator[Finding]:
    """Who answers at the exporter's addresses."""
    file, tls = machine.configuration.web.config_file, False
    if file is not None:
        subject = "web configuration"
        try:
            tls = load_web_config(file).tls_server_config is not None
        except ConfigurationError as error:
            for problem in error.problems:
                yield Finding("FAIL", subject, str(problem), "the exporter does not start with it")
            return
        yield Finding("ok", subject, f"{file} is valid, TLS is {'enabled' if tls else 'disabled'}")
    for address in parse_addresses(machine.configuration.web.listen_address):
        subject = f"address {address.text}"
        try:
            bind(address, backlog=1).close()
        except ListenError as error:
            name = address.host if address.host not in ("", "::", "0.0.0.0") else "127.0.0.1"
            host = f"[{name}]" if ":" in name else name
            yield _taken(subject, f"{'https' if tls else 'http'}://{host}:{address.port}", str(error))
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
    if status == 200 and body == "healthy" and ready == 200:
        return Finding("ok", subject, f"an exporter answers at {base}")
    if status == 200 and body == "healthy":
        return Finding("warn", subject, f"an exporter answers, but is not ready: {reason}", "wait a moment")
    if status == 401:
        return Finding("ok", subject, f"a server with passwords answers at {base}, probably the exporter")
    found = f"taken by another server, whose answer to /-/healthy is {status}"
    return Finding("FAIL", subject, found, "choose another address with --web.listen-address=HOST:PORT")


def _ask(base: str, path: str) -> tuple[int, str]:
    """Status and beginning of the body of a GET, whoever answers."""
    parts = urlsplit(base)
    host = parts.hostname or ""
    connection = http.client.HTTPConnection(host, parts.port, timeout=ANSWER_SECONDS)
    if parts.scheme == "https":
        unverified = ssl.create_default_context()
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, parts.port, timeout=ANSWER_SECONDS, context=unverified)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read(200).decode(errors="replace").strip()


def recording_rules(machine: Machine) -> Iterator[Finding]:
    """Whether processes can read the recording rules that a sidecar left."""
    subject = "recording rules"
    try:
        rules = read_overrides(machine.feed)
    except FeedDirectoryError as error:
        yield _refused(subject, error)
    except FeedFormatError as error:
        yield Finding("FAIL", subject, str(error), "restart the exporter, which writes them anew")
    else:
        found = f"{len(rules)} in force for processes that record" if rules else "none in force"
        yield Finding("ok", subject, found)


def state_directory(machine: Machine) -> Iterator[Finding]:
    """Whether totals can outlive restarts."""
    chosen, subject = machine.configuration.state.dir, "state directory"
    path = chosen or machine.feed
    if not path.is_dir():
        if chosen is not None:  # else told by the probe of the feed directory
            remedy = "create it, or choose another --state.dir"
            yield Finding("FAIL", subject, f"{path} is no directory", remedy)
        return
    damaged = [each.name for each in (path / "ledger").glob("*.damaged-*")]
    if not os.access(path, os.W_OK | os.X_OK):
        remedy = "the totals would begin anew at every restart; give the exporter's user write access"
        yield Finding("FAIL", subject, f"{path} is not writable", remedy)
    elif damaged:
        remedy = "its totals began anew; the file can be removed"
        yield Finding("warn", subject, f"{path} holds {len(damaged)} damaged files: {damaged[0]}", remedy)
    else:
        yield Finding("ok", subject, f"{path} is writable")


def shared_memory(machine: Machine) -> Iterator[Finding]:
    """How large /dev/shm is."""
    path, subject = machine.root / "dev/shm", "shared memory"
    try:
        space = os.statvfs(path)
    except OSError as error:
        remedy = "set --feed.dir and EXPORTER_FEED_DIR"
        yield Finding("warn", subject, f"{path}: {error.strerror}", remedy)
        return
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    found = f"{path} has {_mebibytes(size)}, {_mebibytes(free)} free"
    if size < SMALL_SHM_BYTES:
        remedy = "give the container more: --shm-size=8g, or a volume with medium: Memory"
        yield Finding("warn", subject, found, remedy)
    else:
        yield Finding("ok", subject, found)


def cgroup(machine: Machine) -> Iterator[Finding]:
    """Which version of control groups there is."""
    root = machine.root / "sys/fs/cgroup"
    if (root / "cgroup.controllers").exists():
        yield Finding("ok", "cgroup", "version 2")
    elif root.is_dir() and any(root.iterdir()):
        yield Finding("ok", "cgroup", "version 1")
    else:
        yield Finding("warn", "cgroup", f"none at {root}", "families of the container's limits are absent")


def rapl(machine: Machine) -> Iterator[Finding]:
    """Whether the CPU's energy counters can be read."""
    counters = sorted((machine.root / "sys/class/powercap").glob("*rapl*/energy_uj"))
    unreadable = [path for path in counters if not os.access(path, os.R_OK)]
    if unreadable:
        found = f"{len(unreadable)} of {len(counters)} energy counters are unreadable"
        remedy = f"for root only by default; let the exporter read it: chmod a+r {unreadable[0]}"
        yield Finding("warn", "rapl", found, remedy)
    elif counters:
        yield Finding("ok", "rapl", f"{len(counters)} energy counters are readable")
    else:
        yield Finding("ok", "rapl", "no energy counters on this machine; CPU energy is absent")


def nvidia(machine: Machine) -> Iterator[Finding]:
    """Whether there are a driver and its Python binding, and whether they are used; the driver is not touched."""
    gpu = machine.configuration.gpu
    version = machine.root / "proc/driver/nvidia/version"
    if not gpu.enabled:
        yield Finding("ok", "nvidia", "gpu.enabled is false; GPU families are absent")
    elif gpu.replay is not None:
        found = f"the described machine {gpu.replay} is played (gpu.replay): not this one's GPUs"
        yield Finding("ok", "nvidia", found)
    elif not version.exists():
        yield Finding("ok", "nvidia", "no NVIDIA driver here; GPU families are absent")
    else:
        driver = version.read_text().partition("\n")[0].removeprefix("NVRM version:").strip()
        if importlib.util.find_spec("pynvml") is not None:
            yield Finding("ok", "nvidia", f"driver {driver}; pynvml can be imported")
        else:
            remedy = "install it for the exporter's Python: pip install nvidia-ml-py"
            yield Finding("warn", "nvidia", f"driver {driver}, but no pynvml", remedy)


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


PROBES = (
    feed_directory,
    sidecar,
    writers,
    ports,
    recording_rules,
    state_directory,
    shared_memory,
    cgroup,
    rapl,
    nvidia,
)
"""In the order in which a person would look."""
