"""Diagnosis of a silent job: a Python job under `run` that has recorded nothing `SILENT_SECONDS` after its start.

`run` starts this program once for each job. If the job is silent, the program searches for the package in the job's interpreter and
environment, prints the diagnosis, and writes the diagnosis to the job file of the launch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from exporter import diagnoses
from exporter.cli.flags import print_notice
from exporter.diagnoses import Statement
from exporter.elastic.python_command import parse_python_command
from exporter.errors import FeedError
from exporter.feed import runs
from exporter.feed.files import replace_file
from exporter.feed.reader import FeedReader
from exporter.feed.runs import SILENT_SECONDS, Job, Silence

PROBE_TIMEOUT_SECONDS = 8.0
"""Timeout of the process that searches for the package in the job's interpreter."""
_ADDED_CALLS = (
    "add `from exporter import training` to the code, and after each step `training.step()` and, optionally, "
    "`training.record(loss=loss, samples=len(batch))` (XGBoost: in `after_iteration` of a callback; Ray: in the worker)"
)
"""Remedy for a job that uses no library with a bridge."""
PACKAGE = Path(__file__).parents[1]
"""Directory of this package."""
_CAP_DAC_OVERRIDE = 1 << 1
"""Bit of the capability in `/proc/<pid>/status`."""

# The argument replaces the entry "" of the module search path, which a script does not have.
_PROBE_PROGRAM = """
import importlib.util, json, os, sys, sysconfig
sys.path[0] = sys.argv[1]
result = {"python": sys.version.split()[0], "site": sysconfig.get_path("purelib")}
try:
    spec = importlib.util.find_spec("exporter")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    result["path"] = (spec.origin or (locations or [""])[0]) if spec else None
    result["is_own_package"] = any(os.path.exists(os.path.join(location, "feed", "runs.py")) for location in locations)
    if result["is_own_package"]:
        from exporter.version import __version__
        result["version"] = __version__
except Exception as error:
    result["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(result), flush=True)
os._exit(0)  # without exit handlers, which may print further lines
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Result of a search for the package `exporter` in an interpreter."""

    python: str = ""  # version of Python; "" if the interpreter does not start
    path: str | None = None  # file or folder that `import exporter` would load; None if not found
    is_own_package: bool = False  # True if `path` belongs to this package
    version: str = ""  # version of this package
    site: str = ""  # site-packages directory of the interpreter
    error: str = ""


@dataclass(frozen=True, slots=True)
class LaunchedProcess:
    """Process of the job, as far as the diagnosis needs it."""

    pid: int
    command: Sequence[str]  # command line
    environment: Mapping[str, str]
    directory: str  # working directory

    @property
    def interpreter(self) -> str | None:
        """Path of the Python interpreter as in the command line, or None if the process runs another program.

        `/proc/<pid>/exe` would be the base interpreter, without the virtual environment.
        """
        name = self.command[0] if self.command else ""
        if not os.path.basename(name).startswith(("python", "pypy")):  # noqa: PTH119  # the job's command line contains string paths
            return None
        if "/" in name:
            return os.path.join(self.directory, name)  # noqa: PTH118  # the job's command line contains string paths
        return shutil.which(name, path=self.environment.get("PATH"))

    @property
    def import_directory(self) -> str:
        """First directory of the module search path: the directory of the script, otherwise the working directory."""
        script = parse_python_command(self.command).script
        if not script:
            return self.directory
        return os.path.dirname(os.path.realpath(os.path.join(self.directory, script)))  # noqa: PTH118, PTH120  # the job's command line contains string paths


def probe_interpreter(
    python: str, *, search_path: str, environment: Mapping[str, str], directory: str = "/"
) -> Interpreter:
    """Search for the package `exporter` in an interpreter whose module search path starts with *search_path*."""
    command = [python, "-c", _PROBE_PROGRAM, search_path]
    try:
        result = subprocess.run(
            command,
            env=environment,
            cwd=directory,
            capture_output=True,
            timeout=PROBE_TIMEOUT_SECONDS,
            check=False,
        )
        return Interpreter(**json.loads(result.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return Interpreter(error=f"the interpreter does not start: {error!r}")


def install_command(python: str, site: str) -> str:
    """Return a command that installs this package for an interpreter.

    If this package is in a repository, the command installs the repository with pip. Otherwise, the command copies the package. A
    repository that was installed before contains metadata with the entry points. Then setting PYTHONPATH is an alternative.

    Args:
        python: Path of the interpreter.
        site: Directory `site-packages` of the interpreter; "" if unknown.
    """
    root = PACKAGE.parent
    metadata = [*root.glob("training_exporter*.egg-info"), *root.glob("training_exporter-*.dist-info")]
    if (root / "pyproject.toml").exists():
        install = shlex.join([python, "-m", "pip", "install", str(root)])
        return (
            f"{install}, or start the job with PYTHONPATH={shlex.quote(str(root))}" if metadata else install
        )
    parts = (PACKAGE, root / "exporter_auto.py", root / "training_exporter.py", *metadata)
    copy = shlex.join(["cp", "-r", *map(str, parts)])
    return f"{copy} {shlex.quote(site) if site else f'the site-packages of {python}'}"


def silence_of(pid: int, run: str, feed_directory: Path) -> Silence | None:
    """Return why a job has recorded nothing. Return None if a process of the job has recorded, or if the job has no Python process."""
    processes = _process_tree(pid)
    if runs.recording_pids(feed_directory) & {process.pid for process in processes}:
        return None
    with suppress(FeedError):
        scan = FeedReader(feed_directory).scan()
        if any(entry.snapshot.process.run == run for entry in scan.entries):
            return None  # an earlier process of the job recorded
    # The last Python process is assumed to train: earlier ones may be `conda run` or a launcher, which start the training.
    for process in reversed(processes):
        if python := process.interpreter:
            return _check_environment(process, python, feed_directory) or _check_interpreter(process, python)
    return None


def _process_tree(pid: int) -> list[LaunchedProcess]:
    """Return a process and its descendants, parents first. Processes that cannot be read are omitted."""
    processes: list[LaunchedProcess] = []
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                processes.append(
                    LaunchedProcess(process.pid, process.cmdline(), process.environ(), process.cwd())
                )
    return processes


def _silence(reason: str, statement: Statement) -> Silence:
    return Silence(reason, statement.sentence, statement.remedy)


def _check_environment(process: LaunchedProcess, python: str, feed_directory: Path) -> Silence | None:
    """Return the diagnosis if the environment of the process or the feed directory prevents a recording, otherwise None."""
    environment = process.environment
    if environment.get("EXPORTER_DISABLED") == "1":
        return _silence("turned_off", diagnoses.DISABLED.describe(python=python))
    if environment.get("EXPORTER_AUTO") == "0":
        return _silence("turned_off", diagnoses.AUTO_DISABLED.describe(python=python))
    if environment.get("EXPORTER_FEED_DIR") != str(feed_directory):
        statement = diagnoses.OTHER_ENVIRONMENT.describe(python=python, directory=feed_directory)
        return _silence("environment", statement)
    try:
        is_full = os.statvfs(feed_directory).f_bavail == 0
        is_writable = may_write(feed_directory, process.pid)
    except OSError as error:
        statement = diagnoses.FEED_DIRECTORY_UNREADABLE.describe(
            directory=feed_directory, error=error.strerror
        )
        return _silence("feed_directory", statement)
    if is_full:
        return _silence("feed_directory", diagnoses.FEED_DIRECTORY_FULL.describe(directory=feed_directory))
    if not is_writable:
        statement = diagnoses.FEED_DIRECTORY_NOT_WRITABLE.describe(directory=feed_directory)
        return _silence("feed_directory", statement)
    return None


@dataclass(frozen=True, slots=True)
class FileAccess:
    """Credentials with which the kernel checks the file accesses of a process."""

    uid: int
    gids: frozenset[int]
    ignores_modes: bool  # True with CAP_DAC_OVERRIDE, which root usually has


def may_write(directory: Path, pid: int) -> bool:
    """Return True if a process may create files in a directory, or if the process has ended.

    The mode of the directory and a read-only mount decide; access control lists are ignored. Raises OSError if the directory is
    unreadable.
    """
    try:
        access = _file_access(pid)
    except OSError:  # the process has ended
        return True
    status = directory.stat()
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        return False
    if access.ignores_modes:
        return True
    if access.uid == status.st_uid:
        mask = stat.S_IWUSR | stat.S_IXUSR
    elif status.st_gid in access.gids:
        mask = stat.S_IWGRP | stat.S_IXGRP
    else:
        mask = stat.S_IWOTH | stat.S_IXOTH
    return status.st_mode & mask == mask


def _file_access(pid: int) -> FileAccess:
    """Read the credentials of a process from /proc. The last of the four ids in `Uid` and `Gid` is for file accesses."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    gids = frozenset(map(int, (fields["Gid"][3], *fields["Groups"])))
    capabilities = int(fields["CapEff"][0], 16)
    return FileAccess(int(fields["Uid"][3]), gids, bool(capabilities & _CAP_DAC_OVERRIDE))


def _check_interpreter(process: LaunchedProcess, python: str) -> Silence:
    """Return the diagnosis for the process's interpreter.

    The reason is `not_installed` or `shadowed` if the interpreter cannot import this package, and otherwise `nothing_recorded`.
    """
    interpreter = probe_interpreter(
        python,
        search_path=process.import_directory,
        environment=process.environment,
        directory=process.directory,
    )
    if interpreter.is_own_package and not interpreter.error:
        return _silence(
            "nothing_recorded", diagnoses.NOTHING_RECORDED.describe(python=python, calls=_ADDED_CALLS)
        )
    if interpreter.path and not interpreter.is_own_package:
        return _silence("shadowed", diagnoses.SHADOWED.describe(python=python, path=interpreter.path))
    error = f": {interpreter.error}" if interpreter.error else ""
    install = install_command(python, interpreter.site)
    return _silence(
        "not_installed", diagnoses.NOT_INSTALLED.describe(python=python, error=error, install=install)
    )


def main(arguments: Sequence[str]) -> int:
    """Diagnose a job. If the job is silent and still runs, print the reason and write it to the job file of the launch."""
    pid, feed_directory, run, started_at, path = arguments
    silence = silence_of(int(pid), run, Path(feed_directory))
    if silence is not None and Path(path).exists():  # otherwise the job has exited
        symptom = f"run {run} has recorded nothing in {SILENT_SECONDS:.0f} s"
        print_notice(f"{symptom}: {silence.found}; remedy: {silence.remedy}")
        launch = ""
        with suppress(OSError, ValueError):
            launch = str(json.loads(Path(path).read_bytes())["launch"])
        job = Job(pid=int(pid), run=run, started=float(started_at), silence=silence, launch=launch)
        content = json.dumps(dataclasses.asdict(job)).encode()
        with suppress(OSError):
            replace_file(path, content, temporary=f"{path}.tmp", mode=0o644)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
