"""Why a Python job under `run` has recorded nothing: a program of its own, asked once, that says it in one line.

It asks the job's interpreter, in the job's environment; its answer goes to stderr and into the run's file.
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
from pathlib import Path
from typing import NamedTuple

import psutil

from exporter.cli.flags import say
from exporter.errors import FeedError
from exporter.feed import runs
from exporter.feed.files import replace_file
from exporter.feed.reader import FeedReader
from exporter.feed.runs import SILENT_SECONDS, Job, Silence

PYTHON_SECONDS = 8.0
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


class Interpreter(NamedTuple):
    """What `import exporter` finds in an interpreter."""

    python: str = ""  # its version; "" where it does not answer
    path: str | None = None  # the file that is imported; None where there is none
    ours: bool = False  # whether it is this package
    version: str = ""  # of this package there
    site: str = ""  # where its packages lie
    error: str = ""  # what goes wrong; "" for nothing


class Process(NamedTuple):
    """A process of the job, with what it was started with and where it works."""

    pid: int
    command: Sequence[str]
    environment: Mapping[str, str]
    directory: str

    @property
    def interpreter(self) -> str | None:
        """The Python that runs it, as it was called, so that a virtual environment is seen; None for another program."""
        name = self.command[0] if self.command else ""
        if not os.path.basename(name).startswith(("python", "pypy")):  # noqa: PTH119  # no path of ours
            return None
        if "/" in name:
            return os.path.join(self.directory, name)  # noqa: PTH118  # as above
        return shutil.which(name, path=self.environment.get("PATH"))

    @property
    def import_directory(self) -> str:
        """The first place in which it looks for modules: the script's directory, else its own."""
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
    """Ask an interpreter what `import exporter` would find, in `first` and then on its path; imports our version only."""
    command = [python, "-c", _LOOK, first]
    try:
        answer = subprocess.run(  # the job's own interpreter
            command, env=environment, cwd=directory, capture_output=True, timeout=PYTHON_SECONDS, check=False
        )
        return Interpreter(**json.loads(answer.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return Interpreter(error=f"it cannot be asked: {error!r}")


def remedy(python: str, site: str) -> str:
    """How to give an interpreter this package, without an index and without a build."""
    root = PACKAGE.parent
    described = [*root.glob("training_exporter*.egg-info"), *root.glob("training_exporter-*.dist-info")]
    if (root / "pyproject.toml").exists():
        install = f"{python} -m pip install {root}"
        return f"{install}, or start the job with PYTHONPATH={root}" if described else install
    parts = (PACKAGE, root / "exporter_auto.py", root / "training_exporter.py", *described)
    return f"cp -r {' '.join(str(part) for part in parts)} {site or f'the site-packages of {python}'}"


def silence_of(pid: int, run: str, feed_directory: Path) -> Silence | None:
    """Why a job records nothing; None when it does or did, and when none of its processes is Python."""
    processes = _tree(pid)
    if runs.recording_processes(feed_directory) & {process.pid for process in processes}:
        return None
    with suppress(FeedError):
        scan = FeedReader(feed_directory).scan()
        if any(entry.snapshot.process.run == run for entry in scan.entries):  # a loop, between two scripts
            return None
    # The last: `conda run` and launchers are Python too, and start the one that trains.
    for process in reversed(processes):
        if python := process.interpreter:
            return _of_environment(process, python, feed_directory) or _of_interpreter(process, python)
    return None


def _tree(pid: int) -> list[Process]:
    """A process and its descendants, parents first; those that cannot be looked at are left out."""
    found: list[Process] = []
    with suppress(psutil.Error):
        top = psutil.Process(pid)
        for each in (top, *top.children(recursive=True)):
            with suppress(psutil.Error):
                found.append(Process(each.pid, each.cmdline(), each.environ(), each.cwd()))
    return found


def _of_environment(process: Process, python: str, feed_directory: Path) -> Silence | None:
    given, elsewhere = process.environment, "choose another with --feed.dir"
    if given.get("EXPORTER_DISABLED") == "1":
        return Silence("turned_off", f"EXPORTER_DISABLED=1 is set for {python}", "unset it for the job")
    if given.get("EXPORTER_AUTO") == "0":
        found = f"EXPORTER_AUTO=0 is set for {python}, and its code records nothing"
        return Silence("turned_off", found, "unset it for the job")
    if given.get("EXPORTER_FEED_DIR") != str(feed_directory):
        wanted = f"pass EXPORTER_AUTO=1 and EXPORTER_FEED_DIR={feed_directory} on to it"
        return Silence("environment", f"{python} was started without the environment of `run`", wanted)
    try:
        full = os.statvfs(feed_directory).f_bavail == 0
    except OSError as error:
        return Silence("feed_directory", f"{feed_directory}: {error.strerror}", elsewhere)
    if full:
        return Silence("feed_directory", f"{feed_directory} is full", f"free some space, or {elsewhere}")
    if not _may_write(feed_directory, process.pid):
        found = f"{feed_directory} is not writable for the job's user"
        return Silence("feed_directory", found, f"give it write access, or {elsewhere}")
    return None


def _may_write(directory: Path, pid: int) -> bool:
    """Whether the user of a process may create files there; ours is asked of the kernel, another's of the mode."""
    with suppress(OSError):
        user, found = Path(f"/proc/{pid}").stat().st_uid, directory.stat()
        if user not in {0, os.geteuid()}:
            return bool(found.st_mode & (0o200 if found.st_uid == user else 0o022))
    return os.access(directory, os.W_OK | os.X_OK)


def _of_interpreter(process: Process, python: str) -> Silence:
    first, environment, directory = process.import_directory, process.environment, process.directory
    seen = look(python, first=first, environment=environment, directory=directory)
    if seen.ours and not seen.error:
        found = (
            f"{python} has training-exporter, but no optimizer, loader, Stat or training call has come yet"
        )
        wanted = "docs/bridges.md says what is recorded automatically and what needs a call"
        return Silence("nothing_told", found, wanted)
    if seen.path and not seen.ours:
        found = f"{python} imports {seen.path} as `exporter`, in place of training-exporter"
        return Silence("shadowed", found, "rename that file or folder")
    why = f": {seen.error}" if seen.error else ""
    found = f"training-exporter is not installed for {python}{why}"
    return Silence("not_installed", found, remedy(python, seen.site))


def main(arguments: Sequence[str]) -> int:
    """Ask about one job, and tell what is found."""
    pid, feed_directory, run, started, path = arguments
    silence = silence_of(int(pid), run, Path(feed_directory))
    if silence is not None and Path(path).exists():  # else the job has ended meanwhile
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
