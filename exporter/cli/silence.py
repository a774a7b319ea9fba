"""Diagnosis of a Python job under `run` without recorded values: a program that runs once and logs a line.

The program starts the job's interpreter in the job's environment; the diagnosis is written to the run's file, too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from exporter import diagnoses
from exporter.cli.flags import say
from exporter.diagnoses import Described
from exporter.errors import FeedError
from exporter.feed import runs
from exporter.feed.files import replace_file
from exporter.feed.reader import FeedReader
from exporter.feed.runs import SILENT_SECONDS, Job, Silence

PYTHON_SECONDS = 8.0
CALLS = (
    "add `from exporter import training` to the code, and after each step `training.step()` and, if wanted, "
    "`training.record(loss=loss, samples=len(batch))` (XGBoost: in `after_iteration` of a callback; Ray: in the worker)"
)
PACKAGE = Path(__file__).parents[1]

_LOOK = """
import importlib.util, json, os, sys, sysconfig
sys.path[0] = sys.argv[1]
found = {"python": sys.version.split()[0], "site": sysconfig.get_path("purelib")}
try:
    spec = importlib.util.find_spec("exporter")
    places = list(spec.submodule_search_locations or ()) if spec else []
    found["path"] = (spec.origin or (places or [""])[0]) if spec else None
    found["ours"] = any(os.path.exists(os.path.join(place, "feed", "runs.py")) for place in places)
    if found["ours"]:
        from exporter.version import __version__
        found["version"] = __version__
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Result of `import exporter` in an interpreter."""

    python: str = ""  # version; "" if the interpreter does not start
    path: str | None = None  # the imported file
    ours: bool = False  # the file belongs to this package
    version: str = ""  # version of the package
    site: str = ""  # site-packages
    error: str = ""


@dataclass(frozen=True, slots=True)
class LaunchedProcess:
    """A process of the job: command line, environment and working directory."""

    pid: int
    command: Sequence[str]
    environment: Mapping[str, str]
    directory: str

    @property
    def interpreter(self) -> str | None:
        """Return the interpreter path of the command line, which names a virtual environment; None for other programs."""
        name = self.command[0] if self.command else ""
        if not os.path.basename(name).startswith(("python", "pypy")):  # noqa: PTH119  # no path of ours
            return None
        if "/" in name:
            return os.path.join(self.directory, name)  # noqa: PTH118  # as above
        return shutil.which(name, path=self.environment.get("PATH"))

    @property
    def import_directory(self) -> str:
        """Return the first directory of the module path: the script's, otherwise the working directory."""
        words = iter(self.command[1:])
        for word in words:
            if not word.startswith("-"):
                return os.path.dirname(os.path.realpath(os.path.join(self.directory, word)))  # noqa: PTH118, PTH120  # as above
            if word in {"-W", "-X"}:
                next(words, None)
            elif word[-1] in "mc":
                break
        return self.directory


def look(python: str, *, first: str, environment: Mapping[str, str], directory: str = "/") -> Interpreter:
    """Return the result of `import exporter` in an interpreter, in `first` and then on the module path."""
    command = [python, "-c", _LOOK, first]
    try:
        answer = subprocess.run(  # the job's own interpreter
            command, env=environment, cwd=directory, capture_output=True, timeout=PYTHON_SECONDS, check=False
        )
        return Interpreter(**json.loads(answer.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return Interpreter(error=f"the interpreter does not start: {error!r}")


def remedy(python: str, site: str) -> str:
    """Return the command that installs this package for an interpreter, without an index and without a build."""
    root = PACKAGE.parent
    described = [*root.glob("training_exporter*.egg-info"), *root.glob("training_exporter-*.dist-info")]
    if (root / "pyproject.toml").exists():
        install = f"{python} -m pip install {root}"
        return f"{install}, or start the job with PYTHONPATH={root}" if described else install
    parts = (PACKAGE, root / "exporter_auto.py", root / "training_exporter.py", *described)
    return f"cp -r {' '.join(str(part) for part in parts)} {site or f'the site-packages of {python}'}"


def silence_of(pid: int, run: str, feed_directory: Path) -> Silence | None:
    """Return the reason for missing values of a job; None for a recording job and without a Python process."""
    processes = _tree(pid)
    if runs.recording_processes(feed_directory) & {process.pid for process in processes}:
        return None
    with suppress(FeedError):
        scan = FeedReader(feed_directory).scan()
        if any(entry.snapshot.process.run == run for entry in scan.entries):  # a loop, between two scripts
            return None
    # The last: `conda run` and launchers are also Python, and start the training process.
    for process in reversed(processes):
        if python := process.interpreter:
            return _of_environment(process, python, feed_directory) or _of_interpreter(process, python)
    return None


def _tree(pid: int) -> list[LaunchedProcess]:
    """Return a process and its descendants, parents first, without unreadable processes."""
    found: list[LaunchedProcess] = []
    with suppress(psutil.Error):
        top = psutil.Process(pid)
        for each in (top, *top.children(recursive=True)):
            with suppress(psutil.Error):
                found.append(LaunchedProcess(each.pid, each.cmdline(), each.environ(), each.cwd()))
    return found


def _silence(reason: str, described: Described) -> Silence:
    return Silence(reason, described.found, described.remedy)


def _of_environment(process: LaunchedProcess, python: str, feed_directory: Path) -> Silence | None:
    given = process.environment
    if given.get("EXPORTER_DISABLED") == "1":
        return _silence("turned_off", diagnoses.DISABLED.describe(python=python))
    if given.get("EXPORTER_AUTO") == "0":
        return _silence("turned_off", diagnoses.AUTO_DISABLED.describe(python=python))
    if given.get("EXPORTER_FEED_DIR") != str(feed_directory):
        described = diagnoses.OTHER_ENVIRONMENT.describe(python=python, directory=feed_directory)
        return _silence("environment", described)
    try:
        full = os.statvfs(feed_directory).f_bavail == 0
    except OSError as error:
        described = diagnoses.FEED_DIRECTORY_UNREADABLE.describe(
            directory=feed_directory, error=error.strerror
        )
        return _silence("feed_directory", described)
    if full:
        return _silence("feed_directory", diagnoses.FEED_DIRECTORY_FULL.describe(directory=feed_directory))
    if not _may_write(feed_directory, process.pid):
        described = diagnoses.FEED_DIRECTORY_NOT_WRITABLE.describe(directory=feed_directory)
        return _silence("feed_directory", described)
    return None


def _may_write(directory: Path, pid: int) -> bool:
    """Return True if the user of a process may create files in a directory."""
    with suppress(OSError):
        user, found = Path(f"/proc/{pid}").stat().st_uid, directory.stat()
        if user not in {0, os.geteuid()}:
            return bool(found.st_mode & (0o200 if found.st_uid == user else 0o022))
    return os.access(directory, os.W_OK | os.X_OK)


def _of_interpreter(process: LaunchedProcess, python: str) -> Silence:
    first, environment, directory = process.import_directory, process.environment, process.directory
    seen = look(python, first=first, environment=environment, directory=directory)
    if seen.ours and not seen.error:
        return _silence("nothing_recorded", diagnoses.NOTHING_RECORDED.describe(python=python, calls=CALLS))
    if seen.path and not seen.ours:
        return _silence("shadowed", diagnoses.SHADOWED.describe(python=python, path=seen.path))
    error = f": {seen.error}" if seen.error else ""
    install = remedy(python, seen.site)
    return _silence(
        "not_installed", diagnoses.NOT_INSTALLED.describe(python=python, error=error, install=install)
    )


def main(arguments: Sequence[str]) -> int:
    """Diagnose one job, and report the result."""
    pid, feed_directory, run, started, path = arguments
    silence = silence_of(int(pid), run, Path(feed_directory))
    if silence is not None and Path(path).exists():  # otherwise the job has exited
        said = f"run {run} has recorded nothing in {SILENT_SECONDS:.0f} s"
        say(f"{said}: {silence.found}; remedy: {silence.remedy}")
        launch = ""
        with suppress(OSError, ValueError):
            launch = str(json.loads(Path(path).read_bytes())["launch"])
        job = json.dumps(dataclasses.asdict(Job(int(pid), run, float(started), silence, launch))).encode()
        with suppress(OSError):
            replace_file(path, job, temporary=f"{path}.tmp", mode=0o644)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
